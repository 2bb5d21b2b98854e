"""From logits to tokens: logits processors, the sampler, log-probabilities."""
