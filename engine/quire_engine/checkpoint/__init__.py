"""A model's folder: its configuration from ``config.json`` and its tensors from safetensors or GGUF files."""
