{{/* How routers serve the number that engines are scaled by. */}}

{{/* The env of routers. Takes the root. */}}
{{- define "quire.scalingSettings" -}}
{{- if .Values.autoscaling.podDeletionCost }}
- name: QUIRE_ROUTER_POD_DELETION_COST_LEASE
  value: {{ include "quire.deletionCostLease" . | quote }}
{{- end }}
{{- if eq .Values.autoscaling.mode "hpa" }}
- name: QUIRE_ROUTER_SCALING_PORT
  value: "8003"
- name: QUIRE_ROUTER_SCALING_CERT
  value: /etc/quire/scaling/tls.crt
- name: QUIRE_ROUTER_SCALING_KEY
  value: /etc/quire/scaling/tls.key
{{- else if eq .Values.autoscaling.mode "keda" }}
- name: QUIRE_ROUTER_KEDA_PORT
  value: "8004"
{{- if include "quire.kedaTls" . }}
- name: QUIRE_ROUTER_KEDA_CERT
  value: /etc/quire/keda/tls.crt
- name: QUIRE_ROUTER_KEDA_KEY
  value: /etc/quire/keda/tls.key
- name: QUIRE_ROUTER_KEDA_CLIENT_CA
  value: /etc/quire/keda/ca.crt
{{- else }}
# Without certificates the network policy alone keeps others away.
- name: QUIRE_ROUTER_KEDA_INSECURE
  value: "true"
{{- end }}
{{- end }}
{{- end -}}

{{/* The Lease of the router that marks engines' pods. Takes the root. */}}
{{- define "quire.deletionCostLease" -}}
{{- printf "%s-pod-deletion-cost" (include "quire.fullname" .) -}}
{{- end -}}

{{/* The Secret with the routers' certificate for the API server. Takes the root. */}}
{{- define "quire.scalingSecret" -}}
{{- if eq .Values.autoscaling.hpa.certificate "existingSecret" -}}
{{- .Values.autoscaling.hpa.existingSecret -}}
{{- else -}}
{{- include "quire.fullname" . }}-scaling-tls
{{- end -}}
{{- end -}}

{{/* The name of the Service where the API server gets the load. Takes the root. */}}
{{- define "quire.scalingHost" -}}
{{ include "quire.host" (dict "root" . "name" (printf "%s-router-internal" (include "quire.fullname" .))) }}
{{- end -}}

{{/* A model's name as the label of a metric, made as the router makes it. Takes key and model. */}}
{{- define "quire.metricLabel" -}}
{{- $label := regexReplaceAll "[^A-Za-z0-9_.-]" (include "quire.modelName" .) "_" | trunc 63 -}}
{{- regexReplaceAll "[_.-]+$" $label "" -}}
{{- end -}}

{{/* The APIService that there is one of in a cluster. */}}
{{- define "quire.apiService" -}}v1beta1.external.metrics.k8s.io{{- end -}}

{{/* The scaling behavior of a model's HorizontalPodAutoscaler. Takes the model's autoscaling. */}}
{{- define "quire.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: {{ default 0 .scaleUpSeconds | int }}
  selectPolicy: Max
  policies:
    - type: Percent
      value: 100
      periodSeconds: 15
    - type: Pods
      value: {{ default 4 .scaleUpPods | int }}
      periodSeconds: 15
scaleDown:
  stabilizationWindowSeconds: {{ int .scaleDownSeconds }}
  selectPolicy: Max
  policies:
    - type: Pods
      value: {{ int .scaleDownPods }}
      periodSeconds: 60
{{- end -}}

{{/* The certificate that helm makes for the API server's sake, as the data of a Secret: the same for all templates of one run, so it is
     kept beside the values. Takes the root. */}}
{{- define "quire.scalingCertificate" -}}
{{- if not (hasKey .Values.autoscaling "_certificate") -}}
{{- $old := lookup "v1" "Secret" .Release.Namespace (include "quire.scalingSecret" .) | default dict -}}
{{- $data := default dict $old.data -}}
{{- if not $data -}}
{{- $days := int .Values.tls.validityDays -}}
{{- $name := include "quire.scalingHost" . -}}
{{- $authority := genCA (printf "%s-scaling-ca" (include "quire.fullname" .)) $days -}}
{{- /* Its common name may have 64 characters; who asks looks at the other names. */ -}}
{{- $made := genSignedCert (printf "%s-scaling" (include "quire.fullname" .)) nil (list $name (printf "%s.%s" $name .Values.clusterDomain)) $days $authority -}}
{{- $data = dict "ca.crt" ($authority.Cert | b64enc) "tls.crt" ($made.Cert | b64enc) "tls.key" ($made.Key | b64enc) -}}
{{- end -}}
{{- $_ := set .Values.autoscaling "_certificate" (pick $data "ca.crt" "tls.crt" "tls.key") -}}
{{- end -}}
{{- toYaml .Values.autoscaling._certificate -}}
{{- end -}}

{{/* The name of objects that belong to no namespace. Takes the root. */}}
{{- define "quire.clusterName" -}}
{{ .Release.Namespace }}-{{ include "quire.fullname" . }}-external-metrics
{{- end -}}

{{/* Fails where another autoscaler of the same kind scales a model's engines already: two would undo each other's numbers. (A plain one beside KEDA's is
     refused by KEDA's own webhook.) Takes the root. */}}
{{- define "quire.validateScalers" -}}
{{- $root := . -}}
{{- $mode := .Values.autoscaling.mode -}}
{{- $version := ternary "autoscaling/v2" "keda.sh/v1alpha1" (eq $mode "hpa") -}}
{{- $kind := ternary "HorizontalPodAutoscaler" "ScaledObject" (eq $mode "hpa") -}}
{{- $there := list -}}
{{- if ne $mode "none" -}}{{- $there = get (lookup $version $kind .Release.Namespace "" | default dict) "items" -}}{{- end -}}
{{- range $key, $model := include "quire.models" . | fromYaml -}}
{{- if and $there (include "quire.isScaled" (dict "root" $root "model" $model)) -}}
{{- $target := include "quire.scaleTarget" (dict "root" $root "key" $key "model" $model) | fromYaml -}}
{{- range $there -}}
{{- $annotations := default dict .metadata.annotations -}}
{{- $own := eq (get $annotations "meta.helm.sh/release-name") $root.Release.Name -}}
{{- $other := default dict .spec.scaleTargetRef -}}
{{- if and (not $own) (eq $other.name $target.name) (eq (default "Deployment" $other.kind) $target.kind) -}}
{{- fail (printf "autoscaling.mode is %s and models.%s.autoscaling.enabled is true, but the %s %s scales the %s %s already: two would undo each other's numbers. Delete it, or set models.%s.autoscaling.enabled to false." $mode $key $kind .metadata.name $target.kind $target.name $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
