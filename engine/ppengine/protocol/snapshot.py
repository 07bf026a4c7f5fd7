"""One picture of the engine, printed by `status --json` and drawn by the console.

Bytes, milliseconds, blocks. Unknown is None, never 0. Scripts rely on it: fields may be added, none may go.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ppengine.protocol.clients import ClientInfo
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.stage_info import StageInfo
from ppengine.protocol.tiers import PromptSources, TiersInfo

SCHEMA = 1

EngineState = Literal["loading", "serving", "paused", "draining", "resizing", "degraded", "stopped"]
RequestState = Literal["waiting", "finding", "fetching", "running", "swapped", "held", "loading", "finished"]
Cause = Literal[
    "dead", "stopped", "killed_oom", "crashed", "self_stuck", "gil_held", "straggler", "link", "deadlock",
    "mismatch", "corrupted", "stream_order", "stream_owner", "stream_stuck", "non_finite", "out_of_memory", "leak",
    "out_of_files", "disk_full", "core", "process", "store", "starved", "blocked", "undetermined",
]  # fmt: skip
OUTSIDE_STEPS: tuple[Cause, ...] = ("process", "store")
"""Causes of faults with which steps go on: a process beside the pipeline, or a store, is stopped or hangs."""
BESIDE_STEPS: tuple[Cause, ...] = (*OUTSIDE_STEPS, "out_of_files", "disk_full")
"""Causes whose faults without a stage are incidents of their own, and may last beside one of the pipeline."""


def is_beside(cause: Cause, stage: int | None) -> bool:
    """Return whether no step waits for a fault. A stage that has ended for a full disk is a fault of the pipeline."""
    return stage is None and cause in BESIDE_STEPS


class ChecksInfo(msgspec.Struct, kw_only=True):
    """The live checks, as every stage applies them since step `step`."""

    ledger: bool = False
    """Hand-offs between streams and threads are checked."""
    strict: bool = False
    """Every operation is waited for before the next."""
    finite: bool = False
    """Values at stage boundaries are checked."""
    checksum: bool = False
    """Hidden states carry a checksum, which the next stage compares; on unless it is switched off."""
    shadow: float = 0.0
    """Share of the steps that a single-stage reference repeats."""
    step: int = 0
    shadow_state: str = ""
    """`loading`, `ready`, or why there is no reference; empty while it is off."""
    shadow_compared: int = 0
    """Tokens compared since it was switched on."""
    shadow_skipped: int = 0
    """Steps that were due while the reference was busy."""
    findings: int = 0


class EngineInfo(msgspec.Struct, kw_only=True):
    """The engine as a whole. `step` is the number of the last scheduled step."""

    id: str
    name: str
    epoch: str
    state: EngineState
    model: str
    pipeline_parallel_size: int
    tensor_parallel_size: int
    executor: str
    memory_utilization: float
    memory_revision: int
    uptime_s: float
    step: int
    retired_step: int = 0
    max_model_len: int = 0
    block_size: int = 16
    max_num_seqs: int = 0
    schedule_ahead: bool = False
    consoles: int = 0
    message: str = ""
    """Loading progress, or why the engine is degraded."""
    http_serves: bool | None = None
    """Whether a process of the HTTP port takes calls; null without a port."""
    checks: ChecksInfo = msgspec.field(default_factory=ChecksInfo)


class Queues(msgspec.Struct, kw_only=True):
    """Requests by state."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    held: int = 0
    loading: int = 0
    finding: int = 0
    """Their chunks are looked for in backends."""
    fetching: int = 0
    """Their chunks are read from backends."""


class Why(msgspec.Struct, kw_only=True):
    """Why a request is not running, with the numbers of the predicate that failed."""

    code: str
    need: int | None = None
    have: int | None = None
    text: str = ""


class RequestInfo(msgspec.Struct, kw_only=True):
    """One request; no prompt text."""

    id: str
    owner: str
    state: RequestState
    age_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: int
    swap_blocks: int
    why: Why | None = None
    revision: int = 0
    """Counts changes of this request; a command may require that it is unchanged (`if_rev`)."""
    computed_tokens: int = 0
    cached_tokens: int = 0
    in_flight: list[int] = []
    """Unretired steps that hold this request."""
    preemptions: int = 0
    finish_reason: str | None = None
    priority: int = 0
    """The smaller starts first of the requests that wait."""
    prepare_s: float = 0.0
    """Seconds from arrival to the queue: the HTTP process or the gateway, chat template, tokens, grammar."""
    queue_s: float | None = None
    """Seconds in the queue until it first got blocks; null before."""
    ttft_s: float | None = None
    """Seconds from arrival to its first token; null before."""
    itl_ms: float | None = None
    """Mean milliseconds between its tokens up to now; null before the second."""
    itl_p99_ms: float | None = None
    """99th percentile of the milliseconds between its tokens, at most 2.2 % off; null before the second."""
    principal: str = ""
    """Name of the key that submitted it; `owner` is the name that its user gave."""
    client: str = ""
    """Name of the API key of the HTTP port with which it came; empty: it came otherwise."""
    sources: PromptSources | None = None
    """Sources of the tokens of its last start; null without KV tiers."""


class OperationInfo(msgspec.Struct, kw_only=True):
    """A command whose effect is under way or has just ended."""

    id: str
    verb: str
    by: str
    state: Literal["accepted", "deferred", "applied", "failed", "superseded"]
    progress: str = ""


class Throughput(msgspec.Struct, kw_only=True):
    """Rates over the last two seconds; null before the first half second."""

    prompt_tok_s: float | None = None
    """Prompt tokens a second."""
    output_tok_s: float | None = None
    """Output tokens a second."""
    window_s: float | None = None
    """Seconds of the rates."""


class SloInfo(msgspec.Struct, kw_only=True):
    """Service level objectives of the profile, and the requests that have ended in the window; no aborted ones."""

    ttft_ms: float | None = None
    """Most milliseconds to the first token; null: any."""
    itl_ms: float | None = None
    """Most milliseconds between two tokens of a request, in the mean; null: any."""
    finished: int = 0
    """Requests that have ended."""
    met: int = 0
    """Those of them that met both."""
    ttft_missed: int = 0
    """Those whose first token was late."""
    itl_missed: int = 0
    """Those whose tokens were slow."""
    goodput: float | None = None
    """Share of the finished ones that met both, 0 to 1; null while there are none."""


class Latency(msgspec.Struct, kw_only=True):
    """Latencies of all requests over the last five minutes."""

    prepare_s: Quantiles = msgspec.field(default_factory=Quantiles)
    """Seconds from arrival to the queue, counted at the first token."""
    queue_s: Quantiles = msgspec.field(default_factory=Quantiles)
    """Seconds in the queue until the first blocks, counted at the first token."""
    ttft_s: Quantiles = msgspec.field(default_factory=Quantiles)
    """Seconds from arrival to the first token."""
    itl_ms: Quantiles = msgspec.field(default_factory=Quantiles)
    """Milliseconds between two tokens of a request."""
    window_s: float = 300.0
    """Seconds of the window."""
    slo: SloInfo | None = None
    """Requests that met the objectives of the profile; null without any."""


class FurtherFault(msgspec.Struct, kw_only=True):
    """A further process, store or backend of a verdict that is on several."""

    subject: str
    """Its name."""
    summary: str
    """Its fault, in one line."""
    suggest: str = ""
    """Way to mend it; empty: none is suggested."""


class Verdict(msgspec.Struct, kw_only=True):
    """One finding of the diagnosis. `stage` None means the core, or a fault beside the pipeline."""

    stage: int | None
    cause: Cause
    summary: str
    since_s: float
    evidence: list[str] = []
    suggest: str = ""
    root: bool = True
    """False for a stage that only suffers from another."""
    rank: int | None = None
    """Tensor rank of the stage; null: stages have one rank, or all of them are meant."""
    subject: str = ""
    """Name of the process, store or backend that it is on first; empty: it is on a stage, the core or the host."""
    further: list[FurtherFault] = []
    """Further processes, stores or backends with a fault of this cause."""


class WaitInfo(msgspec.Struct, kw_only=True):
    """One thread, link or driver that waits for another, in words: `stage 2`, `the link from stage 1 to stage 2`."""

    waiter: str
    on: str
    what: str
    since_s: float


class IncidentInfo(msgspec.Struct, kw_only=True):
    """One fault from its begin to its end."""

    number: int
    """Counts the incidents of one engine, from 1."""
    wall: float
    """Begin in Unix seconds."""
    over_wall: float | None = None
    """End in Unix seconds; null while it lasts, or if the engine ended before."""
    stage: int | None
    """Stage of the root verdict; None: the core, or a process or a store beside the pipeline."""
    cause: Cause
    """Cause of the root verdict."""
    summary: str
    """Its one line."""
    ended: str = ""
    """How it ended; empty while it lasts."""
    by: str = ""
    """Author of the last command that had an effect during it; empty: no operator acted."""
    recomputed: int | None = None
    """Requests that were recomputed; null: no stage was restarted, and no wire was made again."""
    rank: int | None = None
    """Tensor rank of the stage; null: stages have one rank, or all of them are meant."""


class LeaseInfo(msgspec.Struct, kw_only=True):
    """The control lease: other keys change nothing while it lasts."""

    principal: str
    """Name of the key that holds it."""
    by: str
    """User who took it, by the name that it gave."""
    left_s: float
    """Seconds until it ends, unless a verb of its holder renews it."""


class Snapshot(msgspec.Struct, kw_only=True):
    """Everything a console shows. At most `MAX_REQUESTS` requests; `requests_total` counts all."""

    schema: int = SCHEMA
    sampled_at: float = 0.0
    engine: EngineInfo
    stages: list[StageInfo] = []
    queues: Queues = msgspec.field(default_factory=Queues)
    requests_total: int = 0
    requests: list[RequestInfo] = []
    operations: list[OperationInfo] = []
    throughput: Throughput = msgspec.field(default_factory=Throughput)
    latency: Latency = msgspec.field(default_factory=Latency)
    """Quantiles of queue time, time to first token and time between tokens."""
    verdicts: list[Verdict] = []
    waits: list[WaitInfo] = []
    """Waits between stages, links and core, with and without a fault."""
    event_seq: int = 0
    """Sequence of the newest event, so that a reader sees a gap at once."""
    core_age_ms: float | None = None
    """Age of the core's report inside this snapshot."""
    preemptions_total: int = 0
    swaps_total: int = 0
    """Requests swapped out to the host since the start."""
    prefix_hit_tokens_total: int = 0
    dropped_total: int = 0
    """Reports that were dropped because a queue was full (watching never blocks)."""
    incident: IncidentInfo | None = None
    """Newest incident that lasts; the newest one if none does."""
    lease: LeaseInfo | None = None
    """The control lease; null while no key holds it."""
    clients: list[ClientInfo] = []
    """Clients of the HTTP port, the busiest first; at most `MAX_CLIENTS`."""
    tiers: TiersInfo | None = None
    """KV tiers; null if the profile has none."""


MAX_REQUESTS = 1000
MAX_CLIENTS = 200


class Event(msgspec.Struct, kw_only=True):
    """Something that happened, in order. `kind` is dotted: `op.applied`, `request.finished`, `stage.dead`."""

    seq: int
    wall: float
    kind: str
    text: str
    by: str = ""
    request: str | None = None
    stage: int | None = None
    step: int | None = None
    op: str | None = None
    finished: FinishedInfo | None = None
    """Figures of the request, with `request.finished`; null with other events."""


class Events(msgspec.Struct):
    """One message of events, in order and without gaps; its sequence is that of the last one."""

    events: list[Event]
