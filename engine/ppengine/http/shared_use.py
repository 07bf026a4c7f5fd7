"""Use of the port by key, over all HTTP processes: each counts in a file of its own, and reads those of the others."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ppengine.common import mapped_file

_ROW = struct.Struct("<8sQQQ")
"""Digest of a key's name, its requests and tokens so far, and its open requests."""


@dataclass(slots=True)
class Use:
    """Requests and tokens of a key, and its open requests."""

    requests: int = 0
    tokens: int = 0
    open: int = 0


class SharedUse:
    """Counts of this process, and those of others. `folder` belongs to the engine; `names` are of keys with limits."""

    def __init__(self, folder: Path, role: str, roles: Sequence[str], names: Sequence[str]) -> None:
        self._own = {name: Use() for name in names}
        self._places = {name: number * _ROW.size for number, name in enumerate(names)}
        self._file = mapped_file.make(_path(folder, role), max(1, len(names)) * _ROW.size)
        for name in names:
            self.add(name)
        self._others = [_Other(_path(folder, other)) for other in roles if other != role]
        for name in names:
            self.others(name)  # counts of before this process are no growth

    def add(self, name: str, requests: int = 0, tokens: int = 0, opened: int = 0) -> None:
        """Add to the counts of this process."""
        own = self._own[name]
        own.requests, own.tokens, own.open = own.requests + requests, own.tokens + tokens, own.open + opened
        _ROW.pack_into(self._file, self._places[name], _digest(name), own.requests, own.tokens, own.open)

    def own(self, name: str) -> Use:
        """Return the counts of this process."""
        return self._own[name]

    def others(self, name: str) -> Use:
        """Return the growth of the other processes' counts since the last call, and their open requests."""
        total = Use()
        for other in self._others:
            grown = other.grown(name)
            total = Use(total.requests + grown.requests, total.tokens + grown.tokens, total.open + grown.open)
        return total


@dataclass(eq=False)
class _Other:
    """The file of another process. A successor of that process makes another one, and begins at zero."""

    path: Path
    inode: int = 0
    rows: mmap.mmap | None = None
    places: dict[bytes, int] = field(default_factory=dict)
    seen: dict[bytes, tuple[int, int]] = field(default_factory=dict)

    def grown(self, name: str) -> Use:
        with contextlib.suppress(OSError, ValueError):
            self._open()
        digest = _digest(name)
        if digest not in self.places:
            self._index()  # its process may have written the row after the file was mapped
        place = self.places.get(digest)
        if self.rows is None or place is None:
            return Use()
        _, requests, tokens, opened = _ROW.unpack_from(self.rows, place)
        before = self.seen.get(digest, (0, 0))
        self.seen[digest] = requests, tokens
        return Use(max(0, requests - before[0]), max(0, tokens - before[1]), opened)

    def _open(self) -> None:
        """Map the file, unless it is the one that is mapped. Raises OSError, ValueError."""
        inode = self.path.stat().st_ino
        if inode == self.inode:
            return
        self.rows, self.inode, self.seen = mapped_file.open_for_reading(self.path), inode, {}
        self._index()

    def _index(self) -> None:
        """Find the rows of the mapped file."""
        if self.rows is None:
            return
        digests = [_ROW.unpack_from(self.rows, place)[0] for place in range(0, len(self.rows), _ROW.size)]
        self.places = {digest: number * _ROW.size for number, digest in enumerate(digests)}


def _path(folder: Path, role: str) -> Path:
    return folder / f"{role}-use"


def _digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode(), digest_size=8).digest()
