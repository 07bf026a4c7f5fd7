"""The interface of a backend: seven methods about strings and bytes. `docs/backends.md` has an example.

The store process has the threads, deadlines, checksums and figures. A backend only keeps objects.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

PAGE = 4096
"""Alignment of buffers and of a shard's length, in bytes."""


_SERVER = re.compile(r"\A([a-zA-Z][a-zA-Z0-9+.-]*://)([^/?#@:]*)")


class BackendError(Exception):
    """A backend cannot do something. One line without secrets, for the operator."""


def server_of(url: str) -> str:
    """Return scheme and host of a url, for errors: the rest may be secret, and before an `@` all of it."""
    found = _SERVER.match(url)
    if found is None:
        return "a text without a scheme"
    return found[1] + ("..." if "@" in url else found[2])


@dataclass(frozen=True)
class BackendOptions:
    """The part of a profile that is about one backend."""

    name: str
    url: str
    quota_bytes: int
    """Most bytes of the objects below `Layout.parts`."""
    timeout_s: float
    """Seconds after which the store gives up on a call. A client library should give up then, too."""


@dataclass(frozen=True)
class Layout:
    """The shape of keys and objects.

    A key is `PART/NAMESPACE/NAME`. Each component has letters, digits, `.`, `_` and `-`, and begins with no dot.
    """

    parts: tuple[str, ...]
    """First components of the keys that this store writes; usage and quota are about them alone."""
    alignment: int = PAGE
    """Buffers of shards begin at a multiple of this, and have a multiple of this as length."""


@dataclass(frozen=True)
class Usage:
    """The share of this store in a backend."""

    used_bytes: int
    """Bytes of the objects below `Layout.parts`; -1: unknown."""
    evicted: int = 0
    """Objects deleted for the quota since `open`."""


class Backend(ABC):
    """Keeps objects. Made without arguments; `open` comes first, `close` last.

    All methods may block. After `open`, they are called by `threads` threads at once. Any exception but KeyError of
    `read` counts as a failure of the backend; its text is shown to the operator.
    """

    threads: ClassVar[int] = 4
    """Calls that may be under way at once."""

    @abstractmethod
    def open(self, config: BackendOptions, layout: Layout) -> None:
        """Connect, and make missing folders."""

    @abstractmethod
    def find(self, keys: Sequence[str]) -> list[bool]:
        """Return for each key whether its object is there."""

    @abstractmethod
    def read(self, key: str, into: memoryview) -> int:
        """Fill `into` with the beginning of an object, and return the length of all of it.

        Raises KeyError if there is none. An object that is longer than `into` may be left unread.
        """

    @abstractmethod
    def write(self, key: str, data: memoryview) -> None:
        """Keep an object; it replaces an older one at once or not at all. `data` is valid during the call."""

    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are fine. A key that ends with `/` means all objects below it."""

    @abstractmethod
    def usage(self) -> Usage:
        """Return the share of this store. It is called every few seconds, so it must be cheap."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything. No other call is under way or follows."""
