"""Queue depth for autoscalers: ``external.metrics.k8s.io`` for an HPA, and KEDA's external scaler."""
