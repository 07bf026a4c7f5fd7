"""Addresses of edges: how a sender learns where its receiver listens, on one host and over several."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Protocol

import msgspec

from ppengine.protocol.keys import KeyFileError, read_private, write_private
from ppengine.protocol.stage_lifecycle import EdgeAddress, EdgeSought
from ppengine.stage.core_link import CoreLink

SEEK_S = 0.05
"""Seconds between two questions for the same address."""


class AddressBook(Protocol):
    """Addresses of edges by name. `host`: the address on which this stage listens."""

    host: str

    def publish(self, name: str, port: int, key: bytes) -> None:
        """Say where edge `name` is received; again and again until its sender is there."""

    def find(self, name: str) -> EdgeAddress | None:
        """Return where edge `name` is received; None: it is not known yet. Never waits."""

    def withdraw(self, name: str) -> None:
        """Forget what this stage published."""


class FolderBook:
    """Files of a folder that is this user's alone, for stages of one host."""

    host = "127.0.0.1"

    def __init__(self, folder: Path, generation: int) -> None:
        self._folder, self._generation = folder, generation

    def publish(self, name: str, port: int, key: bytes) -> None:
        """Write the file whole: a reader finds all of it or none."""
        address = EdgeAddress(self._generation, name, self.host, port, key)
        if not self._path(name).exists():
            # Without room, or without the folder, which the supervisor makes again: the next round tries again.
            with contextlib.suppress(OSError, KeyFileError):
                write_private(self._path(name), msgspec.json.encode(address))

    def find(self, name: str) -> EdgeAddress | None:
        """Return what the file says, if there is one."""
        try:
            return msgspec.json.decode(read_private(self._path(name)), type=EdgeAddress)
        except (OSError, KeyFileError, msgspec.MsgspecError):
            return None

    def withdraw(self, name: str) -> None:
        """Remove the file."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"g{self._generation}-{name}.edge"


class CoreBook:
    """Questions to the core, which keeps the addresses of a generation: for stages on several nodes."""

    def __init__(self, link: CoreLink, host: str, stage: int, rank: int, generation: int) -> None:
        self.host = host
        self._link, self._stage, self._rank, self._generation = link, stage, rank, generation
        self._due: dict[str, float] = {}

    def publish(self, name: str, port: int, key: bytes) -> None:
        """Send the address to the core."""
        self._link.send(EdgeAddress(self._generation, name, self.host, port, key))

    def find(self, name: str) -> EdgeAddress | None:
        """Return the core's answer, once it is there."""
        # The core sends no step before all stages have met.
        self._link.receive(0)
        known = self._link.edges.get(name)
        if known is not None and known.generation == self._generation:
            return known
        if (now := time.monotonic()) >= self._due.get(name, 0.0):
            self._due[name] = now + SEEK_S
            self._link.send(EdgeSought(self._generation, self._stage, self._rank, name))
        return None

    def withdraw(self, name: str) -> None:
        """Do nothing: the key opens one connection, and the next generation has other ones."""
