"""The endpoint picker: gateways of Kubernetes ask this router, over Envoy's ext_proc, which server gets a request."""
