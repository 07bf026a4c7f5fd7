"""Everything that the console shows, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ppengine.protocol.recording import LinkState
from ppengine.protocol.severity import Level
from ppengine.protocol.snapshot import Event, Snapshot
from ppengine.protocol.verb_table import Role

from ppconsole.model.filters import Filter
from ppconsole.model.sorting import BY_ARRIVAL, Order

MAX_EVENTS = 500
MAX_OUTPUTS = 50
MAX_OUTPUT_CHARACTERS = 20_000

SPANS_MS = (50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10_000.0)
"""Milliseconds that the timeline may cover; the agent keeps ten seconds."""
SPAN_MS = 200.0


@dataclass(frozen=True, slots=True)
class Output:
    """Newest text of one request. `tokens` and `characters` are where the next fetch goes on."""

    request: str
    text: str = ""
    tokens: int = 0
    characters: int = 0
    finished: bool = False
    finish_reason: str | None = None
    prompt: str = ""
    """Its prompt; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class ConsoleState:
    """Times are those of the caller's monotonic clock. Old figures stay; `freshness` returns their age."""

    link: LinkState = field(default_factory=lambda: LinkState(state="connecting"))
    snapshot: Snapshot | None = None
    snapshot_at: float | None = None
    epoch: str | None = None
    events: tuple[Event, ...] = ()
    filter: str = ""
    """The filter as it is typed."""
    wanted: Filter = field(default_factory=Filter)
    """The newest filter that could be understood."""
    filter_error: str = ""
    """Why the typed filter cannot be understood; empty if it can."""
    order: Order = BY_ARRIVAL
    level: Level = "info"
    """The least level of the events that log and events screen show."""
    span_ms: float = SPAN_MS
    """Milliseconds that the timeline covers; one of `SPANS_MS`, and it changes by keys alone."""
    outputs: Mapping[str, Output] = field(default_factory=lambda: MappingProxyType({}))
    read_only: bool = False
    role: Role = "admin"
    """Rights of this console's key; the engine reports them when the console attaches, and when they change."""
    live_source: bool = True
    """False for a recording: no verb is ever possible."""
    past: str = "this is a recording"
    """Why no verb is possible, if this is no live source."""
