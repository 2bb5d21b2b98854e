"""One rank's part of a step on its device: inputs, graphs, KV tensors, block copies, memory profile."""
