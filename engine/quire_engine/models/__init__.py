"""The models: own code for the Llama family and a few others, transformers' code for every other decoder."""
