"""The safetensors files of a checkpoint and their tensors, read from the headers alone, without torch."""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ppengine.checkpoint.config_json import CheckpointError, read_as
from ppengine.protocol.error_text import one_line, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_INDEX_MOST = 64 * 1024 * 1024
_NAME_MOST = 255
"""Bytes of a file's name, on any file system here."""
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
WEIGHT_DTYPES = ("F64", "F32", "BF16", "F16")
"""Types of the tensors that a model is loaded from; a file may hold others beside them."""
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
"""Bits of an element of each type of the format."""
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a header. `data_offsets`: begin and end, in bytes behind the header."""

    dtype: str
    shape: Annotated[list[_Count], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Count, _Count]

    @property
    def size(self) -> int:
        """Bytes that type and shape need; -1 for a type that is not of the format."""
        return math.prod(self.shape) * _BITS[self.dtype] // 8 if self.dtype in _BITS else -1


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


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return name to entry of one file, whose tensors must fill it without gap or overlap. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: not a safetensors file ({size} bytes)")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if len(text) < length:
        raise CheckpointError(f"{path}: truncated: {size} bytes, its header alone needs {8 + length}")
    entries = _entries(path, text)
    end = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if size != 8 + length + end:
        kind = "truncated" if size < 8 + length + end else "too long"
        raise CheckpointError(f"{path}: {kind}: {size} bytes, its header says {8 + length + end}")
    _check_layout(path, entries)
    return entries


def _entries(path: Path, text: bytes) -> dict[str, TensorEntry]:
    try:
        found = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        return {name: msgspec.json.decode(raw, type=TensorEntry) for name, raw in found.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its safetensors header is broken: {error}") from None


def _check_layout(path: Path, entries: dict[str, TensorEntry]) -> None:
    """Raise CheckpointError for a tensor whose type and shape are not of its bytes, and for a gap or an overlap."""
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        what = f"{path}: tensor {shown(name)}"
        if entry.size < 0:
            raise CheckpointError(f"{what} has the dtype {shown(entry.dtype, 24)}; these are known: {', '.join(_BITS)}")
        if begin != place:
            raise CheckpointError(f"{what} begins at byte {begin}; the tensor before it ends at {place}")
        if end - begin != entry.size:
            needs = f"{entry.dtype} {shown(entry.shape)} needs {entry.size}"
            raise CheckpointError(f"{what} has {end - begin} bytes; {needs}")
        place = end


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
    """Return the files of an index, which are in its folder. Raises CheckpointError."""
    found: Any = read_as(index, dict[str, msgspec.Raw], _INDEX_MOST)
    try:
        weight_map = msgspec.json.decode(found["weight_map"], type=dict[str, str])
    except (KeyError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise CheckpointError(f"{index}: broken index; it must hold a weight_map of tensor to file") from None
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or name in ("", "..") or not name.isprintable() or len(name.encode()) > _NAME_MOST:
            raise CheckpointError(f"{index}: shard {shown(name)} is outside of the folder; it must be a file's name")
    files = [index.parent / name for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{index.parent}: {len(missing)} of {len(files)} shards missing, the first is {one_line(missing[0], 80)}"
        )
    return files
