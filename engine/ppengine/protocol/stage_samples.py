"""Samples of the stages of a node by its agent, from their rings, /proc, cgroups and NVML."""

from __future__ import annotations

from typing import Literal

import msgspec

from ppengine.protocol.gpu import GpuInfo
from ppengine.protocol.stage_info import StreamInfo, Waiting


class Message(msgspec.Struct, array_like=True, frozen=True):
    """One message of an edge as one side recorded it. `state`: 1 under way, 2 done (0: its call has not returned)."""

    number: int
    step: int
    size: int
    code: int
    """See `ring.shape_code`."""
    state: int
    age_ms: float
    """Since it was handed over."""


class LinkPace(msgspec.Struct, kw_only=True, frozen=True):
    """A link that is slower than it was: its newest slow second."""

    rate: float
    """Bytes a second while a message is under way; between two nodes at most."""
    usual_rate: float
    """Bytes a second that the same messages had before; between two nodes at least."""
    lost: float
    """Share of the second for which the receiver waited longer than usual."""
    slow_ms: float
    """Sum of the slow seconds, with none between them that was well."""


class EdgeSample(msgspec.Struct, kw_only=True, frozen=True):
    """One side of an edge: open messages, and the newest done ones, in the order of their numbers (from 1)."""

    kind: Literal["send", "receive"]
    peer: int
    generation: int
    messages: tuple[Message, ...] = ()
    conflict: tuple[Message | None, Message] | None = None
    """On a sender, the last message that the receiver recorded otherwise: as sent (None: left out) and as posted."""
    conflict_tokens: int | None = None
    """Tokens of its step, on which the records of both stages agree; None: they do not, or it is not known."""
    pace: LinkPace | None = None
    """On a sender, while the link is slow; None: it is as it was, or not known."""


class FarMessage(msgspec.Struct, array_like=True, frozen=True):
    """One message of an edge as one side recorded it, with nanoseconds of its node's clock; 0: not yet."""

    number: int
    step: int
    size: int
    code: int
    begun_ns: int
    returned_ns: int
    done_ns: int


class FarEdge(msgspec.Struct, kw_only=True, frozen=True):
    """One side of an edge to another node: its messages since the report before."""

    stage: int
    rank: int
    kind: Literal["send", "receive"]
    peer: int
    generation: int
    after: int
    """All messages behind this number are here; those up to it are reported once more, if they have changed."""
    messages: list[FarMessage]
    waited_ns: int
    """Time so far in which the stage's main thread could run and had no core."""
    throttled_us: int
    """Time so far in which a quota held the stage back."""


class CpuShares(msgspec.Struct, kw_only=True, frozen=True):
    """Cores used over the last second, by the process and by its main thread."""

    user: float
    system: float
    main_user: float
    main_system: float
    main_waited: float | None = None
    """Share of that second in which the main thread could run and had no core; None: the kernel does not say."""


class GilSample(msgspec.Struct, kw_only=True, frozen=True):
    """How often the GIL of a process is held by a thread that does not let go, over the last seconds."""

    share: float
    """Share of the time."""
    hold_ms: float | None
    """Length of a hold; None: threads take turns, each as long as Python grants one."""
    over_s: float
    """Seconds of the window."""


class QuotaSample(msgspec.Struct, kw_only=True, frozen=True):
    """A CPU quota that holds a process back, of its cgroup or of one above; counts since that began."""

    file: str
    """The file that sets it."""
    none: str
    """Content of the file without a quota."""
    cores: float
    """Cores that it allows."""
    share: float
    """Share of that time in which it held the process back."""
    before: float | None
    """The same in the seconds before; None: there are none."""
    nr_throttled: int
    """Growth of that count of cpu.stat."""
    throttled_us: int
    """Growth of throttled_usec of cpu.stat."""
    for_ms: float
    """Since it began."""


class GrowthSample(msgspec.Struct, kw_only=True, frozen=True):
    """Memory of a process that grows evenly, beside KV cache and swap space. Bytes."""

    rate: float
    """Bytes a second."""
    grown: int
    """In the newest `over_s` seconds."""
    over_s: float
    for_ms: float
    """Since it began."""
    left: int
    """Until the nearest limit."""
    file: str
    """The file of that limit of a cgroup; empty: it is the host's memory."""


class PaceSample(msgspec.Struct, kw_only=True, frozen=True):
    """Own compute time of a step now, beside what like steps took here before."""

    step_ms: float
    baseline_ms: float
    slow_ms: float = 0.0
    """Sum of the seconds at 1.3 times the baseline or more, with none between them that was well; 0: the newest was.
    A single one between two at 3 times the baseline or more counts with them."""
    throttled: float | None = None
    """Share of the last second in which the cgroup's quota held the process back; None: no quota is known."""
    age_ms: float = 0.0


class StarvedSample(msgspec.Struct, kw_only=True, frozen=True):
    """A main thread that waits for a core while others idle."""

    share: float
    """Share of a second in which it did, at least: of the newest one that counts."""
    for_ms: float
    """Time for which it has been so."""
    scheduling: str
    """Processors that it may use, and its nice value; empty: not readable."""


class StageSample(msgspec.Struct, kw_only=True):
    """One stage process as seen from outside: its rings, /proc, cgroup."""

    index: int
    rank: int
    pid: int
    process_state: str | None
    """State letter of /proc/<pid>/stat (R, S, D, T, Z, ...); None: no such process."""
    process_start: int | None
    phase: str
    phase_age_ms: float
    progress_age_ms: float | None
    """Age of the newest record or main-loop tick."""
    tick_age_ms: float | None
    """Age of the 10 Hz tick of the control thread."""
    op: str | None
    """Kind of the open operation of the main thread (receive, forward, send, sample, ...), None between two."""
    op_age_ms: float | None
    op_step: int | None
    op_peer: int | None
    """A stage, or a rank of its own stage in a collective."""
    waiting_on: Waiting | None
    inbox: int | None
    outbox: int | None
    begun_step: int | None
    finished_step: int | None
    micro_batches: list[int]
    step_ms_p50: float | None
    step_ms_p99: float | None
    idle_fraction: float | None
    gauges: dict[str, int]
    """Byte and block gauges of the ring header, by name."""
    kv_resident: int | None
    streams: list[StreamInfo]
    mapping_ms: float | None = None
    """For how long its thread that maps a GPU's memory has been at a change; None: it is at none."""
    timeline: list[list[float]]
    oom_kills: int | None = None
    """`oom_kill` of the process's cgroup memory.events."""
    before: tuple[int, int | None] | None = None
    """The process that was here before: its pid, and the count of its cgroup once it was gone."""
    cpu_s: float | None = None
    cpu_limits_s: tuple[int | None, int | None] = (None, None)
    """Soft and hard limit of CPU time (RLIMIT_CPU); None: unlimited, or not known."""
    main_state: str | None = None
    """State letter of the main thread."""
    control_state: str | None = None
    """State letter of the control thread while its tick is late; None: it is not late, or that is not known."""
    tracer: str | None = None
    """Name and pid of a debugger, not ours, that has it stopped in state t; None: there is none, or not readable."""
    wchan: str | None = None
    """Kernel function in which the main thread sleeps; empty: it does not; None: not readable."""
    last_op: str | None = None
    """Kind of the newest operation of the main thread that has ended."""
    cpu: CpuShares | None = None
    quota: QuotaSample | None = None
    """The CPU quota that holds it back now; None: none does."""
    starved: StarvedSample | None = None
    """Its main thread waits for a core while others idle; None: it gets its share, or that is not known."""
    gil: GilSample | None = None
    """How often its GIL is held; None: not known."""
    growth: GrowthSample | None = None
    """Growth of its memory without an end; None: there is none."""
    frozen: str = ""
    """The file of the cgroup by which it is frozen; empty: it is not."""
    edges: list[EdgeSample] = []
    pace: PaceSample | None = None
    op_site: str = ""
    """Call site of the open collective; empty without one."""
    rank_wait: float | None = None
    """Share of the last second in which it waited for other ranks of its stage; None: it has none, or not known."""
    work_ms: list[tuple[int, float]] = []
    """Own history as (tokens, ms): longest recent time of layers, head and sampling of up to that many tokens."""


class AgentReport(msgspec.Struct, tag="agent", kw_only=True):
    """All stages of one node: every 0.3 s, ten times a second where one does not move."""

    mono_ns: int
    node: str
    stages: list[StageSample]
    gpus: list[GpuInfo] = []
    """All GPUs of the node; a stage's is the one of its UUID."""
    available: int | None = None
    """Bytes of memory that processes of the node can still have, within the limits of the agent's cgroup."""
    available_age_ms: float = 0.0
    dropped: int = 0
    """Reports of this agent that were dropped because the queue was full."""
    held_ns: int = 0
    """So long, in all, a stage was held for its stacks to be taken."""
    far_edges: list[FarEdge] = []
    """Sides of edges whose other end is on another node, for the gateway to compare."""


TRACED = "t"
"""State letter of a process that its tracer, a debugger, has stopped; T is a signal's."""
