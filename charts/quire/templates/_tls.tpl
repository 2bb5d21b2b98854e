{{/* TLS between routers and engines: the Secrets, and the services' flags for them. */}}

{{/* The name in engines' certificates, which routers check. Takes the root. */}}
{{- define "quire.tlsName" -}}
{{ include "quire.host" (dict "root" . "name" (printf "%s-engine" (include "quire.fullname" .))) }}
{{- end -}}

{{/* The Secret with the certificate of a side: engine, router (as a client of engines), keda (what routers show to KEDA) or
     kedaClient (what KEDA shows to them). Takes root and component. */}}
{{- define "quire.tlsSecret" -}}
{{- if eq .root.Values.tls.mode "existingSecret" -}}
{{- get .root.Values.tls.existingSecret .component -}}
{{- else -}}
{{- include "quire.fullname" .root }}-{{ kebabcase .component }}-tls
{{- end -}}
{{- end -}}

{{/* Whether KEDA's connections to routers use TLS. Takes the root. */}}
{{- define "quire.kedaTls" -}}
{{- if and (eq .Values.autoscaling.mode "keda") (ne .Values.tls.mode "off") -}}true{{- end -}}
{{- end -}}

{{/* The Secrets of two sides that trust each other. Made at the first install, both with one authority whose key is not kept, and
     kept over upgrades. Takes root, authority (its common name) and sides: for each its component and the names of its certificate. */}}
{{- define "quire.certificates" -}}
{{- $root := .root -}}
{{- $there := dict -}}
{{- range .sides -}}
{{- with lookup "v1" "Secret" $root.Release.Namespace (include "quire.tlsSecret" (dict "root" $root "component" .component)) -}}
{{- $_ := set $there .metadata.name .data -}}
{{- end -}}
{{- end -}}
{{- $kept := eq (len $there) (len .sides) -}}
{{- $days := int $root.Values.tls.validityDays -}}
{{- $authority := ternary dict (genCA .authority $days) $kept -}}
{{- range .sides }}
{{- $name := include "quire.tlsSecret" (dict "root" $root "component" .component) }}
{{- $data := get $there $name }}
{{- if not $kept }}
{{- $made := genSignedCert (printf "%s-%s" (include "quire.fullname" $root) (kebabcase .component)) nil .names $days $authority }}
{{- $data = dict "ca.crt" ($authority.Cert | b64enc) "tls.crt" ($made.Cert | b64enc) "tls.key" ($made.Key | b64enc) }}
{{- end }}
---
apiVersion: v1
kind: Secret
metadata:
  name: {{ $name | quote }}
  namespace: {{ $root.Release.Namespace | quote }}
  labels:
    {{- include "quire.labels" (dict "root" $root "component" (ternary "engine" "router" (eq .component "engine"))) | nindent 4 }}
type: kubernetes.io/tls
data:
  {{- range $file := list "ca.crt" "tls.crt" "tls.key" }}
  {{ $file }}: {{ get $data $file }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* A certificate that cert-manager makes. Takes root, component, name (of the side, as part of the object's), names (DNS) and
     usage. */}}
{{- define "quire.certificate" -}}
{{- $certManager := .root.Values.tls.certManager -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ include "quire.fullname" .root }}-{{ .name }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- include "quire.labels" (dict "root" .root "component" .component) | nindent 4 }}
spec:
  secretName: {{ .secret | quote }}
  duration: {{ $certManager.duration }}
  renewBefore: {{ $certManager.renewBefore }}
  dnsNames:
    {{- toYaml .names | nindent 4 }}
  usages: [digital signature, {{ .usage }}]
  privateKey:
    algorithm: ECDSA
    size: 256
    rotationPolicy: Always
  issuerRef:
    {{- include "quire.issuerRef" .root | nindent 4 }}
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
{{- if .root.Values.tls.optional }}
- name: QUIRE_ENGINE_TLS_OPTIONAL
  value: "true"
{{- end }}
{{- else }}
- name: QUIRE_ROUTER_ENGINE_TLS_CERT
  value: /etc/quire/tls/tls.crt
- name: QUIRE_ROUTER_ENGINE_TLS_KEY
  value: /etc/quire/tls/tls.key
- name: QUIRE_ROUTER_ENGINE_TLS_CA
  value: /etc/quire/tls/ca.crt
- name: QUIRE_ROUTER_ENGINE_TLS_NAME
  value: {{ include "quire.tlsName" .root }}
{{- if .root.Values.tls.optional }}
- name: QUIRE_ROUTER_ENGINE_TLS_OPTIONAL
  value: "true"
{{- end }}
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
    secretName: {{ include "quire.tlsSecret" . | quote }}
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
