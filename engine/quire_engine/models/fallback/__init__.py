"""The way for architectures without own code: an unmodified causal language model of transformers, whose attention
goes through paged KV memory.

Slower than own code, but exact: rotation, norms, experts and logits are transformers' own. What a model needs of its
attention is found out when it is loaded, by a probe, and the result is compared with transformers' own attention.
"""
