{{/* What Redis and those who use it need to know. */}}

{{/* The Secret with the password of the bundled Redis. Takes the root. */}}
{{- define "quire.redisSecret" -}}
{{- default (printf "%s-redis" (include "quire.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}
