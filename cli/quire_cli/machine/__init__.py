"""What this machine has: memory, processor and GPUs, read without importing torch."""
