"""Redis and Kubernetes, connected once, and which routers are alive."""
