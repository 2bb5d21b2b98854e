"""The engine's loop, its scheduler and its KV bookkeeping, as plain Python: imports neither torch, grpc nor numpy."""
