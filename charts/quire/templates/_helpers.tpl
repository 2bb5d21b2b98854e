{{/* What all objects have: names and labels. */}}

{{/* The name that all objects begin with. A release's name may have dots, and a Service's none. Takes the root. */}}
{{- define "quire.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $made := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default (replace "." "-" $made) .Values.fullnameOverride -}}
{{- end -}}

{{/* The name of a model's engines. Takes root and key. Names of Services have at most 63 characters. */}}
{{- define "quire.engineName" -}}
{{- $name := printf "%s-engine-%s" (include "quire.fullname" .root) .key -}}
{{- if gt (len $name) 63 -}}
{{- fail (printf "The name %s has %d characters and may have 63: shorten the release's name (or fullnameOverride) or the key models.%s." $name (len $name) .key) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* Labels that choose a component's pods; they never change over upgrades. Takes root, component and, of an engine, key. */}}
{{- define "quire.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .key }}
quire.dev/model: {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Labels of an object. Takes what quire.selector takes, and extra. */}}
{{- define "quire.labels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: quire
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name (replace "+" "_" .root.Chart.Version) | trunc 63 | trimSuffix "-" }}
{{- include "quire.furtherLabels" . }}
{{- end -}}

{{/* Labels that values give to objects, each once. Takes root and extra, which counts more than what all objects have. */}}
{{- define "quire.furtherLabels" -}}
{{- with merge (dict) (default dict .extra) (default dict .root.Values.commonLabels) }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Labels of a pod. What changes with every version of the chart is not among them: it would start all pods anew. Takes what
     quire.selector takes, and extra. */}}
{{- define "quire.podLabels" -}}
{{ include "quire.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: quire
{{- include "quire.furtherLabels" . }}
{{- end -}}

{{/* The DNS name of a Service. Takes root and name. */}}
{{- define "quire.host" -}}
{{ .name }}.{{ .root.Release.Namespace }}.svc
{{- end -}}
