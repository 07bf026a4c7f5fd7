"""Kernels of the engine: one operation a file, each beside its torch reference."""
