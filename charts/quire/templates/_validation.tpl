{{/* Checks for values that contradict each other. values.schema.json checks each value by itself. */}}

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

{{/* Labels that would change what selectors choose. Takes path and labels. */}}
{{- define "quire.validateLabels" -}}
{{- $path := .path -}}
{{- range $name, $_ := default dict .labels -}}
{{- if regexMatch "^(app\\.kubernetes\\.io|helm\\.sh|quire\\.dev)/" $name -}}
{{- fail (printf "%s has %s: labels that begin with app.kubernetes.io/, helm.sh/ or quire.dev/ are the chart's own." $path $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What routers and engines have alike. Takes root, path, values (those of the component) and keys of models that it mounts. */}}
{{- define "quire.validatePods" -}}
{{- $path := .path -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- include "quire.validateLabels" (dict "path" (printf "%s.podLabels" $path) "labels" .values.podLabels) -}}
{{- range $name, $value := default dict .values.env -}}
{{- if regexMatch "://[^/@\\s]*:[^/@\\s]+@" $value -}}
{{- fail (printf "%s.env has %s, a URL with a password, and values hold none: put it into a Secret, and name that in %s.envFrom." $path $name $path) -}}
{{- end -}}
{{- $port := regexFind ":[0-9]+/?$" $value | trimPrefix ":" | trimSuffix "/" -}}
{{- $open := list -}}
{{- range default (list 443) $policy.downloadPorts -}}{{- $open = append $open (int . | toString) -}}{{- end -}}
{{- if and $policy.enabled (regexMatch "(?i)^https?_proxy$" $name) $port (not (has $port $open)) -}}
{{- fail (printf "%s.env.%s is %s, and networkPolicy.enabled closes the way to its port: add %s to networkPolicy.downloadPorts." $path $name $value $port) -}}
{{- end -}}
{{- if hasPrefix "QUIRE_" $name -}}
{{- fail (printf "%s.env has %s: what begins with QUIRE_ is set by the chart; use the values that are there for it, such as flags." $path $name) -}}
{{- end -}}
{{- if has $name (list "HOME" "POD_NAME" "HF_HUB_OFFLINE" "HF_HUB_DISABLE_TELEMETRY" "HF_XET_CHUNK_CACHE_SIZE_BYTES" "HF_ENDPOINT" "SSL_CERT_FILE" "OTEL_EXPORTER_OTLP_CERTIFICATE" "OTEL_EXPORTER_OTLP_ENDPOINT" "OTEL_EXPORTER_OTLP_HEADERS" "OTEL_TRACES_SAMPLER" "OTEL_TRACES_SAMPLER_ARG" "OTEL_RESOURCE_ATTRIBUTES") -}}
{{- fail (printf "%s.env has %s, which is set by the chart: use telemetry, trust or the endpoint of a download." $path $name) -}}
{{- end -}}
{{- if and $.values.cacheClaimName (has $name (list "XDG_CACHE_HOME" "FLASHINFER_WORKSPACE_BASE" "TRITON_CACHE_DIR" "CUDA_CACHE_PATH")) -}}
{{- fail (printf "%s.env has %s, and %s.cacheClaimName sets it: leave one of the two out." $path $name $path) -}}
{{- end -}}
{{- if and (regexMatch "(?i)(password|token|secret|api_?key|credential)" $name) (not (regexMatch "(?i)(file|path|name|dir|url|tokens|tokenizers_parallelism)$" $name)) -}}
{{- fail (printf "%s.env has %s, which sounds like a secret, and values hold none: name a Secret in %s.envFrom, or that of Hugging Face in tokenSecret of a download." $path $name $path) -}}
{{- end -}}
{{- end -}}
{{- $own := dict -}}
{{- range $volume := .values.volumes -}}
{{- if or (has $volume.name (list "tmp" "kernels" "shared-memory" "tls" "tenants" "targets" "redis-password" "redis-ca" "oidc-ca" "scaling" "keda" "picker" "trust")) (hasPrefix "model-" $volume.name) (hasKey $own $volume.name) -}}
{{- fail (printf "%s.volumes has a volume %s, and there is one of that name already: give it another." $path $volume.name) -}}
{{- end -}}
{{- $_ := set $own $volume.name false -}}
{{- end -}}
{{- $taken := list -}}
{{- range .values.volumeMounts -}}
{{- if not (hasKey $own .name) -}}
{{- fail (printf "%s.volumeMounts has %s, which is none of %s.volumes (%s)." $path .name $path (keys $own | sortAlpha | join ", " | default "none")) -}}
{{- end -}}
{{- $place := clean .mountPath -}}
{{- if or (has $place (concat (list "/" "/tmp" "/var/cache/quire" "/dev/shm" "/models" "/etc" "/etc/quire" "/dev" "/proc" "/sys") $taken)) (hasPrefix "/etc/quire/" $place) (regexMatch "^/models/[^/]+$" $place | and (has (base $place) $.keys)) -}}
{{- fail (printf "%s.volumeMounts mounts %s at %s, where something else is already: choose another folder." $path .name .mountPath) -}}
{{- end -}}
{{- $taken = append $taken $place -}}
{{- $_ := set $own .name true -}}
{{- end -}}
{{- range $name, $mounted := $own -}}
{{- if not $mounted -}}
{{- fail (printf "%s.volumes has %s, and %s.volumeMounts does not mount it." $path $name $path) -}}
{{- end -}}
{{- end -}}
{{- include "quire.validateResources" (dict "path" (printf "%s.resources" $path) "resources" .values.resources) -}}
{{- include "quire.validateResources" (dict "path" (printf "%s.downloadResources" $path) "resources" (default dict .values.downloadResources)) -}}
{{- end -}}

{{/* Requests above limits, which Kubernetes refuses. Takes path and resources. */}}
{{- define "quire.validateResources" -}}
{{- $limits := default dict .resources.limits -}}
{{- $path := .path -}}
{{- range $name, $request := default dict .resources.requests -}}
{{- $limit := get $limits $name -}}
{{- if and $limit (gt (include "quire.number" $request | float64) (include "quire.number" $limit | float64)) -}}
{{- fail (printf "%s.requests.%s is %v and %s.limits.%s is %v: what is set aside must not be more than the limit." $path $name $request $path $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What a quantity of Kubernetes, or of Redis, is as a number; good for comparing. */}}
{{- define "quire.number" -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 "kb" 1024.0 "mb" 1048576.0 "gb" 1073741824.0 -}}
{{- $unit := regexFind "[A-Za-z]+$" (toString .) -}}
{{- if and (kindIs "string" .) $unit -}}
{{- mulf (trimSuffix $unit . | float64) (get $units $unit) -}}
{{- else -}}
{{- float64 . -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateName" -}}
{{- include "quire.validateLabels" (dict "path" "commonLabels" "labels" .Values.commonLabels) -}}
{{- include "quire.validateLabels" (dict "path" "redis.podLabels" "labels" .Values.redis.podLabels) -}}
{{- $name := include "quire.fullname" . -}}
{{- if not (regexMatch "^[a-z]" $name) -}}
{{- fail (printf "The name %s begins with a digit, and names of Services with a letter: give the release another name, or set fullnameOverride." $name) -}}
{{- end -}}
{{- if gt (len $name) 47 -}}
{{- fail (printf "The name %s has %d characters and may have 47, as %s-router-internal must not be longer than 63: shorten the release's name, or set fullnameOverride." $name (len $name) $name) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateModels" -}}
{{- if not .Values.models -}}
{{- fail "models is empty: say at least one model and its source, as in ci/cpu-demo-values.yaml." -}}
{{- end -}}
{{- $names := dict -}}
{{- include "quire.validateTargets" . -}}
{{- range $key, $model := include "quire.models" . | fromYaml -}}
{{- $name := include "quire.modelName" (dict "key" $key "model" $model) -}}
{{- $label := include "quire.metricLabel" (dict "key" $key "model" $model) -}}
{{- if hasKey $names $label -}}
{{- fail (printf "models.%s and models.%s have the same name for clients or metrics, %s: give one of them another servedName." (get $names $label) $key $name) -}}
{{- end -}}
{{- $_ := set $names $label $key -}}
{{- include "quire.validateModel" (dict "root" $ "key" $key "model" $model) -}}
{{- end -}}
{{- end -}}

{{/* Weights that add up to nothing, shadows of nothing, and names that could mean either of two. Takes the root. */}}
{{- define "quire.validateTargets" -}}
{{- $models := include "quire.models" . | fromYaml -}}
{{- $sums := dict -}}
{{- $shadows := dict -}}
{{- range $key, $model := $models -}}
{{- if $model.isTarget -}}
{{- $name := include "quire.servedName" (dict "key" $key "model" $model) -}}
{{- range $other, $of := $models -}}
{{- if eq (include "quire.modelName" (dict "key" $other "model" $of)) $name -}}
{{- fail (printf "models.%s is a target of the name %s, and models.%s is called so, too: give %s another key, such as %s-v1, and %s as its servedName." $key $name $other $other $other $name) -}}
{{- end -}}
{{- end -}}
{{- if kindIs "invalid" $model.shadowPercent -}}
{{- $weight := ternary 1 (int $model.weight) (kindIs "invalid" $model.weight) -}}
{{- $_ := set $sums $name (add (get $sums $name | default 0) $weight) -}}
{{- else -}}
{{- if not (kindIs "invalid" $model.weight) -}}
{{- fail (printf "models.%s has a weight and a shadowPercent: a shadow answers nobody, so set its weight to null." $key) -}}
{{- end -}}
{{- if hasKey $shadows $name -}}
{{- fail (printf "models.%s and models.%s are both shadows of %s, which may have one: leave out one shadowPercent." (get $shadows $name) $key $name) -}}
{{- end -}}
{{- $_ := set $shadows $name $key -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $name, $key := $shadows -}}
{{- if not (hasKey $sums $name) -}}
{{- fail (printf "models.%s.shadowPercent is set, and no other entry of models has the servedName %s: there is nothing to shadow." $key $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $sum := $sums -}}
{{- if eq (int $sum) 0 -}}
{{- fail (printf "The weights of all models with the servedName %s add up to 0, so that no request for it could be answered: give one of them a weight above 0." $name) -}}
{{- end -}}
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
{{- $ranks := mul (int .model.tensorParallelSize) (int .model.pipelineParallelSize) -}}
{{- $nodes := int .model.nodes -}}
{{- if ne (mod $ranks $nodes) 0 -}}
{{- fail (printf "%s.nodes is %d and %s.tensorParallelSize × %s.pipelineParallelSize is %d: each node has as many of the processes that share the layers." $path $nodes $path $path (int $ranks)) -}}
{{- end -}}
{{- if and (gt $nodes 1) (eq .root.Values.tls.mode "off") -}}
{{- fail (printf "%s.nodes is %d and tls.mode is off: the nodes of an engine know each other by its certificate; set tls.mode." $path $nodes) -}}
{{- end -}}
{{- if and (gt (int .model.gpus) 0) (ne (mul (int .model.gpus) $nodes) $ranks) -}}
{{- fail (printf "%s.gpus is %d and %s.tensorParallelSize × %s.pipelineParallelSize is %d, on %s.nodes %d: an engine uses as many GPUs as share its layers." $path (int .model.gpus) $path $path (int $ranks) $path $nodes) -}}
{{- end -}}
{{- range $part := list "requests" "limits" -}}
{{- if hasKey (get $.model.resources $part | default dict) $.model.gpuResource -}}
{{- fail (printf "%s.resources.%s has %s, which %s.gpus sets: leave it out there." $path $part $.model.gpuResource $path) -}}
{{- end -}}
{{- end -}}
{{- $memory := get (default dict .model.resources.limits) "memory" -}}
{{- if and (gt (int $ranks) 1) $memory (ge (include "quire.number" .model.sharedMemory | float64) (include "quire.number" $memory | float64)) -}}
{{- fail (printf "%s.sharedMemory is %s and %s.resources.limits.memory is %v: what is shared counts as memory, so that the limit must be larger." $path .model.sharedMemory $path $memory) -}}
{{- end -}}
{{- $flags := default dict .model.flags -}}
{{- $room := default "4Gi" .model.temporaryStorage -}}
{{- if and (hasPrefix "/tmp/" (printf "%v/" $flags.kvDiskPath)) (not (kindIs "string" $flags.kvDiskSpace)) (ge (mulf $flags.kvDiskSpace 1073741824.0) (include "quire.number" $room | float64)) -}}
{{- fail (printf "%s.flags.kvDiskSpace is %v (GiB) in %s, and %s.temporaryStorage, the size of /tmp, is %s: the pod would be evicted. Set temporaryStorage above it, or keep the blocks in one of %s.volumes." $path $flags.kvDiskSpace $flags.kvDiskPath $path $room $path) -}}
{{- end -}}
{{- include "quire.validatePods" (dict "root" .root "path" $path "values" .model "keys" (list .key)) -}}
{{- if and (eq (toString .model.maxSurge | trimSuffix "%") "0") (eq (toString .model.maxUnavailable | trimSuffix "%") "0") -}}
{{- fail (printf "%s.maxSurge and %s.maxUnavailable are both 0: no update could begin." $path $path) -}}
{{- end -}}
{{- with .model.autoscaling -}}
{{- if gt (int .minReplicas) (int .maxReplicas) -}}
{{- fail (printf "%s.autoscaling.minReplicas is %d and maxReplicas is %d." $path (int .minReplicas) (int .maxReplicas)) -}}
{{- end -}}
{{- if and (include "quire.isScaled" (dict "root" $.root "model" $.model)) (gt (int $.model.replicas) (int .maxReplicas)) -}}
{{- fail (printf "%s.replicas is %d and %s.autoscaling.maxReplicas is %d: autoscaling.mode %s ignores replicas, and there would be at most %d engines. Raise maxReplicas, or lower replicas to it." $path (int $.model.replicas) $path (int .maxReplicas) $.root.Values.autoscaling.mode (int .maxReplicas)) -}}
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
{{- $oidc := default dict $auth.oidc -}}
{{- if and $oidc.issuerUrl (not $oidc.clientId) -}}
{{- fail "router.auth.oidc.issuerUrl is set and router.auth.oidc.clientId is empty: tokens for anybody would be accepted. Set it to the audience that tokens for this service have." -}}
{{- end -}}
{{- if and (not $oidc.issuerUrl) (or $oidc.clientId $oidc.jwksUrl $oidc.caSecret) -}}
{{- fail "router.auth.oidc.clientId, jwksUrl or caSecret is set and router.auth.oidc.issuerUrl is empty: name the issuer of tokens." -}}
{{- end -}}
{{- if and (ne $auth.mode "existing") $auth.existingSecret -}}
{{- fail (printf "router.auth.existingSecret is %s and router.auth.mode is %s: the Secret is used with mode existing only." $auth.existingSecret $auth.mode) -}}
{{- end -}}
{{- if and (eq $auth.mode "existing") (not $auth.tenantsKey) (not $auth.apiKeysKey) -}}
{{- fail "router.auth.tenantsKey and router.auth.apiKeysKey are both empty: nobody would be let in, or everybody. Name at least one key of router.auth.existingSecret." -}}
{{- end -}}
{{- include "quire.validatePods" (dict "root" . "path" "router" "values" $router "keys" (keys .Values.models)) -}}
{{- include "quire.validateRouterScaling" . -}}
{{- include "quire.validateService" . -}}
{{- if and (eq (toString $router.maxSurge | trimSuffix "%") "0") (eq (toString $router.maxUnavailable | trimSuffix "%") "0") -}}
{{- fail "router.maxSurge and router.maxUnavailable are both 0: no update could begin." -}}
{{- end -}}
{{- $hold := include "quire.holdTimeout" . | float64 -}}
{{- $limit := default 600 $router.limits.requestTimeout | float64 -}}
{{- if gt $hold $limit -}}
{{- fail (printf "router.limits.holdTimeout is %v and router.limits.requestTimeout is %v: the wait is part of the request's time, so that it must be shorter." $hold $limit) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateRouterScaling" -}}
{{- with .Values.router.autoscaling -}}
{{- if .enabled -}}
{{- $most := default 8 .maxReplicas | int -}}
{{- $fewest := include "quire.routerMinReplicas" $ | int -}}
{{- if gt $fewest $most -}}
{{- fail (printf "router.autoscaling.minReplicas is %d and maxReplicas is %d." $fewest $most) -}}
{{- end -}}
{{- if eq $.Values.redis.mode "none" -}}
{{- fail "router.autoscaling.enabled is true and redis.mode is none: several routers know of each other through Redis. Set redis.mode to bundled or external." -}}
{{- end -}}
{{- if not (get (default dict $.Values.router.resources.requests) "cpu") -}}
{{- fail "router.autoscaling.enabled is true and router.resources.requests.cpu is not set: routers are scaled by how much of it they use." -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateService" -}}
{{- $service := .Values.router.service -}}
{{- $ports := default dict $service.nodePorts -}}
{{- range $name := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
{{- if and (get $service $name) (ne $service.type "LoadBalancer") -}}
{{- fail (printf "router.service.%s is set and router.service.type is %s: it is for LoadBalancer only." $name $service.type) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $service.type "ClusterIP") (or $service.externalTrafficPolicy $ports.http $ports.grpc) -}}
{{- fail "router.service.externalTrafficPolicy or router.service.nodePorts is set and router.service.type is ClusterIP: they are for NodePort and LoadBalancer." -}}
{{- end -}}
{{- if not (include "quire.grpc" .) -}}
{{- if or $ports.grpc .Values.gateway.grpcRoute.enabled (default dict .Values.ingress.grpc).enabled -}}
{{- fail "router.service.grpc is false, and router.service.nodePorts.grpc, gateway.grpcRoute.enabled or ingress.grpc.enabled leads to gRPC: leave those out, or set router.service.grpc to true." -}}
{{- end -}}
{{- end -}}
{{- if and $ports.http (eq (int $ports.http) (int $ports.grpc)) -}}
{{- fail (printf "router.service.nodePorts.http and router.service.nodePorts.grpc are both %d: each needs its own." (int $ports.http)) -}}
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
{{- if and (ne $redis.mode "external") (or $external.host $external.urlKey $external.existingSecret) -}}
{{- fail (printf "redis.external says where your Redis is, and redis.mode is %s: it is used with mode external only." $redis.mode) -}}
{{- end -}}
{{- if and (ne $redis.mode "bundled") $redis.existingSecret -}}
{{- fail (printf "redis.existingSecret is %s and redis.mode is %s: it is for the bundled Redis; the Secret of an external one is redis.external.existingSecret." $redis.existingSecret $redis.mode) -}}
{{- end -}}
{{- if and $external.urlKey $external.username -}}
{{- fail (printf "redis.external.username is %s and redis.external.urlKey is %s: the user is part of the URL." $external.username $external.urlKey) -}}
{{- end -}}
{{- if eq $redis.mode "bundled" -}}
{{- include "quire.validateResources" (dict "path" "redis.resources" "resources" $redis.resources) -}}
{{- $memory := get (default dict $redis.resources.limits) "memory" -}}
{{- $most := include "quire.number" $redis.maxMemory | float64 -}}
{{- if and $memory (ge $most (include "quire.number" $memory | float64)) -}}
{{- fail (printf "redis.maxMemory is %s and redis.resources.limits.memory is %v: Redis would be killed before it says that it is full. It needs up to twice as much as it keeps." $redis.maxMemory $memory) -}}
{{- end -}}
{{- if ge $most (include "quire.number" $redis.persistence.size | float64) -}}
{{- fail (printf "redis.maxMemory is %s and redis.persistence.size is %s: the file of what it keeps would not fit." $redis.maxMemory $redis.persistence.size) -}}
{{- end -}}
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
{{- if eq .Values.autoscaling.mode "keda" -}}
{{- range $component := list "keda" "kedaClient" -}}
{{- if not (get $tls.existingSecret $component) -}}
{{- fail (printf "tls.mode is existingSecret, autoscaling.mode is keda and tls.existingSecret.%s is empty: name a Secret with tls.crt, tls.key and ca.crt for TLS between KEDA and routers." $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- else if or $tls.existingSecret.engine $tls.existingSecret.router $tls.existingSecret.keda $tls.existingSecret.kedaClient -}}
{{- fail (printf "tls.existingSecret names Secrets and tls.mode is %s: they are used with mode existingSecret only." $tls.mode) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateAutoscaling" -}}
{{- include "quire.validateScalers" . -}}
{{- $hpa := .Values.autoscaling.hpa -}}
{{- if and .Values.autoscaling.podDeletionCost (ne .Values.router.discovery "kubernetes") -}}
{{- fail (printf "autoscaling.podDeletionCost is true and router.discovery is %s: routers know the names of engines' pods only with kubernetes." .Values.router.discovery) -}}
{{- end -}}
{{- if and (eq .Values.autoscaling.mode "hpa") (eq $hpa.certificate "existingSecret") (or (not $hpa.existingSecret) (not $hpa.caBundle)) -}}
{{- fail "autoscaling.hpa.certificate is existingSecret: autoscaling.hpa.existingSecret and autoscaling.hpa.caBundle are both needed." -}}
{{- end -}}
{{- if and (ne $hpa.certificate "existingSecret") (or $hpa.existingSecret $hpa.caBundle) -}}
{{- fail (printf "autoscaling.hpa.existingSecret or autoscaling.hpa.caBundle is set and autoscaling.hpa.certificate is %s: they are used with existingSecret only." $hpa.certificate) -}}
{{- end -}}
{{- end -}}

{{- define "quire.validateNetworking" -}}
{{- $gateway := .Values.gateway -}}
{{- if and (or $gateway.httpRoute.enabled $gateway.grpcRoute.enabled) (not $gateway.parentRefs) -}}
{{- fail "gateway.httpRoute or gateway.grpcRoute is enabled and gateway.parentRefs is empty: name the Gateway that the routes belong to." -}}
{{- end -}}
{{- $pool := default dict $gateway.inferencePool -}}
{{- $picker := default dict .Values.router.picker -}}
{{- if and $pool.enabled (not $picker.enabled) -}}
{{- fail "gateway.inferencePool.enabled is true and router.picker.enabled is false: no router would say which server gets a request." -}}
{{- end -}}
{{- if and $pool.enabled (not $pool.matchLabels) -}}
{{- fail "gateway.inferencePool.enabled is true and gateway.inferencePool.matchLabels is empty: name labels of the servers' pods." -}}
{{- end -}}
{{- if and $picker.enabled .Values.networkPolicy.enabled (not .Values.networkPolicy.gatewayNamespace) -}}
{{- fail "router.picker.enabled is true and networkPolicy.gatewayNamespace is empty: the port would be closed to gateways. Name the namespace that their pods are in." -}}
{{- end -}}
{{- if and (default dict .Values.router.kvEvents).port (not .Values.router.engines) -}}
{{- fail "router.kvEvents.port is set and router.engines is empty: servers of vLLM publish KV events, as vllm+kubernetes://SERVICE; the chart's own engines report theirs to the routers." -}}
{{- end -}}
{{- if and $picker.enabled (not .Values.router.engines) -}}
{{- fail "router.picker.enabled is true and router.engines is empty: routers pick among servers of others, as vllm+kubernetes://SERVICE; what the chart's own engines run goes through the routers." -}}
{{- end -}}
{{- if $picker.enabled -}}
{{- if and (not $picker.tlsSecret) (not $picker.insecure) -}}
{{- fail "router.picker.enabled is true, router.picker.tlsSecret is empty and router.picker.insecure is false: name a Secret with tls.crt, tls.key and ca.crt, so that gateways need a certificate, or set router.picker.insecure where gateways alone reach the port." -}}
{{- end -}}
{{- if and $picker.tlsSecret (or $picker.insecure (not $picker.secureServing)) -}}
{{- fail "router.picker.tlsSecret is set, and router.picker.insecure is true or router.picker.secureServing is false: leave one of them out, as a certificate is needed or not." -}}
{{- end -}}
{{- end -}}
{{- if and $gateway.httpRoute.enabled $gateway.grpcRoute.enabled -}}
{{- $both := list -}}
{{- range $gateway.httpRoute.hostnames -}}{{- if has . $gateway.grpcRoute.hostnames -}}{{- $both = append $both . -}}{{- end -}}{{- end -}}
{{- if or $both (and (not $gateway.httpRoute.hostnames) (not $gateway.grpcRoute.hostnames)) -}}
{{- fail (printf "gateway.httpRoute.hostnames and gateway.grpcRoute.hostnames are both %s: a listener takes either a HTTPRoute or a GRPCRoute for one host name." ($both | join ", " | default "empty")) -}}
{{- end -}}
{{- end -}}
{{- with .Values.trust -}}
{{- if and .configMap .existingSecret -}}
{{- fail (printf "trust.configMap is %s and trust.existingSecret is %s: leave one of them empty." .configMap .existingSecret) -}}
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
