{{/* What only routers need. */}}

{{/* The models that routers serve: name and folder of each, with commas between them. Takes the root. */}}
{{- define "quire.routerModels" -}}
{{- $entries := list -}}
{{- range $key, $model := include "quire.models" . | fromYaml -}}
{{- $source := include "quire.tokenizerSource" $model | fromYaml -}}
{{- $folder := include "quire.folder" (dict "key" $key "source" $source) -}}
{{- $entries = append $entries (printf "%s=%s" (include "quire.modelName" (dict "key" $key "model" $model)) $folder) -}}
{{- end -}}
{{- join "," $entries -}}
{{- end -}}

{{/* Where routers look for engines, with commas between them. Takes the root. */}}
{{- define "quire.routerEngines" -}}
{{- $entries := list -}}
{{- range $key, $_ := .Values.models -}}
{{- $name := include "quire.engineName" (dict "root" $ "key" $key) -}}
{{- if eq $.Values.router.discovery "kubernetes" -}}
{{- $entries = append $entries (printf "kubernetes://%s/%s:grpc" $.Release.Namespace $name) -}}
{{- else -}}
{{- $entries = append $entries (printf "dns://%s.%s.svc.%s.:9000" $name $.Release.Namespace $.Values.clusterDomain) -}}
{{- end -}}
{{- end -}}
{{- join "," (concat $entries (default (list) .Values.router.engines)) -}}
{{- end -}}

{{/* Fewest routers, where they are scaled. Takes the root. */}}
{{- define "quire.routerMinReplicas" -}}
{{- default 2 .Values.router.autoscaling.minReplicas | int -}}
{{- end -}}

{{/* Whether a model may have no engine at all. Takes the root. */}}
{{- define "quire.scalesToZero" -}}
{{- range $key, $model := include "quire.models" . | fromYaml -}}
{{- if and (include "quire.isScaled" (dict "root" $ "model" $model)) (eq (int $model.autoscaling.minReplicas) 0) -}}true{{- end -}}
{{- end -}}
{{- end -}}

{{/* Seconds that requests wait while no engine is ready. Takes the root. */}}
{{- define "quire.holdTimeout" -}}
{{- $given := .Values.router.limits.holdTimeout -}}
{{- if kindIs "invalid" $given -}}
{{- ternary 10 300 (empty (include "quire.scalesToZero" .)) -}}
{{- else -}}
{{- include "quire.scalar" $given -}}
{{- end -}}
{{- end -}}

{{/* The env of authentication. Takes the root. */}}
{{- define "quire.authSettings" -}}
{{- $auth := .Values.router.auth -}}
{{- if eq $auth.mode "generated" }}
- name: QUIRE_ROUTER_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ include "quire.fullname" . }}-api-keys
      key: api-keys
{{- else if eq $auth.mode "existing" }}
{{- with $auth.apiKeysKey }}
- name: QUIRE_ROUTER_API_KEY
  valueFrom:
    secretKeyRef:
      name: {{ $auth.existingSecret | quote }}
      key: {{ . | quote }}
{{- end }}
{{- with $auth.tenantsKey }}
- name: QUIRE_ROUTER_TENANTS
  value: /etc/quire/tenants/tenants.toml
{{- end }}
{{- end }}
{{- if ne $auth.mode "none" }}
- name: QUIRE_ROUTER_REQUIRE_KEY
  value: "true"
{{- end }}
{{- with default dict $auth.oidc }}
{{- if .issuerUrl }}
- name: QUIRE_ROUTER_OIDC_ISSUER_URL
  value: {{ .issuerUrl | quote }}
- name: QUIRE_ROUTER_OIDC_CLIENT_ID
  value: {{ .clientId | quote }}
- name: QUIRE_ROUTER_OIDC_TENANT_CLAIM
  value: {{ default "sub" .tenantClaim | quote }}
{{- with .jwksUrl }}
- name: QUIRE_ROUTER_OIDC_JWKS_URL
  value: {{ . | quote }}
{{- end }}
{{- if .caSecret }}
- name: QUIRE_ROUTER_OIDC_CA_FILE
  value: /etc/quire/oidc/ca.crt
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The env of the endpoint picker. Takes the root. */}}
{{- define "quire.pickerSettings" -}}
{{- with default dict .Values.router.picker }}
{{- if .enabled }}
- name: QUIRE_ROUTER_PICKER_PORT
  value: "8005"
- name: QUIRE_ROUTER_PICKER_SECURE_SERVING
  value: {{ .secureServing | quote }}
- name: QUIRE_ROUTER_PICKER_FALLBACKS
  value: {{ int .fallbacks | quote }}
{{- if .tlsSecret }}
- name: QUIRE_ROUTER_PICKER_CERT
  value: /etc/quire/picker/tls.crt
- name: QUIRE_ROUTER_PICKER_KEY
  value: /etc/quire/picker/tls.key
- name: QUIRE_ROUTER_PICKER_CLIENT_CA
  value: /etc/quire/picker/ca.crt
{{- else if .insecure }}
- name: QUIRE_ROUTER_PICKER_INSECURE
  value: "true"
{{- end }}
{{- with .forward }}
- name: QUIRE_ROUTER_PICKER_FORWARD
  value: {{ join "," . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The env of the connection to Redis. The password is in a file, which routers read again for each connection. Takes the root. */}}
{{- define "quire.redisSettings" -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.mode "bundled" }}
- name: QUIRE_ROUTER_REDIS_URL
  value: redis://{{ include "quire.host" (dict "root" . "name" (printf "%s-redis" (include "quire.fullname" .))) }}:6379/0
{{- else if eq $redis.mode "external" }}
{{- with $redis.external }}
{{- if .urlKey }}
- name: QUIRE_ROUTER_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret | quote }}
      key: {{ .urlKey | quote }}
{{- else }}
- name: QUIRE_ROUTER_REDIS_URL
  value: {{ include "quire.externalRedis" $ | quote }}
{{- with .username }}
- name: QUIRE_ROUTER_REDIS_USERNAME
  value: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if include "quire.redisPasswordSecret" . }}
- name: QUIRE_ROUTER_REDIS_PASSWORD_FILE
  value: /etc/quire/redis-password/password
{{- end }}
{{- end -}}

{{/* The Secret with the password that routers need; empty where there is none, or where it is part of a URL. Takes the root. */}}
{{- define "quire.redisPasswordSecret" -}}
{{- $external := .Values.redis.external -}}
{{- if eq .Values.redis.mode "bundled" -}}
{{- include "quire.redisSecret" . -}}
{{- else if and (eq .Values.redis.mode "external") (not $external.urlKey) -}}
{{- $external.existingSecret -}}
{{- end -}}
{{- end -}}

{{/* The URL of a Redis outside of the release. Takes the root. */}}
{{- define "quire.externalRedis" -}}
{{- with .Values.redis.external -}}
{{- $scheme := ternary "rediss" "redis" .tls.enabled -}}
{{- $query := ternary "?ssl_ca_certs=/etc/quire/redis/ca.crt" "" (and .tls.enabled (ne .tls.caSecret "")) -}}
{{- printf "%s://%s:%d/%d%s" $scheme .host (int .port) (int .database) $query -}}
{{- end -}}
{{- end -}}

{{/* The resources of a router. Takes the root. */}}
{{- define "quire.routerResources" -}}
{{- $sizes := list (default "1Gi" .Values.router.temporaryStorage) -}}
{{- range include "quire.models" . | fromYaml -}}
{{- with (include "quire.tokenizerSource" . | fromYaml).download -}}
{{- with .sizeLimit -}}{{- $sizes = append $sizes . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- include "quire.resources" (dict "resources" .Values.router.resources "sizes" $sizes "volumes" .Values.router.volumes) -}}
{{- end -}}

{{/* The containers that download tokenizers before routers start. Takes the root. */}}
{{- define "quire.routerDownloads" -}}
{{- range $key, $model := include "quire.models" . | fromYaml -}}
{{- $source := include "quire.tokenizerSource" $model | fromYaml -}}
{{- $patterns := list "config.json" "generation_config.json" "tokenizer.json" "tokenizer_config.json" "special_tokens_map.json" "added_tokens.json" "chat_template.jinja" "chat_template.json" "additional_chat_templates/*.jinja" -}}
{{- include "quire.download" (dict "root" $ "key" $key "source" $source "values" $.Values.router "image" (include "quire.routerImage" $) "patterns" $patterns) -}}
{{- end -}}
{{- end -}}

{{/* Where routers find Secrets that are files. Takes the root. */}}
{{- define "quire.routerMounts" -}}
{{- if include "quire.hasTenants" . }}
- name: tenants
  mountPath: /etc/quire/tenants
  readOnly: true
{{- end }}
{{- if include "quire.targets" . }}
- name: targets
  mountPath: /etc/quire/targets
  readOnly: true
{{- end }}
{{- if include "quire.redisPasswordSecret" . }}
- name: redis-password
  mountPath: /etc/quire/redis-password
  readOnly: true
{{- end }}
{{- if include "quire.hasRedisCa" . }}
- name: redis-ca
  mountPath: /etc/quire/redis
  readOnly: true
{{- end }}
{{- if include "quire.hasOidcCa" . }}
- name: oidc-ca
  mountPath: /etc/quire/oidc
  readOnly: true
{{- end }}
{{- if eq .Values.autoscaling.mode "hpa" }}
- name: scaling
  mountPath: /etc/quire/scaling
  readOnly: true
{{- end }}
{{- include "quire.engineTokenMount" . }}
{{- include "quire.tlsMount" (dict "root" . "component" "router") }}
{{- if include "quire.kedaTls" . }}
- name: keda
  mountPath: /etc/quire/keda
  readOnly: true
{{- end }}
{{- if include "quire.pickerTlsSecret" . }}
- name: picker
  mountPath: /etc/quire/picker
  readOnly: true
{{- end }}
{{- include "quire.trustMount" . }}
{{- end -}}

{{/* The Secret with the certificate that the endpoint picker shows; empty for none. Takes the root. */}}
{{- define "quire.pickerTlsSecret" -}}
{{- with default dict .Values.router.picker -}}{{- if .enabled -}}{{- default "" .tlsSecret -}}{{- end -}}{{- end -}}
{{- end -}}

{{/* The volumes of these. Takes the root. */}}
{{- define "quire.routerVolumes" -}}
{{- if include "quire.hasTenants" . }}
- name: tenants
  secret:
    secretName: {{ .Values.router.auth.existingSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ .Values.router.auth.tenantsKey | quote }}
        path: tenants.toml
{{- end }}
{{- if include "quire.targets" . }}
# Without a checksum in the pod's annotations: routers read it again when it changes.
- name: targets
  configMap:
    name: {{ include "quire.fullname" . }}-targets
{{- end }}
{{- with include "quire.redisPasswordSecret" . }}
- name: redis-password
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items:
      - key: {{ $.Values.redis.passwordKey | quote }}
        path: password
{{- end }}
{{- if include "quire.hasRedisCa" . }}
- name: redis-ca
  secret:
    secretName: {{ .Values.redis.external.tls.caSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ .Values.redis.external.tls.caKey | quote }}
        path: ca.crt
{{- end }}
{{- if include "quire.hasOidcCa" . }}
- name: oidc-ca
  secret:
    secretName: {{ .Values.router.auth.oidc.caSecret | quote }}
    defaultMode: 0440
    items:
      - key: {{ default "ca.crt" .Values.router.auth.oidc.caKey | quote }}
        path: ca.crt
{{- end }}
{{- if eq .Values.autoscaling.mode "hpa" }}
- name: scaling
  secret:
    secretName: {{ include "quire.scalingSecret" . | quote }}
    defaultMode: 0440
{{- end }}
{{- include "quire.engineTokenVolume" . }}
{{- include "quire.tlsVolume" (dict "root" . "component" "router") }}
{{- if include "quire.kedaTls" . }}
- name: keda
  secret:
    secretName: {{ include "quire.tlsSecret" (dict "root" . "component" "keda") | quote }}
    defaultMode: 0440
{{- end }}
{{- with include "quire.pickerTlsSecret" . }}
- name: picker
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
{{- end }}
{{- include "quire.trustVolume" . }}
{{- end -}}

{{/* Whether tenants are named in a file. Takes the root. */}}
{{- define "quire.hasTenants" -}}
{{- if and (eq .Values.router.auth.mode "existing") .Values.router.auth.tenantsKey -}}true{{- end -}}
{{- end -}}

{{/* Whether Redis' certificate is checked with an authority of its own. Takes the root. */}}
{{- define "quire.hasRedisCa" -}}
{{- if and (eq .Values.redis.mode "external") .Values.redis.external.tls.caSecret -}}true{{- end -}}
{{- end -}}

{{/* Whether the issuer's certificate is checked with an authority of its own. Takes the root. */}}
{{- define "quire.hasOidcCa" -}}
{{- with default dict .Values.router.auth.oidc -}}{{- if and .issuerUrl .caSecret -}}true{{- end -}}{{- end -}}
{{- end -}}
