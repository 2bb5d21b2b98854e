"""Redis and Kubernetes, connected once."""
