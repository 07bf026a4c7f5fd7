"""Builders of realistic snapshots for the tests of views and screens. Everything is deterministic."""

from __future__ import annotations

import random

from ppengine.protocol.inspection import (
    AboutDetail,
    BlocksDetail,
    FaultDetail,
    LedgerDetail,
    LogsDetail,
    OpRecord,
    RequestDetail,
    RingsDetail,
    StacksDetail,
    StageRings,
    StageStacks,
    ThreadRing,
    ThreadStack,
)
from ppengine.protocol.reports import Finding, LedgerBuffer, LedgerHandOff, LedgerStream, StageLedger
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import (
    EngineInfo,
    Event,
    OperationInfo,
    Queues,
    RequestInfo,
    Snapshot,
    Throughput,
    Verdict,
    WaitInfo,
    Why,
)
from ppengine.protocol.stage_info import (
    DeviceInfo,
    KvBlocks,
    StageInfo,
    StageMemory,
    StepMs,
    StreamInfo,
    SwapBlocks,
    Waiting,
)

MIB = 1024 * 1024
WALL = 1_700_000_000.0
OWNERS = ("alice", "bob", "eve", "nightly-eval", "ci")
HOSTILE = "[red]x[/red]\x1b[31m\x1b]0;own\x07\n\u202eevil\u200b\r\t[link=http://a]b[/]"


def engine(**changes: object) -> EngineInfo:
    """An engine that serves."""
    fields: dict[str, object] = {
        "id": "e1",
        "name": "opt@n0",
        "epoch": "b00t5eed0001",
        "state": "serving",
        "model": "opt-30b",
        "pipeline_parallel_size": 4,
        "tensor_parallel_size": 1,
        "executor": "local",
        "memory_utilization": 0.6,
        "memory_revision": 7,
        "uptime_s": 11_520.0,
        "step": 18412,
        "retired_step": 18408,
        "max_model_len": 2048,
        "consoles": 2,
    }
    return EngineInfo(**(fields | changes))  # type: ignore[arg-type]


def timeline(index: int, stages: int, span: float = 200.0) -> list[list[float]]:
    """Forward, send and receive of a pipeline in its steady state, with a swap now and then."""
    period, work = 24.0, 15.0
    found: list[list[float]] = []
    start, number = span - index * 5.0, 18400 + (stages - index)
    while start > 0:
        found.append([1, number, start, 3.0])
        found.append([3, number, start - 3, work])
        found.append([6, number, start - 3 - work, 3.0])
        if number % 7 == 0:
            found.append([7, number, start - 6 - work, 3.0])
        start -= period
        number += 1
    return found


def stage(index: int, stages: int = 4, **changes: object) -> StageInfo:
    """A stage that computes."""
    number = 18412 - index
    state = ("computing", "receiving", "sending", "computing")[index % 4]
    op = {"computing": f"forward m{number}", "receiving": "receive", "sending": "send"}[state]
    capacity = 1377 + (index * 37) % 61
    fields: dict[str, object] = {
        "index": index,
        "tensor_rank": 0,
        "state": state,
        "pid": 41200 + index,
        "host": f"n{index // 8}",
        "layers": [index * 12, index * 12 + 12],
        "device": DeviceInfo(kind="cuda", name="H100 80GB", uuid=f"GPU-{index}"),
        "sample_age_ms": 80.0,
        "progress_age_ms": 12.0 + index,
        "inbox": index % 3,
        "outbox": (index + 1) % 2,
        "waiting_on": None
        if state == "computing"
        else Waiting(
            stage=index - 1 if state == "receiving" else (index + 1) % stages,
            what="receive" if state == "receiving" else "send",
            since_ms=4.0,
        ),
        "micro_batches": [number],
        "step_ms": StepMs(p50=22.0 + index, p99=41.0),
        "idle_fraction": 0.21 + 0.03 * (index % 4),
        "memory": StageMemory(
            total=80_000 * MIB,
            limit=48_000 * MIB,
            used=(44_800 - 500 * index) * MIB,
            weights=16_000 * MIB,
            kv_mapped=24_000 * MIB,
            kv_reserved=58_000 * MIB,
            other=2_400 * MIB,
        ),
        "kv_blocks": KvBlocks(used=812, cached=102, free=110, mapped=1024, capacity=capacity, binding=capacity == 1377),
        "swap_blocks": SwapBlocks(total=256, used=12),
        "streams": [
            StreamInfo(name="comp", owner="main", op=op if state == "computing" else None, age_ms=9.0, pending=3),
            StreamInfo(
                name="p2p",
                owner="transport",
                op=None if state == "computing" else op,
                age_ms=4.0,
                pending=1,
                waits_for="comp:event 4471",
            ),
            StreamInfo(name="copy", owner="swapper", op=None, age_ms=None, pending=0),
        ],
        "op": op,
        "timeline": timeline(index, stages),
    }
    return StageInfo(**(fields | changes))  # type: ignore[arg-type]


def request(number: int, **changes: object) -> RequestInfo:
    """One request; every kind of state comes by as `number` rises."""
    dice = random.Random(number)
    state = ("running", "running", "running", "waiting", "running", "swapped", "running", "held")[number % 8]
    prompt, output = dice.randrange(16, 1990), 0 if state == "waiting" else dice.randrange(1, 400)
    blocks = -(-(prompt + output) // 16)
    resident = state == "running"
    why = {
        "waiting": Why(code="blocks", need=121, have=100, text="need 121, have 100"),
        "swapped": Why(code="blocks", need=blocks, have=100, text="swapped out for r-0003"),
        "held": Why(code="held", text="swap-out by eve"),
    }.get(state)
    fields: dict[str, object] = {
        "id": f"r-{number:04x}",
        "owner": OWNERS[number % len(OWNERS)],
        "state": state,
        "age_s": 300.0 - number * 0.7 % 290,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "blocks": blocks if resident else 0,
        "swap_blocks": 0 if resident or state == "waiting" else blocks,
        "why": why,
        "revision": number % 4,
        "computed_tokens": prompt + output if resident else 0,
        "cached_tokens": prompt // 16 * 16 // 4,
        "in_flight": [18409 + number % 4] if resident else [],
        "preemptions": int(number % 11 == 5),
    }
    return RequestInfo(**(fields | changes))  # type: ignore[arg-type]


def snapshot(stages: int = 4, requests: int = 20, **changes: object) -> Snapshot:
    """A healthy engine with `stages` stages and `requests` requests."""
    found = [request(number) for number in range(requests)]
    counts = {
        state: sum(each.state == state for each in found)
        for state in ("waiting", "running", "swapped", "held", "loading")
    }
    parts = [stage(index, stages) for index in range(stages)]
    for part in parts:
        part.kv_blocks.binding = part.kv_blocks.capacity == min(each.kv_blocks.capacity or 0 for each in parts)
    fields: dict[str, object] = {
        "sampled_at": WALL,
        "engine": engine(pipeline_parallel_size=stages),
        "stages": parts,
        "queues": Queues(**counts),
        "requests_total": requests,
        "requests": found,
        "throughput": Throughput(prompt_tok_s=2140.0, output_tok_s=812.0),
        "event_seq": 7,
        "core_age_ms": 40.0,
        "preemptions_total": 3,
        "prefix_hit_tokens_total": 12_400,
    }
    return Snapshot(**(fields | changes))  # type: ignore[arg-type]


def stuck(stages: int = 4, at: int = 2, requests: int = 20) -> Snapshot:
    """Stage `at` hangs in its forward: those before are blocked, those behind starve."""
    picture = snapshot(stages, requests)
    for each in picture.stages:
        each.progress_age_ms = 6200.0
        if each.index == at:
            each.state, each.idle_fraction, each.step_ms = "computing", 0.0, StepMs(p50=6200.0, p99=6200.0)
            each.op, each.waiting_on = "forward m18410", None
            each.streams[0].op, each.streams[0].age_ms, each.streams[1].op = "forward m18410", 6200.0, None
        elif each.index < at:
            each.state, each.waiting_on = "blocked", Waiting(stage=each.index + 1, what="send", since_ms=6100.0)
            each.streams[0].op, each.streams[1].op, each.streams[1].age_ms = None, "send", 6100.0
            each.outbox = 4
        else:
            each.state, each.waiting_on = "starved", Waiting(stage=each.index - 1, what="receive", since_ms=6000.0)
            each.streams[0].op, each.streams[1].op, each.streams[1].age_ms = None, "receive", 6000.0
            each.micro_batches, each.idle_fraction = [], 0.98
    picture.engine.state = "degraded"
    picture.throughput = Throughput(prompt_tok_s=0.0, output_tok_s=0.0)
    picture.verdicts = [
        Verdict(
            stage=at,
            cause="self_stuck",
            summary=f"attention of m18410 on comp; 0 to {at - 1} blocked, {at + 1} starved",
            since_s=6.2,
            evidence=[
                f"stage {at}: forward of m18410 open for 6.2 s, expected 0.1 s",
                "its process is running (state R), CPU 100 %",
                "no step retired for 6.2 s",
            ],
            suggest=f"ppconsole stacks --stage {at}",
        ),
        Verdict(stage=at - 1, cause="blocked", summary=f"send to stage {at} open for 6.1 s", since_s=6.1, root=False),
    ]
    before = [(f"stage {k}", f"stage {k + 1}", "m18410, which is not received") for k in range(at)]
    behind = [(f"stage {k}", f"stage {k - 1}", "m18410, which is not sent") for k in range(at + 1, stages)]
    picture.waits = [
        WaitInfo(waiter=waiter, on=on, what=what, since_s=6.1)
        for waiter, on, what in (*before, *behind, ("the engine core", f"stage {at}", "m18410 to be retired"))
    ]
    for each in picture.stages:
        each.retired_step = 18410 if each.index < at else 18409
    return picture


def halted(stages: int = 2, at: int = 1) -> Snapshot:
    """Stage `at` was stopped by a signal."""
    picture = snapshot(stages, 8)
    picture.stages[at].state = "stopped"
    picture.stages[at].progress_age_ms = 1900.0
    picture.verdicts = [
        Verdict(
            stage=at,
            cause="stopped",
            since_s=1.9,
            evidence=["/proc says state T"],
            summary="the process was stopped by a signal",
            suggest=f"continue {at}",
        )
    ]
    return picture


def resizing() -> Snapshot:
    """Memory shrinks under running requests."""
    picture = snapshot()
    picture.engine.state = "resizing"
    picture.operations = [
        OperationInfo(id="op-9", verb="set-memory", by="eve", state="accepted", progress="moved 31 of 80")
    ]
    for each in picture.stages:
        each.memory.limit = 32_000 * MIB
    return picture


def unknown() -> Snapshot:
    """Everything that may be unknown is."""
    blank = StageInfo(
        index=0,
        tensor_rank=0,
        state="loading",
        pid=None,
        host="n0",
        layers=[],
        device=DeviceInfo(kind="cpu", name="cpu"),
    )
    return Snapshot(
        engine=engine(state="loading", message="stage 0: reading weights 3 of 8", pipeline_parallel_size=1),
        stages=[blank],
    )


def hostile() -> Snapshot:
    """Texts from outside that try markup, escapes, newlines and a right-to-left override."""
    picture = snapshot(2, 3)
    picture.engine.name = picture.engine.model = HOSTILE
    picture.requests[0].owner = picture.requests[1].id = HOSTILE
    picture.requests[2].why = Why(code="x", text=HOSTILE)
    picture.stages[0].streams[0].op = HOSTILE
    picture.stages[0].host = HOSTILE
    picture.verdicts = [
        Verdict(stage=0, cause="crashed", summary=HOSTILE, since_s=1.0, evidence=[HOSTILE], suggest=HOSTILE)
    ]
    return picture


def events(number: int = 12) -> list[Event]:
    """Events of some minutes."""
    texts = (
        ("op.applied", "eve", "set-memory .70>.60 r7 done in 84 ms, moved 31, lost 0", None),
        ("request.finished", "", "stop after 201 tokens", "r-0007"),
        ("op.applied", "alice", "preempt applied at step 18377", "r-0002"),
        ("request.added", "bob", "1936 tokens", "r-000b"),
        ("stage.stalled", "", "stage 2 made no progress for 2.0 s", None),
    )
    return [
        Event(seq=seq, wall=WALL + 3 * seq, kind=kind, by=by, text=text, request=name, step=18300 + seq)
        for seq in range(1, number + 1)
        for kind, by, text, name in (texts[seq % len(texts)],)
    ]


def blocks(picture: Snapshot, mapped: int = 1024, cells: int = 1024, request: str | None = None) -> BlocksDetail:
    """A block map, in which a request of `picture` has every tenth cell."""
    size = -(-mapped // cells)
    left = -(-mapped // size) - 1
    runs = [(1, "null")]
    dice = random.Random(5)
    while left > 0:
        count = min(left, dice.randrange(2, 40))
        runs.append((count, dice.choice(("used", "used", "used", "shared", "cached", "free"))))
        left -= count
    known = any(each.id == request and each.blocks for each in picture.requests)
    mine = list(range(10, -(-mapped // size), 10)) if known else []
    return BlocksDetail(mapped=mapped, size=size, runs=runs, request=request, mine=mine)


def detail(info: RequestInfo) -> RequestDetail:
    """The drill-down of one request."""
    table = [(7 * index + 31) % 1024 for index in range(info.blocks)]
    return RequestDetail(
        id=info.id,
        owner=info.owner,
        state=info.state,
        why=info.why.text if info.why else "",
        prompt_tokens=info.prompt_tokens,
        output_tokens=info.output_tokens,
        computed_tokens=info.computed_tokens,
        cached_tokens=info.cached_tokens,
        block_table=table,
        shared_blocks=table[:3],
        host_blocks=list(range(40, 40 + info.swap_blocks)),
        in_flight=info.in_flight,
        sampling=SamplingParams(temperature=0.0, max_tokens=512),
        revision=info.revision,
        age_s=info.age_s,
        queued_s=0.03,
        first_token_s=0.31,
        inter_token_ms=21.0,
        preemptions=1,
        swaps=1,
        prompt_token_ids=list(range(100, 180)),
        output_token_ids=list(range(900, 960)),
        prompt_text="A stage that has computed its layers",
        output_text="The stage then hands its hidden states to the next one, and the last of them chooses a token. "
        * 3,
        history=[
            "0.000s waiting",
            "0.030s waiting > running",
            "12.100s running > swapped (preempted by r-0003)",
            "14.800s swapped > running",
        ],
    )


def stacks(stages: int = 2) -> StacksDetail:
    """Stacks of all stages."""
    text = (
        'Thread 41200 (active+gil): "MainThread"\n    attention (ppengine/models/opt.py:88)\n'
        "    forward (ppengine/models/opt.py:141)\n"
        '    run (ppengine/stage/runner.py:210)\nThread 41230 (idle): "control"\n    poll (zmq/sugar/poll.py:106)\n'
    )
    return StacksDetail(stages=[StageStacks(stage=index, pid=41200 + index, text=text) for index in range(stages)])


def logs() -> LogsDetail:
    """Some log lines."""
    return LogsDetail(
        lines=[f"12:03:{index:02d} stage{index % 2} INFO step {18400 + index} retired in 22 ms" for index in range(30)]
        + ["12:03:31 core WARNING stage 1 is slow: 2.0 s"]
    )


def rings(stages: int = 4, at: int | None = 2, steps: int = 64, now_ns: int = 10**12) -> RingsDetail:
    """The last steps of a pipeline; from step 18410 on stage `at` hangs in its forward (None: nobody does)."""
    found = []
    for index in range(stages):
        records = []
        begun = now_ns - (6200 + 22 * steps) * 10**6 + index * 5_000_000
        for number in range(18411 - steps, 18413):
            hangs = at is not None and (number > 18410 or (number == 18410 and index >= at))
            if hangs and (index > at or number > 18410 + at - index):
                break
            end = begun + 20_000_000
            wait = ("receive", number, index - 1) if index else ("idle", 0, -1)
            records.append(OpRecord("step", number, -1, begun, 0, 0 if hangs else end, 4, 40))
            records.append(OpRecord(*wait, begun, 0, begun + 4_000_000, 1024, number))
            held = "forward" if index == at else "send"
            done = 0 if hangs and held == "forward" else end
            records.append(OpRecord("forward", number, -1, begun + 4_000_000, 0, done, 4, index * 12))
            if hangs and held == "send":
                records.append(OpRecord("send", number, index + 1, end, 0, 0, 1024, number))
                records.append(OpRecord("room", number, index + 1, end, 0, 0, 1024, number))
            begun += 22_000_000
        last = max(record.step for record in records)
        finished = max((record.step for record in records if record.kind == "step" and record.done_ns), default=0)
        threads = [ThreadRing(ring="main", name="main", recorded=90_000, records=records)]
        found.append(
            StageRings(stage=index, rank=0, pid=41200 + index, begun_step=last, finished_step=finished, threads=threads)
        )
    return RingsDetail(mono_ns=now_ns, wall=WALL, steps=steps, stages=found)


def fault(picture: Snapshot, at: int = 2, **changes: object) -> FaultDetail:
    """What was kept when stage `at` of `picture` hung."""
    stages = len(picture.stages)
    fields: dict[str, object] = {
        "number": 1,
        "wall": WALL,
        "verdict": picture.verdicts[0],
        "waits": picture.waits,
        "retired": [18410] * at + [18409] * (stages - at),
        "rings": rings(stages, at),
        "stacks": StacksDetail(stages=[hanging(at)], ability="py-spy sees Python and native frames"),
    }
    return FaultDetail(**(fields | changes))  # type: ignore[arg-type]


def hanging(stage: int) -> StageStacks:
    """A stage whose main thread is in its attention while another thread holds the GIL."""
    main = ["attention opt.py:88 (ppengine/models)", "forward opt.py:141 (ppengine/models)", "run runner.py:210"]
    threads = [
        ThreadStack(name="MainThread", frames=main),
        ThreadStack(name="control", owns_gil=True, frames=["spin plugin.py:7", "run threading.py:1012"]),
    ]
    return StageStacks(stage=stage, pid=41200 + stage, text="MainThread", threads=threads, native=True)


def findings() -> list[Finding]:
    """What the ledger says of a read without a wait."""
    return [
        Finding(
            stage=1,
            cause="stream_order",
            summary="stage 1: metadata reads seqstart without waiting for compute, which writes it",
            since_s=3.2,
            evidence=[
                "written by: copy of seqstart on stream compute (cuda:0, owner main, for compute), at runner.py:210",
                "read by: pickling of seqstart on stream metadata (cuda:0, owner main), at broadcast.py:51",
                "seqstart generation 7: no event, wait or synchronise orders the two",
                "to fix: record an event on compute behind the write, and let metadata wait for it before the read",
                "seen 12 times",
            ],
        )
    ]


def ledger() -> LedgerDetail:
    """Return the ledger of one stage whose main thread rewrites a buffer that is still being sent."""
    finding = Finding(
        stage=1,
        cause="stream_order",
        summary="stage 1: main rewrites send>2 buffer 0 while send>2 may still read it",
        since_s=3.0,
        evidence=["read by: send of m1, at stage/transport.py:200 _see_through"],
    )
    stream = LedgerStream(
        name="send>2", owner="send", device="cpu", purpose="send", alive=True, op="send of m7", age_ms=2.5, pending=1
    )
    buffer = LedgerBuffer(
        name="send>2 buffer 0", device="cpu", bytes=2048, generation=7, writer="result of m7 (thread main)",
        readers=["send of m7 (stream send>2)"], in_flight=["send of m7 (stream send>2)"],
    )  # fmt: skip
    handoff = LedgerHandOff(producer="thread main", consumer="thread send", event="queue", count=7)
    stage = StageLedger(stage=1, rank=0, streams=[stream], handoffs=[handoff], buffers=[buffer], findings=[finding])
    return LedgerDetail(on=True, stages=[stage])


def about() -> AboutDetail:
    """Versions and profile."""
    return AboutDetail(
        versions={"ppconsole": "0.1", "torch": "2.9"}, profile={"name": "opt"}, platform="Linux", host="n0",
        started_wall=WALL,
    )  # fmt: skip
