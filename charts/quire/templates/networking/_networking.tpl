{{/* What Ingress and routes have in common, and peers and rules that several NetworkPolicies have. */}}

{{/* Prefixes of the paths that clients use. Health, metrics, the page and the API's description stay inside. */}}
{{- define "quire.apiPaths" -}}
paths: [/v1, /v2/rerank, /rerank, /score, /tokenize, /detokenize]
{{- end -}}

{{/* Whether clients may use gRPC. Takes the root. Upgrades that reuse the values of a release before this one have no such value. */}}
{{- define "quire.grpc" -}}
{{- if ne (toString .Values.router.service.grpc) "false" -}}true{{- end -}}
{{- end -}}

{{/* Egress to the cluster's DNS. Takes the root. */}}
{{- define "quire.dnsEgress" -}}
- to:
    - namespaceSelector:
        {{- if .Values.networkPolicy.dnsNamespaceLabels }}
        matchLabels:
          {{- toYaml .Values.networkPolicy.dnsNamespaceLabels | nindent 10 }}
        {{- else }} {}
        {{- end }}
    {{- range .Values.networkPolicy.dnsCidrs }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
    {{- range default (list 53) .Values.networkPolicy.dnsPorts }}
    - port: {{ int . }}
      protocol: UDP
    - port: {{ int . }}
      protocol: TCP
    {{- end }}
{{- if include "quire.isOpenShift" . }}
# Policies see the port of OpenShift's DNS pods, which is not the one of their Service.
- to:
    {{- include "quire.namespacePeer" "openshift-dns" | nindent 4 }}
  ports:
    - port: 5353
      protocol: UDP
    - port: 5353
      protocol: TCP
{{- end }}
{{- end -}}

{{/* Egress to addresses; without any to every address, as no block of addresses has nodes of the cluster in it for some plugins. Takes
     cidrs and ports. */}}
{{- define "quire.cidrEgress" -}}
- {{ with .cidrs }}to:
    {{- range . }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  {{ end }}ports:
    {{- range .ports }}
    - port: {{ int . }}
    {{- end }}
{{- end -}}

{{/* Egress for downloads from sources. Takes root and sources. */}}
{{- define "quire.downloadEgress" -}}
{{- $policy := .root.Values.networkPolicy -}}
{{- $ports := default (list 443) $policy.downloadPorts -}}
{{- range .sources -}}
{{- with (default dict .download).endpoint -}}
{{- $ports = append $ports (include "quire.urlPort" .) -}}
{{- end -}}
{{- end -}}
{{- if include "quire.downloads" . -}}
{{- $numbers := list -}}
{{- range $ports -}}{{- $numbers = append $numbers (int .) -}}{{- end -}}
{{- include "quire.cidrEgress" (dict "cidrs" $policy.downloadCidrs "ports" (uniq $numbers)) -}}
{{- end -}}
{{- end -}}

{{/* Egress to the collector of traces, if there is one. Takes the root. */}}
{{- define "quire.tracingEgress" -}}
{{- with .Values.telemetry.otlpEndpoint }}
- ports:
    - port: {{ regexFind "[0-9]+$" (trimSuffix "/" .) | default (ternary "443" "4317" (hasPrefix "https:" .)) }}
{{- end }}
{{- end -}}

{{/* The port of a URL. Takes it. */}}
{{- define "quire.urlPort" -}}
{{- $host := regexReplaceAll "^https?://([^/]*).*$" . "${1}" -}}
{{- regexFind ":[0-9]+$" $host | trimPrefix ":" | default (ternary "443" "80" (hasPrefix "https:" .)) -}}
{{- end -}}

{{/* Egress to the issuer of tokens, whose name no policy can have, if there is one. Takes the root. */}}
{{- define "quire.oidcEgress" -}}
{{- with default dict .Values.router.auth.oidc }}
{{- if .issuerUrl }}
{{- $ports := list (include "quire.urlPort" .issuerUrl) }}
{{- with .jwksUrl }}{{ $ports = append $ports (include "quire.urlPort" .) }}{{ end }}
- ports:
    {{- range uniq $ports }}
    - port: {{ . }}
    {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A namespace by its name. */}}
{{- define "quire.namespacePeer" -}}
- namespaceSelector:
    matchLabels:
      kubernetes.io/metadata.name: {{ . | quote }}
{{- end -}}

{{/* Whether any source of a list is a download. Takes sources. */}}
{{- define "quire.downloads" -}}
{{- range .sources -}}{{- if hasKey . "download" -}}true{{- end -}}{{- end -}}
{{- end -}}

{{/* How long a gateway leaves a request alone: a little longer than the router. Five digits are the most that a time of the
     Gateway API has. Takes the root. */}}
{{- define "quire.gatewayTimeout" -}}
{{- $seconds := add (ceil (default 600 .Values.router.limits.requestTimeout)) 10 -}}
{{- if le $seconds 99999 -}}{{ $seconds }}s{{- else -}}{{ min 99999 (ceil (divf $seconds 3600)) }}h{{- end -}}
{{- end -}}
