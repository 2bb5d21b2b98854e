{{/* The models of the values, where their folders come from, and how pods get at them. */}}

{{/* The models, completed by modelDefaults, by key, as YAML. Takes the root. */}}
{{- define "quire.models" -}}
{{- $models := dict -}}
{{- range $key, $given := .Values.models -}}
{{- /* A release that was installed before a value was added does not have it, with --reuse-values. */ -}}
{{- $added := dict "pipelineParallelSize" 1 "nodes" 1 -}}
{{- $model := mergeOverwrite $added (deepCopy $.Values.modelDefaults) (deepCopy $given) -}}
{{- range $name := list "source" "tokenizer" -}}
{{- $_ := set $model $name (include "quire.withoutNulls" (get $model $name | default dict) | fromYaml) -}}
{{- end -}}
{{- $_ := set $models $key $model -}}
{{- end -}}
{{- $of := dict -}}
{{- range $key, $model := $models -}}
{{- $name := include "quire.servedName" (dict "key" $key "model" $model) -}}
{{- $_ := set $of $name (append (get $of $name | default list) $key) -}}
{{- end -}}
{{- range $key, $model := $models -}}
{{- $name := include "quire.servedName" (dict "key" $key "model" $model) -}}
{{- $weighted := not (and (kindIs "invalid" $model.weight) (kindIs "invalid" $model.shadowPercent)) -}}
{{- $_ := set $model "isTarget" (or (gt (len (get $of $name)) 1) $weighted) -}}
{{- end -}}
{{- toYaml $models -}}
{{- end -}}

{{/* A map without the keys that a later file of values set to null. */}}
{{- define "quire.withoutNulls" -}}
{{- $kept := dict -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}{{- $_ := set $kept $key $value -}}{{- end -}}
{{- end -}}
{{- toYaml $kept -}}
{{- end -}}

{{/* The name that clients ask for. Takes key and model. */}}
{{- define "quire.servedName" -}}
{{- default .key .model.servedName -}}
{{- end -}}

{{/* The name by which routers and engines know a model: that of clients, unless several models are targets of it. Takes key and model. */}}
{{- define "quire.modelName" -}}
{{- ternary .key (include "quire.servedName" .) .model.isTarget -}}
{{- end -}}

{{/* What is behind each name with targets, as routers read it, or nothing. Takes the root. */}}
{{- define "quire.targets" -}}
{{- $groups := dict -}}
{{- range $key, $model := include "quire.models" . | fromYaml -}}
{{- if $model.isTarget -}}
{{- $name := include "quire.servedName" (dict "key" $key "model" $model) -}}
{{- $group := get $groups $name | default (dict "targets" list) -}}
{{- if kindIs "invalid" $model.shadowPercent -}}
{{- $weight := ternary 1 (int $model.weight) (kindIs "invalid" $model.weight) -}}
{{- $_ := set $group "targets" (append $group.targets (dict "model" $key "weight" $weight)) -}}
{{- else -}}
{{- $_ := set $group "shadow" (dict "model" $key "percent" $model.shadowPercent) -}}
{{- end -}}
{{- $_ := set $groups $name $group -}}
{{- end -}}
{{- end -}}
{{- if $groups -}}{{- dict "models" $groups | toJson -}}{{- end -}}
{{- end -}}

{{/* The folder of a model in a pod. Takes key and source. */}}
{{- define "quire.folder" -}}
{{- if hasKey .source "path" -}}
{{- .source.path -}}
{{- else -}}
{{- $place := values .source | first -}}
{{- printf "/models/%s/%s" .key (default "" $place.folder) | trimSuffix "/" -}}
{{- end -}}
{{- end -}}

{{/* The volume of a model, if it needs one. Takes key and source. */}}
{{- define "quire.modelVolume" -}}
{{- with .source.pvc }}
- name: model-{{ $.key }}
  persistentVolumeClaim:
    claimName: {{ .claimName | quote }}
    readOnly: true
{{- end }}
{{- with .source.image }}
- name: model-{{ $.key }}
  image:
    reference: {{ include "quire.fixed" (dict "path" (printf "models.%s.source.image.reference" $.key) "image" .reference) | quote }}
    pullPolicy: {{ default "IfNotPresent" .pullPolicy }}
{{- end }}
{{- with .source.download }}
- name: model-{{ $.key }}
  {{- if .claimName }}
  persistentVolumeClaim:
    claimName: {{ .claimName | quote }}
  {{- else }}
  emptyDir:
    sizeLimit: {{ default "200Gi" .sizeLimit }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where a container mounts a model. Takes key, source and writable. */}}
{{- define "quire.modelMount" -}}
{{- if not (hasKey .source "path") }}
- name: model-{{ .key }}
  mountPath: /models/{{ .key }}
  readOnly: {{ not .writable }}
{{- end }}
{{- end -}}

{{/* The container that downloads a model before the others start, if it is downloaded. Takes root, key, source, image,
     values (those of the component) and, where not all is needed, patterns of files. */}}
{{- define "quire.download" -}}
{{- with .source.download }}
- name: download-{{ $.key }}
  image: {{ $.image | quote }}
  imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  command: [python, -c]
  args:
    - {{ $.root.Files.Get "files/download.py" | quote }}
    - {{ .repository | quote }}
    - {{ .revision | quote }}
    - {{ include "quire.folder" $ }}
    {{- range (default (list) $.patterns) }}
    - {{ . | quote }}
    {{- end }}
  env:
    - name: HOME
      value: /tmp
    - name: HF_HUB_OFFLINE
      value: "0"
    - name: HF_HUB_DISABLE_TELEMETRY
      value: "1"
    # Nothing is downloaded twice, and /tmp is small.
    - name: HF_XET_CHUNK_CACHE_SIZE_BYTES
      value: "0"
    {{- with .endpoint }}
    - name: HF_ENDPOINT
      value: {{ . | quote }}
    {{- end }}
    {{- with .tokenSecret }}
    - name: HF_TOKEN
      valueFrom:
        secretKeyRef:
          name: {{ . | quote }}
          key: HF_TOKEN
    {{- end }}
    {{- with include "quire.trustSettings" $.root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "quire.variables" (dict "root" $.root "env" $.values.env) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
  {{- with $.values.envFrom }}
  envFrom:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  resources:
    {{- $usual := dict "requests" (dict "cpu" "500m" "memory" "512Mi") "limits" (dict "memory" "2Gi") }}
    {{- toYaml (mergeOverwrite $usual (deepCopy (default dict $.values.downloadResources))) | nindent 4 }}
  securityContext:
    {{- include "quire.containerSecurity" true | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
    {{- include "quire.modelMount" (dict "key" $.key "source" $.source "writable" true) | trim | nindent 4 }}
    {{- with include "quire.trustMount" $.root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
{{- end }}
{{- end -}}

{{/* Where the router finds a model's tokenizer. What it downloads is small, however large the model is. Takes the model. */}}
{{- define "quire.tokenizerSource" -}}
{{- $source := deepCopy (default .source .tokenizer) -}}
{{- with $source.download -}}
{{- if not .claimName -}}
{{- $_ := set . "sizeLimit" (default "256Mi" (default dict $.tokenizer.download).sizeLimit) -}}
{{- end -}}
{{- end -}}
{{- toYaml $source -}}
{{- end -}}
