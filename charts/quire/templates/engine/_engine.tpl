{{/* What only engines need. */}}

{{/* Whether an autoscaler sets the number of a model's engines. Takes root and model. */}}
{{- define "quire.isScaled" -}}
{{- if and (ne .root.Values.autoscaling.mode "none") .model.autoscaling.enabled -}}true{{- end -}}
{{- end -}}

{{/* The resources of an engine, its GPUs among them. Takes the model. */}}
{{- define "quire.engineResources" -}}
{{- $resources := deepCopy .resources -}}
{{- if gt (int .gpus) 0 -}}
{{- $_ := set $resources "limits" (merge (dict .gpuResource (int .gpus | toString)) (default dict $resources.limits)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
