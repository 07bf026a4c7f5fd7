"""Real stage processes, driven step by step: tokens, memory work, and what happens when things die."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, reference_greedy
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.ring import Gauge, Kind, Phase, RingReader, Word
from ppengine.protocol.steps import TOKEN_ON_DEVICE, TOKEN_REGISTERED, Move, MoveKind, Row, Step
from ppengine.stage.build import resolve_dtype
from ppengine.stage.worker import failure_words
from stage_core import BLOCK, FakeCore, Sequence
from stage_helpers import resident

PROMPT = [7, 99, 3, 45, 12, 80, 33, 5, 6, 64, 111, 20, 9, 17, 52, 71, 88, 41, 13]
OTHER = [100, 2, 77, 31, 8, 54, 23]
BLOCKS = [3, 1, 9, 4, 12, 6, 2, 20]
OUT, IN, DEVICE = int(MoveKind.OUT), int(MoveKind.IN), int(MoveKind.DEVICE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("stage") / "llama", "llama", dtype="float64")


@pytest.fixture(scope="module")
def reference(model: Path) -> dict[str, list[int]]:
    return {name: reference_greedy(model, prompt, 24, torch.float64) for name, prompt in PROMPTS.items()}


PROMPTS = {"long": PROMPT, "short": OTHER}


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[FakeCore]:
    with FakeCore(model) as core:
        core.serve()
        yield core


@pytest.fixture
def core(served: FakeCore) -> Iterator[FakeCore]:
    """The shared pipeline; requests of a test are released after it."""
    yield served
    served.release()


def test_ready_says_what_the_stage_holds(core: FakeCore) -> None:
    first, last = core.ready[0], core.ready[1]
    assert (first.layers, last.layers) == ([0, 2], [2, 4])
    for ready in (first, last):
        assert ready.block_bytes == 2 * BLOCK * 2 * 2 * 8 * 8  # k and v, tokens, layers, kv heads, head dim, float64
        assert ready.quantum_blocks == 4096 // (2 * BLOCK * 2 * 8 * 8)
        assert ready.total_bytes == 64 * 2**20
        assert ready.weights_bytes < ready.peak_bytes < ready.total_bytes
        assert ready.reserved_blocks == (ready.total_bytes - ready.peak_bytes) // ready.block_bytes
        assert ready.swap_blocks == int(0.001 * 2**30) // ready.block_bytes
        assert ready.pid == core.children[ready.stage].pid
    assert first.weights_bytes != 0 and any("tensors" in line.text for line in core.progress)


@pytest.mark.parametrize("chunk", [len(PROMPT), 7, 1])
def test_chunked_prefill_and_decode_match_transformers(core: FakeCore, reference: dict, chunk: int) -> None:
    sequence = Sequence(core, 0, PROMPT, BLOCKS)
    sequence.prefill(chunk)
    sequence.decode(10)
    assert sequence.outputs == reference["long"][:11]


def test_prefill_and_decode_share_a_step(core: FakeCore, reference: dict) -> None:
    long, short = Sequence(core, 0, PROMPT, BLOCKS), Sequence(core, 70, OTHER, [5, 7, 30, 31])
    long.prefill(64)
    register = {"register": [short.register], "tables": [(70, 0, short.blocks)]}
    for start, count in ((0, 3), (3, 4)):
        rows = [long.row(), Row(70, start, count, start > 0, TOKEN_REGISTERED)]
        sampled = core.run(rows=rows, **register)
        register = {}
        long.take(sampled)
        short.take(sampled)
    for _ in range(8):
        sampled = core.run(rows=[short.row(), long.row()])
        assert [entry.slot for entry in sampled] == [70, 0]
        long.take(sampled)
        short.take(sampled)
    assert long.outputs == reference["long"][:11]
    assert short.outputs == reference["short"][:9]


def test_moved_and_swapped_blocks_keep_their_contents(core: FakeCore, reference: dict) -> None:
    sequence = Sequence(core, 0, PROMPT, BLOCKS)
    sequence.prefill(5)
    # Compaction in list order: 9 goes to 40 and only then 12 to 9.
    moves = [(DEVICE, 9, 40), (DEVICE, 12, 9), (DEVICE, 3, 41)]
    core.run(rows=[], **sequence.move(moves, [41, 1, 40, 4, 9, 6, 2, 20]))
    sequence.decode(3)
    out = [(OUT, block, index + 5) for index, block in enumerate(sequence.blocks[:4])]
    core.run(**sequence.move(out, sequence.blocks))
    other = Sequence(core, 1, OTHER, [41, 1, 40, 4])
    other.prefill(64)  # overwrites what was swapped out
    back = [(IN, index + 5, 50 + index) for index in range(4)]
    # The copy and the row that needs it ride in one step.
    sampled = core.run(rows=[sequence.row()], **sequence.move(back, [50, 51, 52, 53, 9, 6, 2, 20]))
    sequence.take(sampled)
    sequence.decode(8)
    assert sequence.outputs == reference["long"][:13]


def test_map_blocks_grows_shrinks_and_refuses(core: FakeCore, reference: dict) -> None:
    assert [(mapped.blocks, mapped.error) for mapped in core.map(200).values()] == [(200, "")] * 2
    sequence = Sequence(core, 0, PROMPT, [190, 191, 192, 193, 194])
    sequence.prefill(64)
    moves = [(DEVICE, 190 + index, 10 + index) for index in range(5)]
    core.run(**sequence.move(moves, [10, 11, 12, 13, 14]))
    core.map(64)
    sequence.decode(6)
    assert sequence.outputs == reference["long"][:7]
    too_many = core.ready[0].reserved_blocks + 100_000
    refused = core.map(too_many)[0]
    assert refused.blocks == 64
    assert refused.error == (
        f"cannot map {too_many} blocks: addresses are reserved for 1 to {core.ready[0].reserved_blocks}"
    )
    ring = RingReader(Path(core.config.ring_dir) / "s0.0.main.ring")
    assert ring.gauge(Gauge.MAPPED_BLOCKS) == 64
    assert ring.gauge(Gauge.KV_MAPPED_BYTES) == 64 * core.ready[0].block_bytes


def test_shrinking_returns_memory_to_the_system(core: FakeCore) -> None:
    ring = RingReader(Path(core.config.ring_dir) / "s0.0.main.ring")
    pid, base, length = core.children[0].pid, ring.gauge(Gauge.KV_BASE), ring.gauge(Gauge.KV_LENGTH)
    before = resident(base, length, pid)
    core.map(1100, moves=[Move(DEVICE, 1, block) for block in range(100, 1100)])
    full = resident(base, length, pid)
    assert full - before >= 1000 * core.ready[0].block_bytes
    core.map(64)
    assert resident(base, length, pid) <= before + 2**16


def test_sampling_parameters_reach_the_sampler(core: FakeCore, reference: dict) -> None:
    greedy = reference["long"]
    banned = Sequence(core, 0, PROMPT, BLOCKS, min_tokens=2, stop_token_ids=[greedy[0], greedy[1]], logprobs=3)
    core.run(register=[banned.register], tables=[(0, 0, BLOCKS)])
    sampled = core.run(rows=[Row(0, 0, len(PROMPT), True, TOKEN_REGISTERED)])[0]
    assert sampled.token != greedy[0]
    assert len(sampled.top) == 3 and sampled.top[0][0] == greedy[0]
    assert sampled.logprob < sampled.top[0][1] < 0.0
    drawn = [Sequence(core, slot, OTHER, [30 + slot, 40 + slot], temperature=5.0, seed=slot // 2) for slot in (2, 3, 4)]
    for sequence in drawn:
        sequence.prefill(64)
        sequence.decode(5)
    assert drawn[0].outputs == drawn[1].outputs != drawn[2].outputs


def test_rings_tell_what_happened(core: FakeCore) -> None:
    sequence = Sequence(core, 0, PROMPT, BLOCKS)
    sequence.prefill(64)
    folder = Path(core.config.ring_dir)
    first, last = RingReader(folder / "s0.0.main.ring"), RingReader(folder / "s1.0.main.ring")
    assert first.word(Word.PHASE) == last.word(Word.PHASE) == Phase.SERVING
    core.until(lambda: last.gauge(Gauge.STEP_FINISHED) == core.number, "gauge of the finished step")
    kinds = {Kind(record.kind) for record in first.latest(50) if record.step == core.number}
    assert {Kind.STEP, Kind.EMBED, Kind.FORWARD, Kind.SEND} <= kinds
    records = {Kind(record.kind): record for record in last.latest(50) if record.step == core.number}
    assert {Kind.STEP, Kind.RECEIVE, Kind.FORWARD, Kind.HEAD, Kind.SAMPLE} <= set(records)
    assert records[Kind.RECEIVE].peer == 0 and records[Kind.RECEIVE].size == len(PROMPT)
    assert records[Kind.FORWARD].detail == 2 and records[Kind.FORWARD].done_ns > records[Kind.FORWARD].enqueued_ns
    assert RingReader(folder / "s0.0.send.ring").latest(1)[0].peer == 1
    core.until(lambda: Kind(last.latest(1)[0].kind) is Kind.IDLE, "idle at the end")
    core.await_tick(last, "at the end")


def test_steps_of_another_generation_are_dropped(core: FakeCore, reference: dict) -> None:
    core.broadcast(Step(7, 1, 0, map_blocks=2))
    sequence = Sequence(core, 0, PROMPT, BLOCKS)
    sequence.prefill(64)
    assert sequence.outputs == reference["long"][:1]


@pytest.mark.parametrize("family", ["opt-350m", "qwen3"])
def test_other_families_match_transformers(tmp_path: Path, family: str) -> None:
    folder = make_checkpoint(tmp_path / family, family, dtype="float64", layers=3)
    with FakeCore(folder, stages=3, memory={"swap_space_gib": 0.0}) as core:
        core.serve()
        assert {ready.swap_blocks for ready in core.ready.values()} == {0}
        sequence = Sequence(core, 0, PROMPT, BLOCKS)
        sequence.prefill(7)
        sequence.decode(5)
    assert sequence.outputs == reference_greedy(folder, PROMPT, 6, torch.float64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_travels_between_stages(model: Path, dtype: str) -> None:
    outputs = []
    for stages in (1, 2):
        with FakeCore(model, stages=stages, model={"dtype": dtype}) as core:
            core.serve()
            sequence = Sequence(core, 0, PROMPT, BLOCKS)
            sequence.prefill(64)
            sequence.decode(5)
            outputs.append(sequence.outputs)
    # The cut changes no arithmetic, so the tokens are the same in every dtype.
    assert outputs[0] == outputs[1] and len(outputs[0]) == 6


def test_auto_dtype_is_the_checkpoints_but_half_precision_runs_as_float32(model: Path, tmp_path: Path) -> None:
    assert resolve_dtype("auto", read_spec(model).dtype) is torch.float64
    half = read_spec(make_checkpoint(tmp_path / "half", "llama", dtype="bfloat16")).dtype
    assert resolve_dtype("auto", half) is torch.float32
    assert resolve_dtype("bfloat16", half) is torch.bfloat16


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_schedule_ahead_takes_tokens_from_the_device(model: Path, reference: dict, stages: int) -> None:
    with FakeCore(model, stages=stages, scheduler={"schedule_ahead": True}) as core:
        core.serve()
        long, short = Sequence(core, 0, PROMPT, BLOCKS), Sequence(core, 1, OTHER, [5, 7, 30, 31])
        long.prefill(64)
        short.prefill(64)
        numbers = [core.send(rows=[long.row(), short.row()])]
        for ahead in range(1, 10):
            # The token of the step before is on the device; steps pile up without waiting.
            rows = [short.row(TOKEN_ON_DEVICE, ahead), long.row(TOKEN_ON_DEVICE, ahead)]
            numbers.append(core.send(rows=rows[: 1 + (ahead != 9)]))
        for number in numbers:
            sampled = core.result(number)
            long.take(sampled)
            short.take(sampled)
        long.decode(2)
        assert long.outputs == reference["long"][:12]
        assert short.outputs == reference["short"][:11]


def test_a_killed_upstream_is_reported_once_and_the_control_thread_stays(model: Path) -> None:
    """Within a second in the best of three tries."""
    tries: list[float] = []
    while len(tries) < 3 and not any(took < 1.0 for took in tries):
        tries.append(kill_upstream(model))
    assert tries[-1] < 1.0, tries


def kill_upstream(model: Path) -> float:
    """Kill stage 0 under a step; return after how many seconds stage 1 says so."""
    with FakeCore(model) as core:
        core.serve()
        sequence = Sequence(core, 0, PROMPT, BLOCKS)
        os.kill(core.children[0].pid, signal.SIGSTOP)
        core.send(register=[sequence.register], tables=[(0, 0, BLOCKS)], rows=[Row(0, 0, 5, False, TOKEN_REGISTERED)])
        core.send(rows=[Row(0, 5, 5, False, TOKEN_REGISTERED)])
        ring = RingReader(Path(core.config.ring_dir) / "s1.0.main.ring")
        core.until(lambda: Kind(ring.latest(1)[0].kind) is Kind.RECEIVE, "stage 1 waits for stage 0")
        core.await_tick(ring, "while the step loop is blocked")
        core.children[0].kill()
        killed = time.monotonic()
        core.until(lambda: core.fatal, "the fatal report")
        took = time.monotonic() - killed
        assert (core.fatal[0].stage, core.fatal[0].error) == (1, "lost stage 0: it closed the connection")
        core.await_tick(ring, "after the failure")
        assert len(core.fatal) == 1 and core.children[1].poll() is None
        core.shutdown(1)
        assert core.children[1].wait(20) == 0
        return took


def test_an_idle_upstream_reports_a_dead_downstream_when_it_sends(model: Path) -> None:
    with FakeCore(model) as core:
        core.serve()
        sequence = Sequence(core, 0, PROMPT, BLOCKS)
        child = core.children.pop(1)
        child.kill()
        child.wait(20)
        child.close()
        core.send(register=[sequence.register], tables=[(0, 0, BLOCKS)], rows=[Row(0, 0, 5, False, TOKEN_REGISTERED)])
        core.until(lambda: core.fatal, "the fatal report")
        assert (core.fatal[0].stage, core.fatal[0].error) == (0, "lost stage 1: it closed the connection")


def test_a_stale_block_index_is_fatal_and_not_silent(model: Path) -> None:
    with FakeCore(model) as core:
        core.serve(blocks=16)
        sequence = Sequence(core, 0, PROMPT, [1, 2, 16])
        core.send(
            register=[sequence.register],
            tables=[(0, 0, sequence.blocks)],
            rows=[Row(0, 0, len(PROMPT), True, TOKEN_REGISTERED)],
        )
        core.until(lambda: core.fatal, "the fatal report")
        assert core.fatal[0].stage == 0 and "out of" in core.fatal[0].error and "\n" not in core.fatal[0].error


@pytest.mark.parametrize("control", [False, True])
def test_shutdown_ends_with_zero(model: Path, control: bool) -> None:
    with FakeCore(model) as core:
        core.serve()
        for stage in core.children:
            core.shutdown(stage, control)
        assert [child.wait(20) for child in core.children.values()] == [0, 0]
        assert core.complaints(0) == core.complaints(1) == []


def test_shutdown_ends_a_blocked_step_loop(model: Path) -> None:
    with FakeCore(model) as core:
        core.serve()
        os.kill(core.children[0].pid, signal.SIGSTOP)
        sequence = Sequence(core, 0, PROMPT, BLOCKS)
        core.send(register=[sequence.register], tables=[(0, 0, BLOCKS)], rows=[Row(0, 0, 5, False, TOKEN_REGISTERED)])
        ring = RingReader(Path(core.config.ring_dir) / "s1.0.main.ring")
        core.until(lambda: Kind(ring.latest(1)[0].kind) is Kind.RECEIVE, "stage 1 waits for stage 0")
        core.shutdown(1, control=True)
        assert core.children[1].wait(20) == 0


def test_the_lifelines_end_ends_the_process(model: Path) -> None:
    tries: list[float] = []
    while len(tries) < 3 and not any(took < 1.0 for took in tries):
        with FakeCore(model) as core:
            core.serve()
            for child in core.children.values():
                child.close()
            begun = time.monotonic()
            assert [child.wait(20) for child in core.children.values()] == [1, 1]
            tries.append(time.monotonic() - begun)
    assert tries[-1] < 1.0, tries


def test_sigusr2_writes_the_stacks(model: Path) -> None:
    with FakeCore(model, stages=1) as core:
        core.serve()
        os.kill(core.children[0].pid, signal.SIGUSR2)
        file = Path(core.config.run_dir) / "s0.0.stack"
        core.until(lambda: "_serve" in file.read_text() and "control_thread.py" in file.read_text(), "all stacks")


def test_load_failures_are_one_line(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1000)
    with FakeCore(broken, stages=1) as core:
        core.until(lambda: core.failed, "the failure")
        assert core.failed[0].text == f"{weights}: truncated: {size - 1000} bytes, its header says {size}"
        assert core.children[0].wait(20) == 1
        assert core.complaints(0) == [f"error: stage 0: {core.failed[0].text}"]
    weights.unlink()
    with FakeCore(broken, stages=1) as core:
        core.until(lambda: core.failed, "the failure")
        assert str(broken) in core.failed[0].text
        assert core.children[0].wait(20) == 1
        assert len(core.complaints(0)) == 1


def test_a_stage_that_does_not_fit_says_what_would(tmp_path: Path) -> None:
    wide = make_checkpoint(tmp_path / "wide", "llama", dtype="float32", vocab_size=8192)
    with FakeCore(wide, stages=1, memory={"device_mib": 4}) as core:
        core.until(lambda: core.failed, "the failure")
        text = core.failed[0].text
        assert text.startswith("does not fit: weights 4.3 MiB + activations ")
        assert "of 4.0 MiB leave no room for a block of 8.0 KiB; set memory.device_mib to at least " in text
        assert core.children[0].wait(20) == 1
        least = int(text.split("at least ")[1].split(",")[0])
    with FakeCore(wide, stages=1, memory={"device_mib": least + 1}) as core:
        core.serve(blocks=2)


def test_the_control_thread_of_a_stage_that_waits_for_its_neighbour_ticks(model: Path) -> None:
    with FakeCore(model, start=False) as core:
        core.start(1)
        ring = Path(core.config.ring_dir) / "s1.0.main.ring"
        core.until(lambda: any("neighbours" in line.text for line in core.progress), "stage 1 waits")
        reader = RingReader(ring)
        core.until(lambda: Kind(reader.latest(1)[0].kind) is Kind.COLLECTIVE, "the open rendezvous")
        core.await_tick(reader, "meanwhile")
        core.start(0)
        core.serve()


def test_the_reason_behind_a_compiled_call_is_named() -> None:
    error = SystemError("<function lay_out> returned a result with an exception set")
    assert failure_words(error).startswith("SystemError: ")
    error.__cause__ = MemoryError("cannot allocate\n17 GiB")
    assert failure_words(error) == "MemoryError: cannot allocate 17 GiB"
