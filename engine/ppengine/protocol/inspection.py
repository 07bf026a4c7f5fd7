"""Answers to `Inspect`: details that travel on `bulk` on request, and are in no snapshot.

Times of operations are monotonic nanoseconds of the engine's host; those of stages on other nodes are converted.
`mono_ns` and `wall` of a detail are one moment.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.reports import Finding, StageLedger
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Verdict, WaitInfo
from ppengine.protocol.tiers import PromptSources


class RequestDetail(msgspec.Struct, kw_only=True):
    """Drill-down of one request. Times are seconds since its arrival at the engine; None: not yet."""

    id: str
    owner: str
    state: str
    why: str
    prompt_tokens: int
    output_tokens: int
    computed_tokens: int
    cached_tokens: int
    block_table: list[int]
    shared_blocks: list[int]
    host_blocks: list[int]
    in_flight: list[int]
    sampling: SamplingParams
    revision: int
    age_s: float
    prepared_s: float = 0.0
    """Seconds from arrival to the queue: the HTTP process or the gateway, chat template, tokens, grammar."""
    queued_s: float | None = None
    """Seconds in the queue until it first got blocks."""
    first_token_s: float | None = None
    finished_s: float | None = None
    inter_token_ms: float | None = None
    itl_p50_ms: float | None = None
    """Median of the milliseconds between its tokens, at most 2.2 % off; None before the second."""
    itl_p99_ms: float | None = None
    """99th percentile of the milliseconds between its tokens; None before the second."""
    preemptions: int = 0
    swaps: int = 0
    priority: int = 0
    prompt_token_ids: list[int] = []
    output_token_ids: list[int] = []
    output_text: str = ""
    prompt_text: str = ""
    """Text of the prompt's tokens; empty if the engine has no tokenizer."""
    bad_words: list[str] = []
    """Texts of `sampling.bad_words_ids`, without spaces around; none if the engine has no tokenizer."""
    history: list[str] = []
    """State changes, oldest first: `0.012s waiting > running`."""
    principal: str = ""
    """Name of the key that submitted it."""
    client: str = ""
    """Name of the API key of the HTTP port with which it came; empty: it came otherwise."""
    sources: PromptSources | None = None
    """Sources of the tokens of its last start; None without KV tiers."""


class FinishedDetail(msgspec.Struct, kw_only=True):
    """The last 1,000 requests that have ended, the newest first."""

    requests: list[FinishedInfo]
    since: float | None = None
    """Begin of the record that the list is from, in Unix seconds; None: nothing before it is missing."""
    unread: int = 0
    """Requests that ended in that record, whose figures an older engine did not write."""


MAIN_THREAD = "MainThread"
"""Name of a process's main thread in `ThreadStack.name`."""


class ThreadStack(msgspec.Struct, kw_only=True):
    """One thread. `frames`: the newest first, `function file:line`."""

    name: str
    os_id: int | None = None
    owns_gil: bool = False
    frames: list[str] = []


class StageStacks(msgspec.Struct, kw_only=True):
    """Stacks of one stage, as text and by threads; `error` says why there are none, or not the best ones.

    `stage` None: the engine core's.
    """

    stage: int | None
    pid: int | None
    text: str = ""
    error: str = ""
    threads: list[ThreadStack] = []
    native: bool = False
    """Frames of native code are among them."""
    rank: int = 0
    """Tensor rank of the stage."""


class StacksDetail(msgspec.Struct, kw_only=True):
    """Stacks of one or all stages, and of the engine core unless one stage was asked for.

    `ability`: what the agent's self-test found possible, and why not more.
    """

    stages: list[StageStacks]
    core: StageStacks | None = None
    ability: str = ""

    @property
    def all(self) -> list[StageStacks]:
        """Those of the stages, and behind them the core's."""
        return [*self.stages, *([self.core] if self.core is not None else [])]


class LogsDetail(msgspec.Struct, kw_only=True):
    """Newest log lines, each tagged with its process."""

    lines: list[str]


class BlocksDetail(msgspec.Struct, kw_only=True):
    """States of all mapped device blocks, `size` of them a cell: a cell is what its fullest block is.

    `runs`: (cells, state), the state one of free, null, cached, used, shared, the fuller the later. `mine`: in order,
    the cells in which `request` has blocks.
    """

    mapped: int
    size: int = 1
    runs: list[tuple[int, str]]
    request: str | None = None
    mine: list[int] = []


class LedgerDetail(msgspec.Struct, kw_only=True):
    """Streams, hand-offs and buffers of the stages; none while the ledger is off."""

    on: bool
    stages: list[StageLedger]


class FaultInfo(msgspec.Struct, kw_only=True):
    """One kind of fault on demand. `expects`: the causes that are right, the best first; none: no alarm is."""

    kind: str
    does: str
    told: str
    where: str
    expects: list[str]
    clears: bool
    held_out: bool


class FaultsDetail(msgspec.Struct, kw_only=True):
    """Faults that can be had on demand, and those that are on."""

    faults: list[FaultInfo]
    on: list[str]


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
    node: str = ""
    """Node of the stage, if it is not the engine's own."""
    clock_error_ms: float | None = None
    """Most milliseconds by which its times are off, because another clock measured them; None: none."""


class RingsDetail(msgspec.Struct, kw_only=True):
    """The last `steps` steps of every thread of every stage."""

    mono_ns: int
    wall: float
    steps: int
    stages: list[StageRings]


class FaultDetail(msgspec.Struct, kw_only=True):
    """Record of the newest fault; the next fault replaces it. `number` counts them, from 1.

    The verdict is kept up to date until it is cleared, at `over_wall`.
    """

    number: int
    wall: float
    verdict: Verdict
    waits: list[WaitInfo]
    retired: list[int | None]
    """Newest step that each stage has acknowledged; with several ranks a stage, that each of them has, in order."""
    rings: RingsDetail | None = None
    stacks: StacksDetail | None = None
    over_wall: float | None = None
    missing: list[str] = []
    """The parts that could not be kept, with the reason."""


class FindingsDetail(msgspec.Struct, kw_only=True):
    """All findings of the live checks, oldest first; empty while they are off."""

    findings: list[Finding]


class AuditDetail(msgspec.Struct, kw_only=True):
    """Newest lines of the audit log, each one JSON object; prompts are not in it, only their lengths."""

    lines: list[str]


class AboutDetail(msgspec.Struct, kw_only=True):
    """About the engine: `versions` by package, the profile with its defaults, host and start."""

    versions: dict[str, str]
    profile: dict[str, Any]
    platform: str
    host: str
    started_wall: float
    layers: list[list[int]] = []
