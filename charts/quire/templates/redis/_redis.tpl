{{/* Redis' password and address, for Redis itself and its clients. */}}

{{/* The Secret with the password of the bundled Redis. Takes the root. */}}
{{- define "quire.redisSecret" -}}
{{- default (printf "%s-redis" (include "quire.fullname" .)) .Values.redis.existingSecret -}}
{{- end -}}
