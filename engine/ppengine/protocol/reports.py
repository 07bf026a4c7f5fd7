"""Telemetry inside the engine: core, agent and supervisor to the gateway (PUSH -> PULL, bounded, dropped when full)."""

from __future__ import annotations

from typing import Literal

import msgspec

from ppengine.protocol.backend_calls import BackendCall
from ppengine.protocol.clients import ClientRule, HttpReport
from ppengine.protocol.control import Reply
from ppengine.protocol.facts import Fact
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import EngineInfo, Event, Latency, OperationInfo, Queues, RequestInfo, Throughput
from ppengine.protocol.stage_info import CordonInfo, PlaceLinks
from ppengine.protocol.stage_samples import AgentReport
from ppengine.protocol.tiers import TiersInfo


class StageView(msgspec.Struct, kw_only=True):
    """State of one stage, as the core knows it."""

    index: int
    rank: int
    ready: bool
    retired_step: int
    """Newest step that this stage has acknowledged."""
    oldest_unretired_age_ms: float | None
    oldest_unretired_step: int | None = None
    oldest_unretired_tokens: int = 0
    """Tokens of that step: expected time scales with work."""
    oldest_unretired_moved: int = 0
    """Blocks that it copies or swaps."""
    mapping_blocks: int = 0
    """Blocks by which the change of the mapping that it has not ended changes it, at most."""
    capacity: int | None = None
    mapped: int | None = None
    binding: bool = False
    layers: list[int] = []
    total_bytes: int | None = None
    weights_bytes: int | None = None
    peak_bytes: int | None = None
    block_bytes: int | None = None
    swap_blocks: int | None = None
    pid: int | None = None
    host: str = ""
    device_kind: str = "cpu"
    device_name: str = ""
    device_uuid: str | None = None
    links: PlaceLinks = PlaceLinks()
    progress: str = ""
    """Loading line of a stage that is not ready."""
    cordon: CordonInfo | None = None


class Finding(msgspec.Struct, kw_only=True, frozen=True):
    """A finding of a live check: evidence for the diagnosis, and enough for a verdict by itself.

    `stage` None: the check cannot attribute it. `mismatch` is the shadow check's: tokens differ from the reference's.
    """

    stage: int | None
    cause: Literal["stream_order", "stream_owner", "stream_stuck", "non_finite", "mismatch", "corrupted"]
    summary: str
    """One line of at most 100 characters."""
    since_s: float
    """Since it was first seen."""
    evidence: list[str] = []
    """One observation a line: both call sites, the bytes or tokens at stake, what would put it right."""
    rank: int | None = None
    """Tensor rank of the stage; None: stages have one rank, or all of them are meant."""


class LedgerStream(msgspec.Struct, kw_only=True):
    """One stream of a stage; a stage on a CPU has one for each direction of each edge."""

    name: str
    owner: str
    """The thread that alone may launch on it."""
    device: str
    purpose: str
    alive: bool
    op: str = ""
    """The oldest operation that is not known to be done."""
    age_ms: float | None = None
    pending: int = 0
    """Launched and not known to be done."""


class LedgerHandOff(msgspec.Struct, kw_only=True):
    """Producer and consumer, each a stream or a thread, what orders them, and how often it did."""

    producer: str
    consumer: str
    event: str
    count: int


class LedgerBuffer(msgspec.Struct, kw_only=True):
    """One communication buffer. `generation` counts its contents; `writer` and `readers` are of the newest one."""

    name: str
    device: str
    bytes: int
    generation: int
    writer: str
    readers: list[str]
    in_flight: list[str]
    """Those of the readers that are not known to be done."""
    freed: bool = False


class StageLedger(msgspec.Struct, kw_only=True):
    """The stream and buffer ledger of one stage, once a second while it is on."""

    stage: int
    rank: int
    streams: list[LedgerStream]
    handoffs: list[LedgerHandOff]
    buffers: list[LedgerBuffer]
    """Newest first, at most 32."""
    findings: list[Finding] = []
    age_s: float = 0.0
    """Since the report of the stage; the core sets it when it answers."""


class HeldTurns(msgspec.Struct, kw_only=True):
    """Turns of the core in the last seconds that were long: no message left the core meanwhile."""

    held_s: float
    """Seconds in them, without those in which the core waited for a processor."""
    ran_s: float
    """Seconds of these in which it computed."""
    window_s: float
    turns: int
    longest_s: float
    frames: list[str] = []
    """Newest frames of the code that took most of it, newest first: `function file:line`."""


class Unanswered(msgspec.Struct, kw_only=True, frozen=True):
    """A child of the core that has owed the answer to a question for some time: a request waits for it."""

    pid: int
    for_s: float


class CoreReport(msgspec.Struct, tag="core", kw_only=True):
    """The scheduler's side, `publish_hz` times a second."""

    mono_ns: int
    engine: EngineInfo
    stages: list[StageView]
    queues: Queues
    requests_total: int
    requests: list[RequestInfo]
    operations: list[OperationInfo]
    throughput: Throughput
    kv_used: int | None
    kv_cached: int | None
    kv_free: int | None
    swap_used: int | None
    steps_in_flight: list[int]
    preemptions_total: int
    prefix_hit_tokens_total: int
    swaps_total: int = 0
    dropped_total: int = 0
    latency: Latency = msgspec.field(default_factory=Latency)
    findings: list[Finding] = []
    """Findings of the live checks, oldest first; empty while they are off."""
    rules: list[ClientRule] = []
    """Rules of clients of the HTTP port."""
    tiers: TiersInfo | None = None
    """KV tiers; None if the profile has none."""
    held: HeldTurns | None = None
    """Long turns of the last seconds; None without any."""
    unanswered: list[Unanswered] = []
    """Grammar processes whose answer is late, one each."""


UNKNOWN_STATUS = 256
"""Exit code of an ended process whose status is unknown: no real one is above 255."""
NODE_LOST = 257
"""Exit code of a process whose node is lost."""


class ProcessInfo(msgspec.Struct, kw_only=True):
    """One process of the engine, from its parent. `exit_code`: negative is a signal, None: runs."""

    role: str
    stage: int | None
    rank: int | None
    pid: int
    exit_code: int | None = None
    detail: str = ""
    generation: int = 1
    """Generation for which the process of a stage was started."""
    node: str = ""
    """Name of its node; empty: the engine's own. A pid is one of its node."""
    calls: list[BackendCall] = []
    """Calls of backends in which a store has ended, if they may be the reason."""
    replaced: bool = False
    """Its parent ends it now and starts another in its place: its end is no fault."""


class StartStage(msgspec.Struct, tag="start-stage", kw_only=True):
    """End the rest of a stage's process and start it for `generation`: to the supervisor and Ray's driver."""

    stage: int
    generation: int
    rank: int = 0

    @property
    def place(self) -> Place:
        """Key of the process."""
        return Place(self.stage, self.rank)


class ProcessReport(msgspec.Struct, tag="processes", kw_only=True):
    """From the supervisor at every change: it alone has the exit statuses."""

    mono_ns: int
    processes: list[ProcessInfo]


class Happened(msgspec.Struct, tag="happened", kw_only=True):
    """Events for the gateway to number and publish in this order (`seq` is 0 here)."""

    events: list[Event]
    first: int
    """The core's own number of the first event; it counts from 1."""
    oldest: int = 1
    """The oldest number that the core can push again."""


class Recall(msgspec.Struct, tag="recall", kw_only=True):
    """Push again: to the core, from a gateway that replaced another one, that lacks an event, or whose core was
    replaced.

    The core answers on `collect` with its facts, the events with a number above `after`, a report and `Recalled`.
    """

    after: int
    commands: list[str] = []
    """Ids of commands whose answers are wanted."""


class Attended(msgspec.Struct, kw_only=True):
    """A request that ends with its console."""

    request: str
    console: str
    user: str


class Recalled(msgspec.Struct, tag="recalled", kw_only=True):
    """End of the answer to `Recall`: every other part of it has been pushed before."""

    newest: int
    """The core's number of its newest event."""
    replies: list[Reply] = []
    """Answers to the commands of the question, in the order in which they were given."""
    unknown: list[str] = []
    """Those of the commands that the core has no answer to."""
    attended: list[Attended] = []
    pid: int = 0
    """Process id of the core."""


ToCollector = CoreReport | AgentReport | ProcessReport | HttpReport | Happened | Recalled | Fact
