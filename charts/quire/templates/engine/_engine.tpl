{{/* What only engines need. */}}

{{/* Whether an autoscaler sets the number of a model's engines. Takes root and model. */}}
{{- define "quire.isScaled" -}}
{{- if and (ne .root.Values.autoscaling.mode "none") .model.autoscaling.enabled -}}true{{- end -}}
{{- end -}}

{{/* What an autoscaler scales: the Deployment of a model's engines, or the LeaderWorkerSet of those with several nodes. Takes root, key
     and model. */}}
{{- define "quire.scaleTarget" -}}
{{- if gt (int .model.nodes) 1 -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
name: {{ include "quire.groupName" . }}
{{- else -}}
apiVersion: apps/v1
kind: Deployment
name: {{ include "quire.engineName" . }}
{{- end -}}
{{- end -}}

{{/* The name of a LeaderWorkerSet, which makes a Service of that name. Takes root and key. */}}
{{- define "quire.groupName" -}}
{{- $name := printf "%s-nodes" (include "quire.engineName" .) -}}
{{- if gt (len $name) 48 -}}
{{- fail (printf "The name %s has %d characters and may have 48: shorten the release's name (or fullnameOverride) or the key models.%s." $name (len $name) .key) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* The resources of an engine, its GPUs among them. Takes the model. */}}
{{- define "quire.engineResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $_ := set $resources "limits" (merge (dict .gpuResource (int .gpus | toString)) (default dict $resources.limits)) -}}
{{- end -}}
{{- $sizes := list (default "4Gi" .temporaryStorage) -}}
{{- with .source.download -}}
{{- if not .claimName -}}{{- $sizes = append $sizes (default (include "quire.downloadEstimate" $) .sizeLimit) -}}{{- end -}}
{{- end -}}
{{- include "quire.resources" (dict "resources" $resources "sizes" $sizes "volumes" .volumes) -}}
{{- end -}}

{{/* What a download of unknown size is taken for: what is loaded fits the memory. No folder takes more than its sizeLimit. Takes
     the model. */}}
{{- define "quire.downloadEstimate" -}}
{{- $memory := get (default dict .resources.limits) "memory" | default "20Gi" -}}
{{- ternary "200Gi" $memory (gt (include "quire.number" $memory | float64) (include "quire.number" "200Gi" | float64)) -}}
{{- end -}}

{{/* The template of an engine's pods, those of each of its nodes alike. Takes root, component, key and model. */}}
{{- define "quire.enginePod" -}}
metadata:
  labels:
    {{- include "quire.podLabels" (merge (dict "extra" $.model.podLabels) (pick $ "root" "component" "key")) | nindent 4 }}
  {{- with $.model.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "quire.fullname" $.root }}-engine
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "quire.grace" $.model }}
  securityContext:
    {{- include "quire.podSecurity" (dict "root" $.root "ids" $.root.Values.security) | nindent 4 }}
  {{- include "quire.scheduling" (merge (dict "placement" $.model) (pick $ "root" "component" "key")) | trim | nindent 2 }}
  {{- with $.model.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $.model.schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- with $.model.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with include "quire.download" (merge (dict "source" $.model.source "values" $.model "image" (include "quire.engineImage" (dict "root" $.root "model" $.model))) (pick $ "root" "component" "key")) | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: engine
      image: {{ include "quire.engineImage" (dict "root" $.root "model" $.model) | quote }}
      imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
      terminationMessagePolicy: FallbackToLogsOnError
      env:
        - name: QUIRE_ENGINE_HOST
          value: {{ $.root.Values.listenAddress | quote }}
        - name: QUIRE_ENGINE_MODEL
          value: {{ include "quire.folder" (dict "key" $.key "source" $.model.source) | quote }}
        - name: QUIRE_ENGINE_SERVED_MODEL_NAME
          value: {{ include "quire.modelName" (dict "key" $.key "model" $.model) | quote }}
        {{- include "quire.settings" (dict "prefix" "QUIRE_ENGINE_" "settings" (pick $.model "dtype" "maxModelLen" "tensorParallelSize" "pipelineParallelSize" "shutdownTimeout" "shutdownDelay")) | trim | nindent 8 }}
        {{- if gt (int $.model.nodes) 1 }}
        - name: QUIRE_ENGINE_NNODES
          value: {{ int $.model.nodes | quote }}
        - name: QUIRE_ENGINE_NODE_RANK
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
        # The controller puts this variable before the others.
        - name: QUIRE_ENGINE_MASTER_ADDR
          value: $(LWS_LEADER_ADDRESS)
        - name: QUIRE_ENGINE_NODE_ADDR
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        - name: QUIRE_ENGINE_DIST_TIMEOUT
          value: {{ int $.model.startupSeconds | quote }}
        {{- end }}
        {{- with include "quire.settings" (dict "prefix" "QUIRE_ENGINE_" "settings" $.model.flags) | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- include "quire.engineTokenSettings" (dict "component" "engine") | trim | nindent 8 }}
        {{- with include "quire.tlsSettings" (dict "root" $.root "component" "engine") | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- if and (eq (int $.model.gpus) 0) (not (hasKey (default dict $.model.env) "OMP_NUM_THREADS")) }}
        # As many threads as the CPU limit has cores; without a limit, the node's cores.
        - name: OMP_NUM_THREADS
          valueFrom:
            resourceFieldRef:
              containerName: engine
              resource: limits.cpu
        {{- end }}
        {{- if $.model.cacheClaimName }}
        - name: XDG_CACHE_HOME
          value: /var/cache/quire
        - name: FLASHINFER_WORKSPACE_BASE
          value: /var/cache/quire
        - name: TRITON_CACHE_DIR
          value: /var/cache/quire/triton
        - name: CUDA_CACHE_PATH
          value: /var/cache/quire/cuda
        {{- end }}
        {{- with include "quire.tracing" $.root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "quire.trustSettings" $.root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "quire.variables" (dict "root" $.root "env" $.model.env) | trim }}
        {{- . | nindent 8 }}
        {{- end }}
      {{- with $.model.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: grpc
          containerPort: 9000
        - name: metrics
          containerPort: 9002
        {{- if gt (int $.model.nodes) 1 }}
        - name: nodes
          containerPort: 29501
        {{- end }}
      # Started: the model is loaded, and the probes are served at all.
      startupProbe:
        httpGet:
          path: /started
          port: metrics
        periodSeconds: 1
        timeoutSeconds: 3
        failureThreshold: {{ include "quire.failures" (dict "seconds" $.model.startupSeconds "period" 1) }}
      # Ready: takes new requests; false from SIGTERM on.
      readinessProbe:
        httpGet:
          path: /ready
          port: metrics
        periodSeconds: 2
        timeoutSeconds: 3
        failureThreshold: 5
      # Alive: its step loop makes progress while there is work. One that is short of processors is not restarted.
      livenessProbe:
        httpGet:
          path: /live
          port: metrics
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      resources:
        {{- include "quire.engineResources" $.model | nindent 8 }}
      securityContext:
        {{- include "quire.containerSecurity" $.root.Values.engine.readOnlyRootFilesystem | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- if $.model.cacheClaimName }}
        - name: kernels
          mountPath: /var/cache/quire
        {{- end }}
        {{- if gt (mul (int $.model.tensorParallelSize) (int $.model.pipelineParallelSize)) 1 }}
        - name: shared-memory
          mountPath: /dev/shm
        {{- end }}
        {{- with include "quire.modelMount" (dict "key" $.key "source" $.model.source "writable" false) | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- include "quire.engineTokenMount" $ | trim | nindent 8 }}
        {{- with include "quire.tlsMount" (dict "root" $.root "component" "engine") | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with include "quire.trustMount" $.root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $.model.volumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir:
        sizeLimit: {{ default "4Gi" $.model.temporaryStorage }}
    {{- with $.model.cacheClaimName }}
    - name: kernels
      persistentVolumeClaim:
        claimName: {{ . | quote }}
    {{- end }}
    {{- if gt (mul (int $.model.tensorParallelSize) (int $.model.pipelineParallelSize)) 1 }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ $.model.sharedMemory }}
    {{- end }}
    {{- with include "quire.modelVolume" (dict "key" $.key "source" $.model.source) | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- include "quire.engineTokenVolume" $.root | trim | nindent 4 }}
    {{- with include "quire.tlsVolume" (dict "root" $.root "component" "engine") | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with include "quire.trustVolume" $.root | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with $.model.volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
