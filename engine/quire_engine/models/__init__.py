"""The models: native implementations of the Llama family and a few others, and transformers' of every other one."""
