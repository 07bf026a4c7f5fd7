"""Kernels of the engine: one operation a file, each with its torch reference.

`cpu` has the kernels for CPUs, `gpu` those for GPUs, and the table of `dispatch` chooses between
them.
"""
