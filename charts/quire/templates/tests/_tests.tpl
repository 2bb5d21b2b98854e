{{/* What the pods of helm test have in common. */}}

{{/* The key of the model that is asked. Takes the root. */}}
{{- define "quire.testedModel" -}}
{{- default (keys .Values.models | sortAlpha | first) .Values.tests.model -}}
{{- end -}}

{{/* Where to look when nothing answers, and the values that say what pods need. Takes root, key and model. */}}
{{- define "quire.testHint" -}}
{{- $path := printf "models.%s" .key -}}
{{- $source := "" -}}
{{- with .model.source.pvc }}{{ $source = printf "the claim %s (%s.source.pvc.claimName)" .claimName $path }}{{ end -}}
{{- with .model.source.image }}{{ $source = printf "the image %s (%s.source.image.reference)" .reference $path }}{{ end -}}
{{- with .model.source.download }}{{ $source = printf "%s (%s.source.download)" .repository $path }}{{ end -}}
{{- with .model.source.path }}{{ $source = printf "the folder %s of its image (%s.source.path)" . $path }}{{ end -}}
{{- $memory := get (default dict .model.resources.limits) "memory" | default "none" -}}
{{- printf "See why with: kubectl -n %s describe pods -l app.kubernetes.io/instance=%s\n" .root.Release.Namespace .root.Release.Name -}}
{{- printf "An engine needs the image %s (image.registry, engine.image), %s, " (include "quire.engineImage" (dict "root" .root "model" .model)) $source -}}
{{- printf "and a memory limit above its weights (%s.resources.limits.memory is %v); a router needs the image %s " $path $memory (include "quire.routerImage" .root) -}}
{{- printf "(image.registry, router.image)%s." (eq .root.Values.router.discovery "kubernetes" | ternary ", and the right to read EndpointSlices (none with router.discovery: dns)" "") -}}
{{- end -}}

{{/* A pod that runs a script of files/tests. Takes root and api (rest or grpc). */}}
{{- define "quire.testPod" -}}
{{- /* Rendered before validation.yaml, and lost without a model. */ -}}
{{- include "quire.validate" .root -}}
{{- /* helm lint reports what fails there, and renders on. */ -}}
{{- if .root.Values.models -}}
{{- $of := dict "root" .root "component" "test" -}}
{{- $values := .root.Values -}}
{{- $fullname := include "quire.fullname" .root -}}
{{- $key := include "quire.testedModel" .root -}}
{{- $model := get (include "quire.models" .root | fromYaml) $key -}}
apiVersion: v1
kind: Pod
metadata:
  name: {{ $fullname }}-test-{{ .api }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "quire.labels" $of | nindent 4 }}
  annotations:
    helm.sh/hook: test
    helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
spec:
  restartPolicy: Never
  serviceAccountName: {{ $fullname }}-router
  automountServiceAccountToken: false
  enableServiceLinks: false
  securityContext:
    {{- include "quire.podSecurity" (dict "root" .root "ids" $values.security) | nindent 4 }}
  {{- include "quire.scheduling" (merge (dict "placement" $values.tests) $of) | trim | nindent 2 }}
  containers:
    - name: {{ .api }}
      image: {{ include "quire.routerImage" .root | quote }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      terminationMessagePolicy: FallbackToLogsOnError
      command: [python, -c]
      args:
        - {{ .root.Files.Get (printf "files/tests/%s.py" .api) | quote }}
      env:
        - name: ADDRESS
          value: {{ include "quire.host" (dict "root" .root "name" (printf "%s-router" $fullname)) }}:{{ ternary 8000 8001 (eq .api "rest") }}
        - name: MODEL
          value: {{ include "quire.servedName" (dict "key" $key "model" $model) | quote }}
        - name: SECONDS_TO_WAIT
          value: {{ include "quire.scalar" $values.tests.timeoutSeconds | quote }}
        - name: HINT
          value: {{ include "quire.testHint" (dict "root" .root "key" $key "model" $model) | quote }}
        - name: AUTH_MODE
          value: {{ $values.router.auth.mode }}
        {{- if eq $values.router.auth.mode "generated" }}
        - name: API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ $fullname }}-api-keys
              key: api-keys
        {{- else if and (eq $values.router.auth.mode "existing") $values.tests.apiKeySecret }}
        - name: API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ $values.tests.apiKeySecret | quote }}
              key: {{ $values.tests.apiKeyKey | quote }}
        {{- else if and (eq $values.router.auth.mode "existing") $values.router.auth.apiKeysKey }}
        - name: API_KEY
          valueFrom:
            secretKeyRef:
              name: {{ $values.router.auth.existingSecret | quote }}
              key: {{ $values.router.auth.apiKeysKey | quote }}
        {{- end }}
      resources:
        {{- /* Upgrades that reuse the values of a release before this one have none. */}}
        {{- toYaml (default (dict "requests" (dict "cpu" "100m" "memory" "128Mi") "limits" (dict "memory" "256Mi")) $values.tests.resources) | nindent 8 }}
      securityContext:
        {{- include "quire.containerSecurity" true | nindent 8 }}
{{- end -}}
{{- end -}}
