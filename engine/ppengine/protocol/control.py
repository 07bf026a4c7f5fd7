"""Messages between a console and the gateway: handshake, commands, replies, bulk fetches.

Every command names the epoch that its author saw, lives for `ttl_ms`, may ask that nothing moved (`if_rev`),
and ends in exactly one definite outcome.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ppengine.protocol.past_files import ListPast, PastListed, PastPart, ReadPast
from ppengine.protocol.severity import Level
from ppengine.protocol.snapshot import Event
from ppengine.protocol.verb_table import Role
from ppengine.protocol.verbs import Verb

# --- handshake and liveness ---------------------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello", kw_only=True):
    """First message of a console on `control`. Its key is that of its socket; `user` names a person behind it."""

    proto_min: int
    proto_max: int
    client: str
    user: str
    read_only: bool = False
    passing: bool = False
    """Waits for something and leaves, as `submit` and verbs of the command line do: no console, so not counted or
    reported as one."""
    console: str = ""
    """Name of this console, the same after it has lost its link; empty: it has none."""


class Welcome(msgspec.Struct, tag="welcome", kw_only=True):
    """Answer to Hello. Drop events with a sequence up to `event_seq`; ask `Replay` for older ones."""

    proto: int
    role: Role
    engine: str
    name: str
    epoch: str
    event_seq: int
    event_oldest: int
    max_frame_bytes: int
    capabilities: list[str] = []


class Ping(msgspec.Struct, tag="ping", kw_only=True):
    """Answered by the gateway; the step counter shows whether the engine moves, beyond its socket."""

    nonce: int


class Pong(msgspec.Struct, tag="pong", kw_only=True):
    """Answer to Ping."""

    nonce: int
    step: int
    core_age_ms: float | None
    known: bool = True
    """False: the gateway replaced another one, and the console must say Hello to it."""
    role: Role | None = None
    """Rights of the console's key now; null: as in the Welcome, from a gateway that does not report them."""


class Goodbye(msgspec.Struct, tag="goodbye", kw_only=True):
    """Last message of a console that leaves: it counts no more. One that says nothing counts for ten seconds."""


# --- commands ----------------------------------------------------------------------------------------------


class Command(msgspec.Struct, tag="command", kw_only=True):
    """A verb with everything that makes it safe. `id` is unique per command: a repeat gets the same answer."""

    id: str
    epoch: str
    verb: Verb
    by: str
    ttl_ms: int = 10_000
    if_rev: int | None = None
    """Refuse with CONFLICT unless this is still the revision: of the request named in the verb, or of memory."""
    dry_run: bool = False
    reason: str = ""
    console: str = ""
    """Name of the console, as in its Hello; the gateway fills it in."""
    override: bool = False
    """Act on requests of other keys, too. It needs a reason; an admin needs neither."""
    principal: str = ""
    """Name of the key that it came with; the gateway fills it in. Empty: of the engine's own user."""
    role: Role = "admin"
    """Role of that key; the gateway fills it in."""
    arrived: float = 0.0
    """Time when the gateway got it, of the monotonic clock of its host; the gateway fills it in. 0: not known."""


ErrorCode = Literal[
    "STALE_EPOCH", "EXPIRED", "CONFLICT", "DENIED", "UNSUPPORTED", "NOT_FOUND", "INVALID", "DOES_NOT_FIT",
    "BUSY", "NO_CORE", "FAILED", "GONE", "PROTOCOL", "RATE_LIMITED", "LEASED",
]  # fmt: skip


class Accepted(msgspec.Struct, tag="accepted", kw_only=True):
    """The command is under way. `request` is the id of a submitted request; `plan` what a dry run would do."""

    id: str
    op: str
    request: str | None = None
    plan: list[str] = []
    revision: int | None = None


class Conflict(msgspec.Struct, kw_only=True):
    """A request to which a verb on several did not apply."""

    request: str
    """Its id."""
    code: ErrorCode
    """Reason, as a refusal of the verb on this request alone would have it."""
    text: str
    """Reason, in one line."""


class Outcome(msgspec.Struct, tag="outcome", kw_only=True):
    """The one end of an accepted command (a dry run ends in `planned`)."""

    id: str
    op: str
    state: Literal["applied", "failed", "superseded", "planned"]
    text: str
    step: int | None = None
    revision: int | None = None
    plan: list[str] = []
    request: str | None = None
    figures: dict[str, float] = {}
    """The plan or effect in numbers: `blocks_before`, `blocks_after`, `move`, `swap`, `recompute`, ..."""
    conflicts: list[Conflict] = []
    """Requests of a verb on several to which it does not apply; the others are done all the same."""
    owners: dict[str, int] = {}
    """With `planned`: number of requests of other keys that it acts on, by the name of the key."""
    override: bool = False
    """With `planned`: whether it needs an override, because of requests of other keys."""


class Deferred(msgspec.Struct, tag="deferred", kw_only=True):
    """Progress: accepted, but in flight (`in flight at stage K`)."""

    id: str
    op: str
    text: str


class Refused(msgspec.Struct, tag="refused", kw_only=True):
    """The command had no effect and never will. `text` is one line with the numbers and what would fit."""

    id: str
    code: ErrorCode
    text: str


ToGateway = Hello | Ping | Goodbye | Command
Reply = Accepted | Deferred | Outcome | Refused
"""Answers to a command; `Outcome` and `Refused` end it."""
FromGateway = Welcome | Pong | Reply


# --- bulk ---------------------------------------------------------------------------------------------------


class Replay(msgspec.Struct, tag="replay", kw_only=True):
    """Events with `after < seq <= until` (None: newest)."""

    nonce: int
    after: int
    until: int | None = None
    level: Level | None = None
    """Only events of this level and above, from those that the engine keeps by their level; null: all of the ring."""
    most: int | None = None
    """With a level: the number of the newest events to send; null: all."""


class Replayed(msgspec.Struct, tag="replayed", kw_only=True):
    """`gone`: part of the range has left the ring; take a full snapshot and go on from `newest`."""

    nonce: int
    events: list[Event]
    newest: int
    gone: bool = False


class Fetch(msgspec.Struct, tag="fetch", kw_only=True):
    """Output of one sample of a request from token `offset`; answered when there is more, or after `wait_ms`."""

    nonce: int
    request: str
    offset: int = 0
    text_offset: int = 0
    sample: int = 0
    wait_ms: int = 1000


class Logprob(msgspec.Struct, array_like=True):
    """Log-probability of the chosen token, and of the best ones as (token, log-probability)."""

    chosen: float
    top: list[tuple[int, float]] = []


class Fetched(msgspec.Struct, tag="fetched", kw_only=True):
    """Tokens `[offset, offset + len)` and text from character `text_offset` of one sample."""

    nonce: int
    request: str
    sample: int
    offset: int
    token_ids: list[int]
    text_offset: int
    text: str
    finished: bool
    finish_reason: str | None = None
    logprobs: list[Logprob] = []
    prompt_tokens: int = 0
    samples: int = 1
    state: str = ""
    loss: str = ""
    """Why it is lost, in one line; empty: it is not."""


InspectWhat = Literal[
    "request",
    "stacks",
    "logs",
    "blocks",
    "rings",
    "fault",
    "findings",
    "audit",
    "about",
    "ledger",
    "faults",
    "finished",
]


class Inspect(msgspec.Struct, tag="inspect", kw_only=True):
    """Details on demand. `what`: `request` (block table, tokens, timing), `stacks` (of `stage`, of the engine `core`
    alone, or of all), `logs`, `blocks` (states of all in `cells` cells at most, and where those of `request` are),
    `rings` (the last `lines` steps of every thread), `fault` (the record of the newest one), `findings` (of the live
    checks), `audit`, `about` (versions and profile), `ledger` (streams, hand-offs and buffers of `stage`, or all),
    `faults` (the kinds of faults on demand), `finished` (the last 1,000 requests that have ended)."""

    nonce: int
    what: InspectWhat
    request: str | None = None
    stage: int | None = None
    lines: int = 200
    cells: int = 1024
    core: bool = False


class Inspected(msgspec.Struct, tag="inspected", kw_only=True):
    """`data` depends on `what`: one of the details in `inspection`."""

    nonce: int
    what: str
    data: msgspec.Raw


class Failed(msgspec.Struct, tag="bulk-failed", kw_only=True):
    """A bulk question that has no answer."""

    nonce: int
    code: ErrorCode
    text: str


ToBulk = Replay | Fetch | Inspect | ListPast | ReadPast
FromBulk = Replayed | Fetched | Inspected | PastListed | PastPart | Failed
