"""Faults of a stage that starts, passed to its next process in a file: the fault thread starts only after boot."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

_SIZES = (2**20, 2**16, 512)
"""Sizes of allocations that use up the allocator's memory: large pieces, then the gaps between them."""
_ballast: list[Tensor] = []


def leave_no_room(run_dir: Path, stage: int) -> None:
    """Have the next profile run of a stage end without memory."""
    _note(run_dir, stage).touch()


def before_profile(run_dir: Path, stage: int, device: torch.device) -> None:
    """Take all of the card's memory that this process may have, if the file requests it; once."""
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
