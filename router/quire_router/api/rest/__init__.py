"""The OpenAI-style REST API with server-sent events."""
