{{/* What pods have in common: times, security, and where they may run. */}}

{{/* The seconds between SIGTERM and SIGKILL: the time that the process may take to shut down, and a margin. Takes shutdownDelay and shutdownTimeout. */}}
{{- define "quire.grace" -}}
{{- add (ceil .shutdownDelay) (ceil .shutdownTimeout) 15 -}}
{{- end -}}

{{/* How often a probe may fail, for a number of seconds. Takes seconds and period. */}}
{{- define "quire.failures" -}}
{{- max 1 (ceil (divf .seconds .period)) -}}
{{- end -}}

{{/* Whether the cluster is OpenShift. Takes the root. */}}
{{- define "quire.isOpenShift" -}}
{{- $given := ternary "auto" (toString .Values.openshift) (kindIs "invalid" .Values.openshift) -}}
{{- if or (eq $given "true") (and (eq $given "auto") (.Capabilities.APIVersions.Has "security.openshift.io/v1")) -}}true{{- end -}}
{{- end -}}

{{/* The security context of a pod. Its ids are those of runAsUser and runAsGroup, but for OpenShift, which refuses ids that it did
     not choose. Takes root and ids (the values that have the two). */}}
{{- define "quire.podSecurity" -}}
runAsNonRoot: true
{{- if not (include "quire.isOpenShift" .root) }}
{{- with .ids.runAsUser }}
runAsUser: {{ int64 . }}
{{- end }}
{{- with .ids.runAsGroup }}
runAsGroup: {{ int64 . }}
fsGroup: {{ int64 . }}
{{- end }}
{{- end }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* The security context of a container. Takes whether its root is read only. */}}
{{- define "quire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: {{ . }}
capabilities:
  drop: [ALL]
{{- end -}}

{{/* The resources of a container. Where they say nothing of ephemeral-storage, the container requests what the pod may write to the
     disk of its node. Takes resources, sizes (quantities) and volumes (further ones of the values). */}}
{{- define "quire.resources" -}}
{{- $resources := deepCopy .resources -}}
{{- $sizes := .sizes -}}
{{- range .volumes -}}
{{- if and .emptyDir (ne (default "" .emptyDir.medium) "Memory") -}}{{- $sizes = append $sizes .emptyDir.sizeLimit -}}{{- end -}}
{{- end -}}
{{- $given := merge (dict) (default dict $resources.requests) (default dict $resources.limits) -}}
{{- if and $sizes (not (hasKey $given "ephemeral-storage")) -}}
{{- $bytes := 0.0 -}}
{{- range $sizes -}}{{- $bytes = addf $bytes (include "quire.number" . | float64) -}}{{- end -}}
{{- $storage := dict "ephemeral-storage" (printf "%dMi" (divf $bytes 1048576 | ceil | int64)) -}}
{{- $_ := set $resources "requests" (merge $storage (default dict $resources.requests)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Where a pod may run. Takes root, component, key and placement (the values of a component). */}}
{{- define "quire.scheduling" -}}
{{- with .placement.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- /* Zones are preferred by anti-affinity and not spread over: where no node has a zone's label, the scheduler would leave all nodes out of the spreading over host names too. */}}
{{- $affinity := deepCopy (.placement.affinity | default dict) }}
{{- if and .placement.topologySpread (not (hasKey $affinity "podAntiAffinity")) }}
{{- $zone := dict "topologyKey" "topology.kubernetes.io/zone" "labelSelector" (dict "matchLabels" (include "quire.selector" . | fromYaml)) }}
{{- $preferred := list (dict "weight" 100 "podAffinityTerm" $zone) }}
{{- $_ := set $affinity "podAntiAffinity" (dict "preferredDuringSchedulingIgnoredDuringExecution" $preferred) }}
{{- end }}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.topologySpread }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml . | nindent 4 | trim }}
    labelSelector:
      matchLabels:
        {{- include "quire.selector" $ | nindent 8 }}
    {{- if not (hasKey . "matchLabelKeys") }}
    # Each revision by itself: while pods are replaced, those that leave would push all new ones onto the other nodes.
    matchLabelKeys: [pod-template-hash]
    {{- end }}
  {{- end }}
{{- end }}
{{- with .placement.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}
