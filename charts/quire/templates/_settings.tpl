{{/* How values become environment variables. */}}

{{/* A number or a word as a program reads it: numbers of values are floating, and large ones would have an exponent. */}}
{{- define "quire.scalar" -}}
{{- if kindIs "float64" . -}}
{{- ternary (printf "%.0f" .) (printf "%v" .) (eq . (floor .)) -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* An entry of a container's env for each setting that is not null. Takes prefix and settings (in camel case). */}}
{{- define "quire.settings" -}}
{{- $prefix := .prefix -}}
{{- range $name, $value := .settings -}}
{{- if not (kindIs "invalid" $value) }}
- name: {{ $prefix }}{{ snakecase $name | upper }}
  value: {{ include "quire.scalar" $value | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An entry of a container's env for each variable of a map. */}}
{{- define "quire.variables" -}}
{{- range $name, $value := . }}
{{- if hasPrefix "QUIRE_" $name -}}
{{- fail (printf "env has %s: what begins with QUIRE_ is set by the chart; use the values that are there for it, such as flags." $name) -}}
{{- end }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* The env of tracing. Takes the root. */}}
{{- define "quire.tracing" -}}
{{- with .Values.telemetry -}}
{{- if .otlpEndpoint }}
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ .otlpEndpoint | quote }}
- name: OTEL_TRACES_SAMPLER
  value: {{ .sampler | quote }}
- name: OTEL_TRACES_SAMPLER_ARG
  value: {{ .samplerArgument | quote }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: {{ include "quire.resourceAttributes" $ | quote }}
{{- with .headersSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef:
      name: {{ . }}
      key: {{ $.Values.telemetry.headersKey }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* What traces say of where they come from. Takes the root. */}}
{{- define "quire.resourceAttributes" -}}
k8s.namespace.name={{ .Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- range $name, $value := .Values.telemetry.resourceAttributes -}}
,{{ $name }}={{ $value }}
{{- end -}}
{{- end -}}
