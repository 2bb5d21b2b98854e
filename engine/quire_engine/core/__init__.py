"""The engine's loop, its scheduler and its KV bookkeeping, as plain Python: imports no torch, grpc or numpy."""
