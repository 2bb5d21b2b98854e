"""A model's folder: ``config.json`` as configuration, safetensors as tensors."""
