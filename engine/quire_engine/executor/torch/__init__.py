"""Carries out step plans with torch: tensors of a step, KV memory, swap copies, threads."""
