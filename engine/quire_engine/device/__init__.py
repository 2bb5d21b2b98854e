"""The device that an engine computes on, and the host that it lies in: copies, threads, memory limits."""
