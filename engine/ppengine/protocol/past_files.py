"""Files of the past that a gateway hands out on `bulk`: recordings of the last hour, and incidents.

A console on another host lists them, reads them in parts by offset, and keeps copies. No other file is handed out.
"""

from __future__ import annotations

import re

import msgspec

from ppengine.protocol.snapshot import IncidentInfo

CAPABILITY = "past"
"""Entry of `Welcome.capabilities` of a gateway that answers `ListPast` and `ReadPast`."""
PART_BYTES = 32 * 1024
"""Most bytes of one answer: a quarter of a second at 1 Mbit/s."""
_FILE = re.compile(r"history/[0-9]{15}\.rec|incidents/[0-9]{1,9}/(?:incident\.json|[0-9]{15}\.rec)")
_ENGINE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def is_past_file(name: str) -> bool:
    """Return whether `name` can be a file of the past, below the folder of an engine."""
    return _FILE.fullmatch(name) is not None


def is_engine_id(text: str) -> bool:
    """Return whether `text` can be an id of an engine, so that it is one name of a folder."""
    return _ENGINE.fullmatch(text) is not None


class PastFile(msgspec.Struct, array_like=True, frozen=True):
    """One file: its name below the folder of its engine, and its bytes so far."""

    name: str
    size: int


class ListPast(msgspec.Struct, tag="list-past", kw_only=True):
    """Ask for the files of `engine`: this one (empty), or an earlier one of its name."""

    nonce: int
    engine: str = ""


class PastListed(msgspec.Struct, tag="past-listed", kw_only=True):
    """The files of an engine in order of their names."""

    nonce: int
    engine: str
    name: str
    """Name of the engine."""
    files: list[PastFile]
    incidents: list[IncidentInfo] = []
    """Its incidents, the oldest first."""
    earlier: list[str] = []
    """Ids of the earlier engines of this name whose files are kept, the oldest first."""


class ReadPast(msgspec.Struct, tag="read-past", kw_only=True):
    """Ask for at most `size` bytes of a file from `offset` on."""

    nonce: int
    engine: str
    file: str
    offset: int = 0
    size: int = PART_BYTES


class PastPart(msgspec.Struct, tag="past-part", kw_only=True):
    """A part of a file; fewer bytes than requested are its end so far."""

    nonce: int
    offset: int
    data: bytes
    size: int
    """Bytes of the whole file now."""
    mark: int
    """Changes if another file has taken the name: parts with different marks do not fit together."""
