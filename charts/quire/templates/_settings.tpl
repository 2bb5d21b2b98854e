{{/* How values become environment variables. */}}

{{/* A number, a word or a list as a program reads it. Numbers of values are floating, and large ones would have an exponent; lists
     have commas. */}}
{{- define "quire.scalar" -}}
{{- if kindIs "slice" . -}}
{{- join "," . -}}
{{- else if kindIs "float64" . -}}
{{- ternary (printf "%.0f" .) (printf "%v" .) (eq . (floor .)) -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{/* An entry of a container's env for each setting that is not null. Takes prefix and settings (in camel case). Digits are
     part of the word before them, as in all2AllBackend, which snakecase would divide. */}}
{{- define "quire.settings" -}}
{{- $prefix := .prefix -}}
{{- range $name, $value := .settings -}}
{{- if not (kindIs "invalid" $value) }}
- name: {{ $prefix }}{{ regexReplaceAll "([a-z])([A-Z])" $name "${1}_${2}" | upper }}
  value: {{ include "quire.scalar" $value | quote }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* An entry of a container's env for each variable of a map; and where one names a proxy, and none says what it is not for, one
     that says so: the cluster. Takes root and env. */}}
{{- define "quire.variables" -}}
{{- $names := keys (default dict .env) | join " " | upper -}}
{{- range $name, $value := .env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- if and (regexMatch "(HTTPS?|ALL)_PROXY" $names) (not (contains "NO_PROXY" $names)) }}
{{- range list "NO_PROXY" "no_proxy" }}
- name: {{ . }}
  value: localhost,127.0.0.1,.svc,.{{ $.root.Values.clusterDomain }},{{ with include "quire.tracingHost" $.root }}{{ . }},{{ end }}$(KUBERNETES_SERVICE_HOST),10.0.0.0/8,172.16.0.0/12,192.168.0.0/16
{{- end }}
{{- end }}
{{- end -}}

{{/* The host of the collector of traces, if there is one: in the cluster a name may have two parts, which no pattern covers. Takes
     the root. */}}
{{- define "quire.tracingHost" -}}
{{- with .Values.telemetry.otlpEndpoint -}}
{{- regexReplaceAll "^(?:[a-z]+://)?(?:\\[([^]]*)\\]|([^:/]*)).*$" . "${1}${2}" -}}
{{- end -}}
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
      name: {{ . | quote }}
      key: {{ $.Values.telemetry.headersKey | quote }}
{{- end }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* The resource attributes of traces. Takes the root. */}}
{{- define "quire.resourceAttributes" -}}
k8s.namespace.name={{ .Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- range $name, $value := .Values.telemetry.resourceAttributes -}}
,{{ $name }}={{ $value }}
{{- end -}}
{{- end -}}
