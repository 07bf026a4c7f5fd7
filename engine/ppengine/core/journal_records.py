"""Records of the core's journal: what another core must know to go on with the requests of this one.

Times are of the monotonic clock, which all processes of a host share. A record of a request's full state replaces the
one before; the others add to it.
"""

from __future__ import annotations

import msgspec

from ppengine.common.tier_config import BackendConfig
from ppengine.protocol.allowed_keys import OWNER
from ppengine.protocol.clients import ClientRule
from ppengine.protocol.control import Command, Logprob, Reply
from ppengine.protocol.facts import Fact
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.reports import Attended
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event
from ppengine.protocol.token_ids import TokenIds, compact, from_wire, to_wire


class SampleState(msgspec.Struct, array_like=True):
    """One continuation."""

    tokens: TokenIds = msgspec.field(default_factory=compact)
    logprobs: list[Logprob] = []
    priority: int = 0
    held_by: str = ""
    """Action and author of its hold; empty: it is not held."""
    admitted: float | None = None
    """Time when it first got blocks."""
    first_token: float | None = None
    """Time of its first token."""
    finished: FinishedInfo | None = None
    """Its figures, once it has ended."""


class Entered(msgspec.Struct, array_like=True, tag=1):
    """A submission in full. Its samples have the numbers `first`, `first + 1` and so on, as in all other records."""

    name: str
    session: str
    first: int
    prompt_ids: TokenIds
    sampling: SamplingParams
    seed: int
    owner: str
    arrival: float
    """Time of its arrival at the first process of the engine."""
    priority: int = 0
    samples: list[SampleState] = []
    """Empty: nothing has happened to them yet."""
    deaths: int = 0
    """Ends of a core of which it may be the reason, without a token between them."""
    attended: Attended | None = None
    """Console with which it ends."""
    begun: bool = False
    """Whether this core has given work for it to the stages."""
    principal: str = OWNER
    """Name of the key that submitted it."""
    client: str = ""
    """Name of the API key with which it came."""
    queued: float = 0.0
    """Time when it first came into the queue."""
    cache_salt: str = ""
    """Salt of its blocks; empty: it has none."""


class Tokens(msgspec.Struct, array_like=True, tag=2):
    """Tokens of a retired step, one a sample."""

    at: float
    step: int
    """Number of the newest step that was sent."""
    numbers: list[int]
    tokens: list[int]
    logprobs: list[tuple[int, Logprob]] = []
    """Place in `numbers`, and the log-probabilities of that token, if its sampling asks for them."""


class Changed(msgspec.Struct, array_like=True, tag=3):
    """An operator has changed a sample."""

    number: int
    priority: int
    held_by: str


class Noticed(msgspec.Struct, array_like=True, tag=4):
    """An event of the core under its own number."""

    number: int
    event: Event


class Ended(msgspec.Struct, array_like=True, tag=13):
    """A sample has ended. The event about its id that follows has its figures."""

    number: int


class Began(msgspec.Struct, array_like=True, tag=14):
    """The stages get work for these samples, by id, for the first time, or again after a preemption."""

    requests: list[str]


class Stated(msgspec.Struct, array_like=True, tag=5):
    """A fact that was pushed."""

    fact: Fact


class Answered(msgspec.Struct, array_like=True, tag=6):
    """An answer to a command."""

    reply: Reply


class Opened(msgspec.Struct, array_like=True, tag=7):
    """A command that was accepted and had no end in the same turn."""

    op: str
    client: bytes
    command: Command


class Added(msgspec.Struct, array_like=True, tag=8):
    """The prompts of one message of an offline session, by the message's number."""

    session: str
    nonce: int
    requests: list[str]


class Dropped(msgspec.Struct, array_like=True, tag=9):
    """Outputs that are no longer kept."""

    requests: list[str]


class Watched(msgspec.Struct, array_like=True, tag=10):
    """A request that ends with its console."""

    attended: Attended


class CordonState(msgspec.Struct, array_like=True, frozen=True):
    """The cordon of a stage."""

    stage: int
    by: str
    reason: str
    at: float


class StageState(msgspec.Struct, array_like=True, frozen=True):
    """The process of a stage: the generation that it was started for, and whether it has loaded."""

    started: int
    loaded: bool


class BackendState(msgspec.Struct, array_like=True):
    """A backend of KV tiers. The file is the user's alone, as the profile is: a place may have a password."""

    name: str
    config: BackendConfig
    paused: bool
    draining: bool
    hit_tokens: int
    declined: int


class TierState(msgspec.Struct, array_like=True):
    """The KV tiers of a core."""

    weights: bytes
    """Hash of the weight files; empty: not known."""
    backends: list[BackendState]
    failed_fetches: int
    dropped: int = 0
    """Chunks that were not put."""


class StartCounts(msgspec.Struct, array_like=True):
    """Tokens of all starts by their source, with a host cache."""

    prompt: int
    device: int
    host: int
    computed: int
    backends: dict[str, int]


class CopyCounts(msgspec.Struct, array_like=True):
    """Blocks to and from the host cache."""

    out: int
    into: int
    evicted: int
    dropped: int


class Settings(msgspec.Struct, array_like=True, tag=11):
    """Everything else, as of now."""

    generation: int
    stages: list[StageState]
    utilization: float
    """Memory utilization that all stages have agreed on."""
    revision: int
    """Revision of the memory."""
    step: int
    paused_by: str
    paused: bool
    """Nothing is scheduled; otherwise a pause lets running requests finish."""
    draining: bool
    checks: int
    shadow: float
    cordons: list[CordonState]
    operations: int
    """Operations so far, which numbers them."""
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    swaps: int
    hit_tokens: int
    began: float
    """Start of the first core of this epoch."""
    rules: list[ClientRule] = []
    """Rules of clients of the HTTP port."""
    starts: StartCounts | None = None
    tiers: TierState | None = None
    """KV tiers; None without backends."""
    copies: CopyCounts | None = None
    """None without a host cache."""


class Moved(msgspec.Struct, array_like=True, tag=12):
    """Everything that the older file has is in this one."""


Record = (
    Entered | Tokens | Changed | Began | Ended | Noticed | Stated | Answered | Opened | Added | Dropped | Watched
    | Settings | Moved
)  # fmt: skip


# No other host reads a journal, so tokens are written as their bytes in memory.
ENCODER = msgspec.msgpack.Encoder(enc_hook=to_wire)
DECODER = msgspec.msgpack.Decoder(list[Record], dec_hook=from_wire)
"""Decodes the records of a turn."""
