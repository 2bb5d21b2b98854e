"""Where the engines are: fixed addresses, DNS, or the Kubernetes API."""
