"""The journal in Redis: Lua scripts, a batching writer, and what reads records back."""
