"""One process's part of a step on its device: inputs, graphs, KV tensors, swap copies, memory profile."""
