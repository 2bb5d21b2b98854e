{{/* Values that contradict each other. What a single value may be is said by values.schema.json. */}}

{{/* Fails with advice, naming the values that do not go together. Takes the root. */}}
{{- define "quire.validate" -}}
{{- include "quire.validateModels" . -}}
{{- include "quire.validateName" . -}}
{{- include "quire.validateRouter" . -}}
{{- include "quire.validateRedis" . -}}
{{- include "quire.validateTls" . -}}
{{- include "quire.validateAutoscaling" . -}}
{{- include "quire.validateNetworking" . -}}
{{- end -}}

{{- define "quire.validateName" -}}
{{- $name := include "quire.fullname" . -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "The name %s has %d characters and may have 47, as %s-router-internal must not be longer than 63: shorten the release's name, or set fullnameOverride." $name (len $name) $name) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateModels" -}}
{{- if not .Values.models -}}
{{- fail "models is empty: say at least one model and its source, as in ci/cpu-demo-values.yaml." -}}
{{- end -}}
{{- $names := dict -}}
{{- range $key, $model := include "quire.models" . | fromYaml -}}
{{- $name := include "quire.servedName" (dict "key" $key "model" $model) -}}
{{- $label := include "quire.metricLabel" (dict "key" $key "model" $model) -}}
{{- if hasKey $names $label -}}
{{- fail (printf "models.%s and models.%s have the same name for clients or metrics, %s: give one of them another servedName." (get $names $label) $key $name) -}}
{{- end -}}
{{- $_ := set $names $label $key -}}
{{- include "quire.validateModel" (dict "root" $ "key" $key "model" $model) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateModel" -}}
{{- $path := printf "models.%s" .key -}}
{{- $_ := include "quire.engineName" . -}}
{{- range $name := list "source" "tokenizer" -}}
{{- $source := get $.model $name -}}
{{- if or (gt (len $source) 1) (and (eq $name "source") (not $source)) -}}
{{- fail (printf "%s.%s has %s: exactly one of pvc, image, download and path is needed." $path $name (keys $source | sortAlpha | join ", " | default "none")) -}}
{{- end -}}
{{- if and (hasKey $source "image") (semverCompare "<1.31.0-0" $.root.Capabilities.KubeVersion.Version) -}}
{{- fail (printf "%s.%s.image needs Kubernetes 1.31 or later with the feature gate ImageVolume (on by default from 1.35), and this cluster has %s: use pvc or download." $path $name $.root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- if and (hasKey .model.source "download") (default dict .model.source.download).claimName (default dict .model.source.download).sizeLimit -}}
{{- fail (printf "%s.source.download.claimName and sizeLimit are both set: a claim has a size of its own." $path) -}}
{{- end -}}
{{- if and (gt (int .model.gpus) 0) (ne (int .model.gpus) (int .model.tensorParallelSize)) -}}
{{- fail (printf "%s.gpus is %d and %s.tensorParallelSize is %d: an engine uses as many GPUs as share its layers." $path (int .model.gpus) $path (int .model.tensorParallelSize)) -}}
{{- end -}}
{{- if and (eq (toString .model.maxSurge | trimSuffix "%") "0") (eq (toString .model.maxUnavailable | trimSuffix "%") "0") -}}
{{- fail (printf "%s.maxSurge and %s.maxUnavailable are both 0: no update could begin." $path $path) -}}
{{- end -}}
{{- with .model.autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d and maxReplicas is %d." $path (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- $asked := and (eq $.root.Values.autoscaling.mode "hpa") .enabled (eq (int .minReplicas) 0) -}}
{{- if and $asked (semverCompare "<1.37.0-0" $.root.Capabilities.KubeVersion.Version) (not $.root.Values.autoscaling.hpa.scaleToZero) -}}
{{- fail (printf "%s.autoscaling.minReplicas is 0 with autoscaling.mode hpa: a HorizontalPodAutoscaler can do that from Kubernetes 1.37 on, and this cluster has %s. Set minReplicas to 1, autoscaling.mode to keda, or autoscaling.hpa.scaleToZero where the feature gate HPAScaleToZero is on." $path $.root.Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateRouter" -}}
{{- $router := .Values.router -}}
{{- $auth := $router.auth -}}
{{- if and (eq $auth.mode "existing") (not $auth.existingSecret) -}}
{{- fail "router.auth.mode is existing and router.auth.existingSecret is empty: name a Secret with a tenants.toml or with API keys." -}}
{{- end -}}
{{- if and (ne $auth.mode "existing") $auth.existingSecret -}}
{{- fail (printf "router.auth.existingSecret is %s and router.auth.mode is %s: the Secret is used with mode existing only." $auth.existingSecret $auth.mode) -}}
{{- end -}}
{{- if and (eq $auth.mode "existing") (not $auth.tenantsKey) (not $auth.apiKeysKey) -}}
{{- fail "router.auth.tenantsKey and router.auth.apiKeysKey are both empty: nobody would be let in, or everybody. Name at least one key of router.auth.existingSecret." -}}
{{- end -}}
{{- if and (eq (toString $router.maxSurge | trimSuffix "%") "0") (eq (toString $router.maxUnavailable | trimSuffix "%") "0") -}}
{{- fail "router.maxSurge and router.maxUnavailable are both 0: no update could begin." -}}
{{- end -}}
{{- $hold := include "quire.holdTimeout" . | float64 -}}
{{- $limit := default 600 $router.limits.requestTimeout | float64 -}}
{{- if gt $hold $limit -}}
{{- fail (printf "router.limits.holdTimeout is %v and router.limits.requestTimeout is %v: the wait is part of the request's time, so that it must be shorter." $hold $limit) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateRedis" -}}
{{- $redis := .Values.redis -}}
{{- if eq $redis.mode "none" -}}
{{- if gt (int .Values.router.replicas) 1 -}}
{{- fail (printf "router.replicas is %d and redis.mode is none: several routers know of each other through Redis. Set router.replicas to 1, or redis.mode to bundled or external." (int .Values.router.replicas)) -}}
{{- end -}}
{{- if gt (int .Values.router.workers) 1 -}}
{{- fail (printf "router.workers is %d and redis.mode is none: several processes know of each other through Redis. Set router.workers to 1, or redis.mode to bundled or external." (int .Values.router.workers)) -}}
{{- end -}}
{{- end -}}
{{- $external := $redis.external -}}
{{- if and (eq $redis.mode "external") (not $external.host) (not $external.urlKey) -}}
{{- fail "redis.mode is external, and redis.external.host and redis.external.urlKey are both empty: say where it is." -}}
{{- end -}}
{{- if and (ne $redis.mode "external") (or $external.host $external.urlKey) -}}
{{- fail (printf "redis.external says where your Redis is, and redis.mode is %s: it is used with mode external only." $redis.mode) -}}
{{- end -}}
{{- if and $external.urlKey (not $external.existingSecret) -}}
{{- fail (printf "redis.external.urlKey is %s and redis.external.existingSecret is empty: name the Secret that has it." $external.urlKey) -}}
{{- end -}}
{{- if and $external.urlKey $external.host -}}
{{- fail "redis.external.host and redis.external.urlKey are both set: leave one of them empty." -}}
{{- end -}}
{{- if and $external.tls.caSecret (not $external.tls.enabled) (not $external.urlKey) -}}
{{- fail (printf "redis.external.tls.caSecret is %s and redis.external.tls.enabled is false: an authority is for TLS only." $external.tls.caSecret) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateTls" -}}
{{- $tls := .Values.tls -}}
{{- if eq $tls.mode "existingSecret" -}}
{{- range $component := list "engine" "router" -}}
{{- if not (get $tls.existingSecret $component) -}}
{{- fail (printf "tls.mode is existingSecret and tls.existingSecret.%s is empty: name a Secret with tls.crt, tls.key and ca.crt." $component) -}}
{{- end -}}
{{- end -}}
{{- else if or $tls.existingSecret.engine $tls.existingSecret.router -}}
{{- fail (printf "tls.existingSecret names Secrets and tls.mode is %s: they are used with mode existingSecret only." $tls.mode) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateAutoscaling" -}}
{{- $hpa := .Values.autoscaling.hpa -}}
{{- if and (eq .Values.autoscaling.mode "hpa") (eq $hpa.certificate "existingSecret") (or (not $hpa.existingSecret) (not $hpa.caBundle)) -}}
{{- fail "autoscaling.hpa.certificate is existingSecret: autoscaling.hpa.existingSecret and autoscaling.hpa.caBundle are both needed." -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateNetworking" -}}
{{- $gateway := .Values.gateway -}}
{{- if and (or $gateway.httpRoute.enabled $gateway.grpcRoute.enabled) (not $gateway.parentRefs) -}}
{{- fail "gateway.httpRoute or gateway.grpcRoute is enabled and gateway.parentRefs is empty: name the Gateway that the routes belong to." -}}
{{- end -}}
{{- if and $gateway.httpRoute.enabled $gateway.grpcRoute.enabled -}}
{{- $both := list -}}
{{- range $gateway.httpRoute.hostnames -}}{{- if has . $gateway.grpcRoute.hostnames -}}{{- $both = append $both . -}}{{- end -}}{{- end -}}
{{- if or $both (and (not $gateway.httpRoute.hostnames) (not $gateway.grpcRoute.hostnames)) -}}
{{- fail (printf "gateway.httpRoute.hostnames and gateway.grpcRoute.hostnames are both %s: a listener takes either a HTTPRoute or a GRPCRoute for one host name." ($both | join ", " | default "empty")) -}}
{{- end -}}
{{- end -}}
{{- $telemetry := .Values.telemetry -}}
{{- if and $telemetry.headersSecret (not $telemetry.otlpEndpoint) -}}
{{- fail (printf "telemetry.headersSecret is %s and telemetry.otlpEndpoint is empty: headers for whom?" $telemetry.headersSecret) -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.redis.external.urlKey (not .Values.networkPolicy.routerEgress) -}}
{{- fail "redis.external.urlKey hides where Redis is, and networkPolicy.enabled closes all ways there: say one in networkPolicy.routerEgress." -}}
{{- end -}}
{{- if and .Values.tests.model (not (hasKey .Values.models .Values.tests.model)) -}}
{{- fail (printf "tests.model is %s, which is no key of models (%s)." .Values.tests.model (keys .Values.models | sortAlpha | join ", ")) -}}
{{- end -}}
{{- end -}}
