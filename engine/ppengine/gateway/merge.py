"""Merges the newest reports into one `Snapshot`. Pure: old values carry their age, unknown ones are None."""

from __future__ import annotations

import msgspec

from ppengine.common.config import EngineConfig
from ppengine.diagnosis.evidence import Key
from ppengine.diagnosis.process_history import Sighting
from ppengine.diagnosis.tracker import newest_process
from ppengine.protocol.clients import ClientInfo
from ppengine.protocol.gpu import GpuInfo
from ppengine.protocol.reports import CoreReport, ProcessInfo, ProcessReport, StageView
from ppengine.protocol.snapshot import (
    MAX_REQUESTS,
    EngineInfo,
    EngineState,
    IncidentInfo,
    LeaseInfo,
    Snapshot,
    Verdict,
    WaitInfo,
)
from ppengine.protocol.stage_info import (
    DeviceInfo,
    KvBlocks,
    StageInfo,
    StageMemory,
    StageState,
    StepMs,
    SwapBlocks,
    Waiting,
)
from ppengine.protocol.stage_samples import StageSample

_LOADING = frozenset({"start", "load", "profile", "meet"})
_OP_STATES: dict[str, StageState] = {
    "idle": "idle",
    "collective": "idle",
    "mask": "idle",
    "receive": "receiving",
    "token_return": "receiving",
    "all_reduce": "gathering",
    "all_gather": "gathering",
    "send": "sending",
    "room": "sending",
    "swap_out": "swapping",
    "swap_in": "swapping",
    "map": "resizing",
    "load": "loading",
}
"""Stage state by open operation; a stage in any other one computes."""


class Inputs(msgspec.Struct, kw_only=True):
    """The newest of everything, and this moment on both clocks."""

    mono_ns: int
    wall: float
    core: CoreReport | None = None
    sightings: dict[Key, Sighting] = {}
    processes: ProcessReport | None = None
    gpus: dict[str, tuple[GpuInfo, int]] = {}
    """GPUs by UUID, and the time of the agent's report."""
    verdicts: list[Verdict] = []
    waits: list[WaitInfo] = []
    event_seq: int = 0
    consoles: int = 0
    dropped: int = 0
    """Number of reports dropped by agents."""
    stopped: bool = False
    core_away: str = ""
    """How the core ended that is being restarted; empty if none is."""
    incident: IncidentInfo | None = None
    lease: LeaseInfo | None = None
    clients: list[ClientInfo] = []
    http_serves: bool | None = None


def merge(config: EngineConfig, inputs: Inputs) -> Snapshot:
    """Return the picture at this moment."""
    core = inputs.core
    engine = _engine(config, inputs)
    snapshot = Snapshot(
        sampled_at=inputs.wall,
        engine=engine,
        stages=[merge_stage(config, inputs, place, engine.memory_utilization) for place in config.groups.places],
        verdicts=inputs.verdicts,
        waits=inputs.waits,
        event_seq=inputs.event_seq,
        dropped_total=inputs.dropped,
        incident=inputs.incident,
        lease=inputs.lease,
        clients=inputs.clients,
    )
    if core is None:
        return snapshot
    return msgspec.structs.replace(
        snapshot,
        queues=core.queues,
        requests_total=core.requests_total,
        requests=core.requests[:MAX_REQUESTS],
        operations=core.operations,
        throughput=core.throughput,
        latency=core.latency,
        core_age_ms=_ms(inputs.mono_ns - core.mono_ns),
        preemptions_total=core.preemptions_total,
        swaps_total=core.swaps_total,
        prefix_hit_tokens_total=core.prefix_hit_tokens_total,
        tiers=core.tiers,
        dropped_total=inputs.dropped + core.dropped_total,
    )


def _engine(config: EngineConfig, inputs: Inputs) -> EngineInfo:
    state: EngineState | None = "stopped" if inputs.stopped else None
    if inputs.core is not None:
        known = inputs.core.engine
        if inputs.core_away:
            known = msgspec.structs.replace(known, state="degraded", message=inputs.core_away)
        return msgspec.structs.replace(
            known, consoles=inputs.consoles, state=state or known.state, http_serves=inputs.http_serves
        )  # fmt: skip
    profile = config.profile
    return EngineInfo(
        id=config.id,
        name=config.name,
        epoch=config.epoch,
        state=state or "loading",
        model=profile.model.path,
        pipeline_parallel_size=config.stages,
        tensor_parallel_size=profile.parallel.tensor,
        executor=profile.parallel.executor,
        memory_utilization=profile.memory.utilization,
        memory_revision=0,
        uptime_s=max(0.0, inputs.wall - config.started_wall),
        step=0,
        max_model_len=config.max_model_len,
        block_size=profile.memory.block_size,
        max_num_seqs=profile.scheduler.max_num_seqs,
        schedule_ahead=profile.scheduler.schedule_ahead,
        consoles=inputs.consoles,
        http_serves=inputs.http_serves,
        message="" if state else "the core has not reported yet",
    )


def merge_stage(config: EngineConfig, inputs: Inputs, key: Key, utilization: float) -> StageInfo:
    """Return one stage."""
    views = inputs.core.stages if inputs.core else []
    view = next((view for view in views if (view.index, view.rank) == key), None)
    listed = inputs.processes.processes if inputs.processes else []
    process = newest_process(listed, "stage", key)
    seen = inputs.sightings.get(key)
    if seen and process and process.exit_code is None and process.pid != seen.sample.pid:
        seen = None  # The rings of its predecessor.
    sample = seen.sample if seen else None
    age = _ms(inputs.mono_ns - seen.mono_ns) if seen else None
    device = config.profile.memory.device_mib
    info = StageInfo(
        index=key[0],
        tensor_rank=key[1],
        state=stage_state(view, sample, process, inputs.verdicts, key),
        pid=process.pid if process else sample.pid if sample else view.pid if view else None,
        host=view.host if view else "",
        layers=list(view.layers if view and view.layers else config.layers[key[0]]),
        device=DeviceInfo(
            kind=view.device_kind if view else "cpu" if device else "",
            name=view.device_name if view else "",
            uuid=view.device_uuid if view else None,
        ),
        sample_age_ms=age,
        retired_step=view.retired_step if view else None,
        **(msgspec.structs.asdict(view.links) if view else {}),
        cordon=view.cordon if view else None,
        memory=_memory(view, sample, utilization),
        kv_blocks=_kv_blocks(inputs.core, view, sample),
        gpu=_gpu(inputs, view) if view else None,
        swap_blocks=SwapBlocks(
            total=view.swap_blocks if view else None, used=inputs.core.swap_used if inputs.core else None
        ),
    )
    return info if sample is None else _with_sample(info, sample, age or 0.0, view)


def _with_sample(info: StageInfo, sample: StageSample, age: float, view: StageView | None) -> StageInfo:
    waits = sample.waiting_on
    step = f"<{waits.rank}" if waits is not None and waits.rank is not None else ""
    step += f" m{sample.op_step}" if sample.op_step else ""
    return msgspec.structs.replace(
        info,
        progress_age_ms=None if sample.progress_age_ms is None else sample.progress_age_ms + age,
        waiting_on=None if info.state == "dead" else _waiting(sample, age, view),
        inbox=sample.inbox,
        outbox=sample.outbox,
        micro_batches=sample.micro_batches,
        step_ms=StepMs(p50=sample.step_ms_p50, p99=sample.step_ms_p99),
        idle_fraction=sample.idle_fraction,
        rank_wait=sample.rank_wait,
        streams=sample.streams,
        op=None if sample.op is None else sample.op + step,
        timeline=sample.timeline,
    )


def _waiting(sample: StageSample, age: float, view: StageView | None) -> Waiting | None:
    """Return the peer that the stage waits for. A stage that waits for a step without outstanding work is idle."""
    waiting = sample.waiting_on
    if waiting is None or (waiting.what == "step" and view is not None and view.oldest_unretired_age_ms is None):
        return None
    return msgspec.structs.replace(waiting, since_ms=waiting.since_ms + age)


def stage_state(
    view: StageView | None,
    sample: StageSample | None,
    process: ProcessInfo | None,
    verdicts: list[Verdict],
    key: Key,
) -> StageState:
    """Return the state of a stage: by its process, otherwise by the diagnosis, otherwise by its operation."""
    if process is not None and process.exit_code is not None:
        return "dead"
    if process is not None and (process.replaced or (sample is not None and process.pid != sample.pid)):
        return "loading"  # The newest sample is its predecessor's.
    if sample is not None and sample.process_state in (None, "Z", "X"):
        return "dead"
    if sample is not None and sample.process_state == "T":
        return "stopped"
    for verdict in verdicts:
        mine = verdict.stage == key[0] and verdict.rank in (None, key[1])
        if mine and verdict.cause == "stopped":
            return "stopped"
        if mine and verdict.cause in ("blocked", "starved"):
            return "blocked" if verdict.cause == "blocked" else "starved"
    if view is not None and process is not None and view.pid not in (None, process.pid):
        view = None  # It is of a predecessor.
    # Otherwise the core's view is newer than the sample may be: without an agent it is of any age.
    if not view.ready if view is not None else sample is None or sample.phase in _LOADING:
        return "loading"
    if sample is None or sample.phase in _LOADING:
        return "idle" if view is None or view.oldest_unretired_age_ms is None else "computing"
    if sample.op is None:
        return "computing" if (sample.begun_step or 0) > (sample.finished_step or 0) else "idle"
    return _OP_STATES.get(sample.op, "computing")


def held_bytes(sample: StageSample, weights: int | None = None) -> int | None:
    """Return what a stage holds of its device. `weights`: bytes to count if the sample has none yet."""
    parts = sample.gauges.get("weights_bytes") or weights, *map(sample.gauges.get, ("kv_mapped_bytes", "other_bytes"))
    return None if None in parts else sum(part for part in parts if part is not None)


def _memory(view: StageView | None, sample: StageSample | None, utilization: float) -> StageMemory:
    gauges = sample.gauges if sample else {}
    total = gauges.get("total_bytes") or (view.total_bytes if view else None)
    weights = gauges.get("weights_bytes") or (view.weights_bytes if view else None)
    return StageMemory(
        total=total,
        limit=None if total is None else int(total * utilization),
        used=None if sample is None else held_bytes(sample, weights),
        weights=weights,
        kv_mapped=gauges.get("kv_mapped_bytes"),
        kv_reserved=gauges.get("kv_reserved_bytes"),
        other=gauges.get("other_bytes"),
        kv_resident=sample.kv_resident if sample else None,
    )


def _gpu(inputs: Inputs, view: StageView) -> GpuInfo | None:
    """Return the card of a stage, with its ages as of now."""
    if view.device_uuid is None or view.device_uuid not in inputs.gpus:
        return None
    gpu, seen_ns = inputs.gpus[view.device_uuid]
    late = _ms(inputs.mono_ns - seen_ns)
    xids = [msgspec.structs.replace(xid, age_ms=xid.age_ms + late) for xid in gpu.xids]
    age = None if gpu.age_ms is None else gpu.age_ms + late
    processes = gpu.processes
    if processes and view.pid not in {process.pid for process in processes}:
        # The driver numbers processes otherwise than this host, so the names are those of others.
        processes = [msgspec.structs.replace(process, name="") for process in processes]
    return msgspec.structs.replace(gpu, age_ms=age, xids=xids, processes=processes)


def _kv_blocks(core: CoreReport | None, view: StageView | None, sample: StageSample | None) -> KvBlocks:
    mapped = view.mapped if view else None
    if mapped is None and sample is not None:
        mapped = sample.gauges.get("mapped_blocks")
    return KvBlocks(
        used=core.kv_used if core else None,
        cached=core.kv_cached if core else None,
        free=core.kv_free if core else None,
        mapped=mapped,
        capacity=view.capacity if view else None,
        binding=view.binding if view else False,
    )


def _ms(ns: int) -> float:
    return round(max(0, ns) / 1e6, 2)
