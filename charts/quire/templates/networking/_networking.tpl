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

{{/* How long a gateway leaves a request alone: a little longer than the router. Takes the root. */}}
{{- define "quire.gatewayTimeout" -}}
{{ add (ceil (default 600 .Values.router.limits.requestTimeout)) 10 }}s
{{- end -}}
