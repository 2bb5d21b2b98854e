{{/* TLS between routers and engines: where the Secrets are and how the services are told. */}}

{{/* The name that engines' certificates have, and that routers look for. Takes the root. */}}
{{- define "quire.tlsName" -}}
{{ include "quire.host" (dict "root" . "name" (printf "%s-engine" (include "quire.fullname" .))) }}
{{- end -}}

{{/* The Secret with a component's certificate. Takes root and component. */}}
{{- define "quire.tlsSecret" -}}
{{- if eq .root.Values.tls.mode "existingSecret" -}}
{{- get .root.Values.tls.existingSecret .component -}}
{{- else -}}
{{- include "quire.fullname" .root }}-{{ .component }}-tls
{{- end -}}
{{- end -}}

{{/* The env of a component. Takes root and component. */}}
{{- define "quire.tlsSettings" -}}
{{- if ne .root.Values.tls.mode "off" -}}
{{- if eq .component "engine" }}
- name: QUIRE_ENGINE_TLS_CERT
  value: /etc/quire/tls/tls.crt
- name: QUIRE_ENGINE_TLS_KEY
  value: /etc/quire/tls/tls.key
- name: QUIRE_ENGINE_TLS_CLIENT_CA
  value: /etc/quire/tls/ca.crt
{{- else }}
- name: QUIRE_ROUTER_ENGINE_TLS_CERT
  value: /etc/quire/tls/tls.crt
- name: QUIRE_ROUTER_ENGINE_TLS_KEY
  value: /etc/quire/tls/tls.key
- name: QUIRE_ROUTER_ENGINE_TLS_CA
  value: /etc/quire/tls/ca.crt
- name: QUIRE_ROUTER_ENGINE_TLS_NAME
  value: {{ include "quire.tlsName" .root }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Where a container finds its certificate. Takes root and component. */}}
{{- define "quire.tlsMount" -}}
{{- if ne .root.Values.tls.mode "off" }}
- name: tls
  mountPath: /etc/quire/tls
  readOnly: true
{{- end }}
{{- end -}}

{{/* The volume of a component's certificate. Takes root and component. */}}
{{- define "quire.tlsVolume" -}}
{{- if ne .root.Values.tls.mode "off" }}
- name: tls
  secret:
    secretName: {{ include "quire.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Whether cert-manager makes a certificate. Takes the root. */}}
{{- define "quire.certManager" -}}
{{- $scaling := and (eq .Values.autoscaling.mode "hpa") (eq .Values.autoscaling.hpa.certificate "certManager") -}}
{{- if or (eq .Values.tls.mode "certManager") $scaling -}}true{{- end -}}
{{- end -}}

{{/* Whether it does so with an authority of the release's own. Takes the root. */}}
{{- define "quire.ownIssuer" -}}
{{- if and (include "quire.certManager" .) (not .Values.tls.certManager.issuerRef.name) -}}true{{- end -}}
{{- end -}}

{{/* Who signs the certificates that cert-manager makes. Takes the root. */}}
{{- define "quire.issuerRef" -}}
{{- $issuer := .Values.tls.certManager.issuerRef -}}
name: {{ default (printf "%s-ca" (include "quire.fullname" .)) $issuer.name }}
kind: {{ ternary $issuer.kind "Issuer" (ne $issuer.name "") }}
group: {{ ternary $issuer.group "cert-manager.io" (ne $issuer.name "") }}
{{- end -}}
