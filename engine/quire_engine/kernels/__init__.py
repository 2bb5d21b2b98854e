"""The compiled kernels of the CPU, each with a torch twin for machines without a compiler, and those of a GPU."""
