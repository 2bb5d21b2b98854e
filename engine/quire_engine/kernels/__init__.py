"""The compiled CPU kernels, each with a torch equivalent for machines without a compiler, and the GPU kernels."""
