"""What was done last and what is known of a fault: details that travel on `bulk` when they are asked for.

Times are monotonic nanoseconds of the host that a stage runs on; `mono_ns` and `wall` of a detail are one moment.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ppengine.protocol.control import StacksDetail
from ppengine.protocol.reports import Finding
from ppengine.protocol.snapshot import Verdict, WaitInfo


class OpRecord(msgspec.Struct, array_like=True, frozen=True):
    """One operation of a thread, as its ring has it. `peer` -1: none. `returned_ns`, `done_ns` 0: not yet.

    `kind`: idle, receive, forward, sample, send, swap_out, ..., and `step`, which encloses the others of its number.
    `size` and `detail`: tokens and first layer of a forward, bytes and number on the edge of a message.
    """

    kind: str
    step: int
    peer: int
    begun_ns: int
    returned_ns: int
    done_ns: int
    size: int
    detail: int


class ThreadRing(msgspec.Struct, kw_only=True):
    """The newest operations of one thread, the oldest first. `recorded`: ever begun; `torn`: could not be read."""

    ring: str
    name: str
    recorded: int
    records: list[OpRecord]
    torn: int = 0


class StageRings(msgspec.Struct, kw_only=True):
    """All rings of one stage (one tensor rank of it), that of the main loop first."""

    stage: int
    rank: int
    pid: int | None
    begun_step: int | None = None
    finished_step: int | None = None
    threads: list[ThreadRing] = []
    error: str = ""


class RingsDetail(msgspec.Struct, kw_only=True):
    """The last `steps` steps of every thread of every stage."""

    mono_ns: int
    wall: float
    steps: int
    stages: list[StageRings]


class FaultDetail(msgspec.Struct, kw_only=True):
    """What was kept when the newest fault was seen; the next one takes its place. `number` counts them, from 1.

    The verdict is kept up to date for as long as it stands, then `over_wall` says when it was cleared.
    """

    number: int
    wall: float
    verdict: Verdict
    waits: list[WaitInfo]
    retired: list[int | None]
    """Newest step that each stage has acknowledged."""
    rings: RingsDetail | None = None
    stacks: StacksDetail | None = None
    over_wall: float | None = None
    missing: list[str] = []
    """What could not be kept, and why."""


class FindingsDetail(msgspec.Struct, kw_only=True):
    """All findings of the live checks, oldest first; empty while they are off."""

    findings: list[Finding]


class AuditDetail(msgspec.Struct, kw_only=True):
    """Newest lines of the audit log, each one JSON object; prompts are not in it, only their lengths."""

    lines: list[str]


class AboutDetail(msgspec.Struct, kw_only=True):
    """What runs here: `versions` by package, the profile with its defaults, host and start."""

    versions: dict[str, str]
    profile: dict[str, Any]
    platform: str
    host: str
    started_wall: float
    layers: list[list[int]] = []
