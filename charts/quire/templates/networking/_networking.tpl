{{/* Peers and rules that several NetworkPolicies have. */}}

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
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end -}}

{{/* Egress to addresses. Takes cidrs and ports. */}}
{{- define "quire.cidrEgress" -}}
- to:
    {{- range .cidrs }}
    - ipBlock:
        cidr: {{ . | quote }}
    {{- end }}
  ports:
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
{{- $host := regexReplaceAll "^https?://([^/]*).*$" . "${1}" -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" $host | trimPrefix ":" | default (ternary "443" "80" (hasPrefix "https:" .))) -}}
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
