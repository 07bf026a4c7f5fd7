"""Input of the diagnosis: frozen observations with ages, gathered from reports and facts by `tracker.py`."""

from __future__ import annotations

from typing import Literal

import msgspec

from ppengine.diagnosis.helper_evidence import HelperEvidence
from ppengine.diagnosis.tier_evidence import TierEvidence
from ppengine.protocol.gpu import GpuProcess, Xid
from ppengine.protocol.reports import Finding, HeldTurns
from ppengine.protocol.stage_info import StreamInfo
from ppengine.protocol.stage_samples import (
    CpuShares,
    EdgeSample,
    GilSample,
    GrowthSample,
    PaceSample,
    QuotaSample,
    StarvedSample,
)

Key = tuple[int, int]
"""(stage, tensor rank)."""


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of a process in short: newest frames first, `function file:line`."""

    pid: int
    main: tuple[str, ...] = ()
    gil_owner: str = ""
    """Name and newest frames of the thread that held the GIL; empty: none did, or it is not known."""
    error: str = ""
    """Why there is no stack."""


class StageEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One stage. None: not known."""

    stage: int
    rank: int = 0
    ranks: int = 1
    """Tensor ranks of each stage."""
    pid: int | None = None
    node: str = ""
    """Name of its node, if the engine has several."""
    generation: int = 1
    """The one that the process was started for."""
    exit_code: int | None = None
    exit_detail: str = ""
    dead_for_s: float | None = None
    """Since its death was first seen; None: not known to be dead."""
    lost: str = ""
    """Why it cannot go on by its own last words, while its process may still be there."""
    lost_for_s: float | None = None
    successor: int | None = None
    """Pid of who takes its place already."""
    successor_phase: str | None = None
    process_state: str | None = None
    glanced: bool = False
    """Whether the kernel state is newer than the sample: the gateway has read it, since the agent is silent."""
    state_age_s: float | None = None
    """Age of the kernel state, of whichever look is newer."""
    stopped_for_s: float | None = None
    """From the first to the newest sample of an unbroken run of stops and frosts; of t, as far as nothing moved."""
    tracer: str | None = None
    """Name and pid of who has it in state t."""
    frozen: str = ""
    """The file of the cgroup by which it is frozen; empty: it is not."""
    quota: QuotaSample | None = None
    """The CPU quota that holds it back now."""
    starved: StarvedSample | None = None
    """Its main thread waits for a core while others idle."""
    gil: GilSample | None = None
    """How often its GIL is held."""
    growth: GrowthSample | None = None
    """Growth of its memory without an end."""
    oom_kills: int | None = None
    """Out-of-memory kills of its cgroup in the last seconds before it died."""
    main_state: str | None = None
    """Kernel function in which the main thread sleeps, as `wchan`; empty when it does not."""
    wchan: str | None = None
    cpu: CpuShares | None = None
    tick_age_s: float | None = None
    """Age of the control thread's 10 Hz tick at the newest sample; time in a stop does not count."""
    tick_stale_for_s: float | None = None
    """From the first to the newest sample that found the tick old."""
    tick_without_core: bool = False
    """Whether the control thread was able to run at all of them: it waits for a core and not for the GIL."""
    phase: str | None = None
    phase_age_s: float | None = None
    sample_age_s: float | None = None
    op: str | None = None
    op_age_s: float | None = None
    op_step: int | None = None
    op_peer: int | None = None
    """A stage, or a rank of its own stage in a collective."""
    op_site: str = ""
    """Call site of the collective in which it waits for another rank."""
    rank_wait: float | None = None
    """Share of the last second in which it waited for other ranks of its stage."""
    last_op: str | None = None
    """The newest operation of the main thread that has ended."""
    outbox: int | None = None
    edges: tuple[EdgeSample, ...] = ()
    pace: PaceSample | None = None
    stack: Stack | None = None
    progress_age_s: float | None = None
    finished_step: int | None = None
    retired_step: int | None = None
    unretired_age_s: float | None = None
    """Age of the oldest step that the core sent and this stage has not acknowledged; None: there is none."""
    unretired_step: int | None = None
    unretired_tokens: int = 0
    unretired_moved: int = 0
    """Bytes that the step copies or swaps here."""
    mapping_bytes: int = 0
    """By how much the change of the mapping that it has not ended changes it, at most."""
    mapping_age_s: float | None = None
    """For how long its thread that maps a GPU's memory has been at a change; None: it is at none."""
    expected_s: float | None = None
    """Expected seconds of that step by the stage's own history."""
    cpu_s: float | None = None
    """CPU time that its process has used."""
    cpu_limits_s: tuple[int | None, int | None] = (None, None)
    """Soft and hard limit of it; None: unlimited, or not known."""
    streams: tuple[StreamInfo, ...] = ()
    """Those of its device."""
    card: str | None = None
    """UUID of its GPU."""
    xids: tuple[Xid, ...] = ()
    """Recent reports of the driver on its card, from any process that shares it."""
    neighbours: tuple[GpuProcess, ...] = ()
    """Processes of others that use much of its card's SMs now, the most first."""
    sm: float | None = None
    """Its own share of them."""
    findings: tuple[Finding, ...] = ()
    """Findings of live checks shortly before the process ended."""

    @property
    def key(self) -> Key:
        """Its place."""
        return self.stage, self.rank

    @property
    def shown_rank(self) -> int | None:
        """Its rank for a verdict; None where stages have one rank."""
        return self.rank if self.ranks > 1 else None

    @property
    def name(self) -> str:
        """Name for operators: `stage 1`, or `stage 1 rank 0` where stages have several ranks."""
        return self.name_of(self.stage)

    def name_of(self, stage: int) -> str:
        """Return the name of the place with this rank in `stage`: edges connect equal ranks."""
        return f"stage {stage}" if self.ranks == 1 else f"stage {stage} rank {self.rank}"


class WireLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A wire that broke while the processes at both of its ends lived. The core heals it by a new generation."""

    stage: int
    """The stage that reported it."""
    peer: int
    """The stage at the other end."""
    text: str
    """Report of that stage, in one line."""
    closed: bool
    """The connection closed; False: a message arrived that was not due."""
    since_s: float = 0.0
    generation: int | None = None
    """The generation that began since; None: none has."""
    healed_s: float | None = None
    """Since all stages have met again; None: they have not."""
    recomputed: int = 0
    """Requests that had computed tokens and are recomputed."""
    rank: int = 0
    peer_rank: int = 0

    @property
    def ends(self) -> tuple[Key, Key]:
        """The places at both ends, the one that reported it first."""
        return (self.stage, self.rank), (self.peer, self.peer_rank)


class CoreEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The scheduler's side. `report_age_s` None: it has not reported yet."""

    role: str = "core"
    """`supervisor`: it has ended, and the core with it."""
    pid: int | None = None
    exit_code: int | None = None
    exit_detail: str = ""
    process_state: str | None = None
    stopped_for_s: float | None = None
    tracer: str | None = None
    frozen: str = ""
    """As of a stage."""
    dead_for_s: float | None = None
    report_age_s: float | None = None
    report_limit_s: float = 2.0
    unscheduled_for_s: float | None = None
    """Since when requests run, the engine serves, and no step is in flight; None: that is not so."""
    running: int = 0
    held: HeldTurns | None = None
    """Its long turns of the last seconds."""
    held_for_s: float = 0.0
    """Since when they take so much of the time that it is a fault."""
    stack: Stack | None = None


class Shortage(msgspec.Struct, frozen=True, kw_only=True):
    """An exhausted limit of the host: descriptors of a process, or free space of a folder."""

    kind: Literal["files", "disk"]
    where: str
    """The process or the folder."""
    figure: str
    """Use and limit in words."""
    stage: int | None = None
    rank: int | None = None
    """Tensor rank of the stage; None: stages have one rank."""
    pid: int | None = None
    since_s: float = 0.0


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment."""

    stages: tuple[StageEvidence, ...]
    core: CoreEvidence = CoreEvidence()
    steps_in_flight: tuple[int, ...] = ()
    since_retired_s: float | None = None
    """Since any stage last acknowledged a step, or a stopped process was continued."""
    findings: tuple[Finding, ...] = ()
    """Findings of the live checks of the stages."""
    losses: tuple[WireLoss, ...] = ()
    """Wires that broke between live processes, with the ages of this moment."""
    slowed: bool = False
    """A live check is on, or was a moment ago, that makes steps slower than they were."""
    agent: tuple[int, str | None] | None = None
    """Pid and state letter of an agent that is silent; None: it reports, or is gone."""
    shortages: tuple[Shortage, ...] = ()
    silent_head: tuple[str, float] | None = None
    """Words about the head of a Ray cluster that does not answer, and for how many seconds it is known."""
    tiers: TierEvidence | None = None
    """Stores and backends; None without KV tiers."""
    helpers: tuple[HelperEvidence, ...] = ()
    """Processes beside the pipeline on the engine's own host."""
    stopping: bool = False
    """The engine is stopping on request: processes that end are no fault."""
