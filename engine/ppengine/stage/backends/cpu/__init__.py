"""A stage on a CPU: its KV cache, its host pool, and the memory of the machine."""
