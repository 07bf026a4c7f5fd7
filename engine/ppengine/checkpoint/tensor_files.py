"""The safetensors files of a checkpoint and their tensors, read from the headers alone, without torch."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec

from ppengine.checkpoint.config_json import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def check_weights(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint: one, or the shards of its index.

    Raises CheckpointError in one line for a missing shard, a truncated file, or a folder with pickled weights alone.
    """
    files = _find(folder)
    for path in files:
        read_header(path)
    return files


def tensor_files(folder: Path) -> dict[str, Path]:
    """Return for every tensor of a checkpoint the file that holds it. Raises CheckpointError as `check_weights`."""
    return {name: path for path in _find(folder) for name in read_header(path)}


def read_header(path: Path) -> dict[str, Any]:
    """Return name to entry (`dtype`, `shape`, `data_offsets`) of one file, whose size must be what the header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: not a safetensors file ({size} bytes)")
        text = file.read(length)
    if len(text) < length:
        raise CheckpointError(f"{path}: truncated: {size} bytes, its header alone needs {8 + length}")
    try:
        header = msgspec.json.decode(text, type=dict[str, Any])
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError, TypeError, IndexError, ValueError):
        raise CheckpointError(f"{path}: its safetensors header is broken") from None
    if size != 8 + length + end:
        kind = "truncated" if size < 8 + length + end else "too long"
        raise CheckpointError(f"{path}: {kind}: {size} bytes, its header says {8 + length + end}")
    return header


def _find(folder: Path) -> list[Path]:
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return [single]
    if index.is_file():
        return _shards(index)
    if any(next(folder.glob(pattern), None) for pattern in PICKLED):
        raise CheckpointError(f"{folder}: pickled weights are not read; convert to safetensors")
    raise CheckpointError(f"{folder}: no weights; expected {SINGLE} or {INDEX} with its shards")


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes())["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{index}: broken index; it must hold a weight_map of tensor to file") from None
    files = [index.parent / name for name in names]
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index}: shard {outside[0]!r} is outside of the folder")
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(files)} shards missing, the first is {missing[0]}"
        )
    return files
