{{/* Authorities that are trusted besides, or instead of, those of the images. */}}

{{/* Whether there are any. Takes the root. */}}
{{- define "quire.hasTrust" -}}
{{- with .Values.trust -}}{{- if or .configMap .existingSecret -}}true{{- end -}}{{- end -}}
{{- end -}}

{{/* The env that leads to them: what each library reads that opens a connection to somewhere else. Takes the root. */}}
{{- define "quire.trustSettings" -}}
{{- if include "quire.hasTrust" . -}}
{{- range $name := list "SSL_CERT_FILE" "OTEL_EXPORTER_OTLP_CERTIFICATE" }}
- name: {{ $name }}
  value: /etc/quire/trust/ca.crt
{{- end }}
{{- end -}}
{{- end -}}

{{/* Where a container finds them. Takes the root. */}}
{{- define "quire.trustMount" -}}
{{- if include "quire.hasTrust" . }}
- name: trust
  mountPath: /etc/quire/trust
  readOnly: true
{{- end }}
{{- end -}}

{{/* The volume that has them. Takes the root. */}}
{{- define "quire.trustVolume" -}}
{{- if include "quire.hasTrust" . }}
{{- with .Values.trust }}
{{- $items := list (dict "key" (default "ca.crt" .key) "path" "ca.crt") }}
- name: trust
  {{- if .configMap }}
  configMap:
    name: {{ .configMap | quote }}
    defaultMode: 0444
    items:
      {{- toYaml $items | nindent 6 }}
  {{- else }}
  secret:
    secretName: {{ .existingSecret | quote }}
    defaultMode: 0440
    items:
      {{- toYaml $items | nindent 6 }}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}
