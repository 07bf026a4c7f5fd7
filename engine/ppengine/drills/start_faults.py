"""Faults of a stage that starts: told to its next process by a file, since the fault thread begins behind boot."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

_SIZES = (2**20, 2**16, 512)
"""What is taken of the memory that the allocator holds already: large pieces, then what is left between them."""
_ballast: list[Tensor] = []


def leave_no_room(run_dir: Path, stage: int) -> None:
    """Have the next profile run of a stage end without memory."""
    _note(run_dir, stage).touch()


def before_profile(run_dir: Path, stage: int, device: torch.device) -> None:
    """Take all memory that this process may have of the card, if that was asked for; once."""
    note = _note(run_dir, stage)
    if device.type != "cuda" or not note.exists():
        return
    note.unlink()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved(device) / total, device)
    for size in _SIZES:
        try:
            while True:
                _ballast.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            continue


def _note(run_dir: Path, stage: int) -> Path:
    return run_dir / f"s{stage}.no-room"
