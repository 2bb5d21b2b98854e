{{/* The token that engines ask routers for: its Secret, and the services' flags for it. */}}

{{/* The Secret with the tokens. Takes the root. */}}
{{- define "quire.engineTokenSecret" -}}
{{- default (printf "%s-engine-token" (include "quire.fullname" .)) (default dict .Values.engineToken).existingSecret -}}
{{- end -}}

{{/* The env of a component. Takes component. */}}
{{- define "quire.engineTokenSettings" }}
- name: {{ ternary "QUIRE_ENGINE_ENGINE_TOKEN_FILE" "QUIRE_ROUTER_ENGINE_TOKEN_FILE" (eq .component "engine") }}
  value: /etc/quire/engine-token/tokens
{{- end -}}

{{/* Where a container finds the tokens. */}}
{{- define "quire.engineTokenMount" }}
- name: engine-token
  mountPath: /etc/quire/engine-token
  readOnly: true
{{- end -}}

{{/* The volume of the tokens. Takes the root. */}}
{{- define "quire.engineTokenVolume" }}
- name: engine-token
  secret:
    secretName: {{ include "quire.engineTokenSecret" . | quote }}
    defaultMode: 0440
    items:
      - key: {{ default "tokens" (default dict .Values.engineToken).key | quote }}
        path: tokens
{{- end -}}
