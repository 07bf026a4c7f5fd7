"""The error of a CUDA driver call; importable without a driver."""

from __future__ import annotations


class DriverError(RuntimeError):
    """A call that the driver refused: `cuMemCreate of 33554432 bytes: CUDA_ERROR_OUT_OF_MEMORY`."""

    def __init__(self, call: str, status: str) -> None:
        super().__init__(f"{call}: {status}")
