"""The models: the Llama family with layers of our own, every other decoder through transformers."""
