"""No request is the first to use a kernel: boot launches each variant that a step may need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which has no macOS build")

from kernel_variants import Variant, Variants
from ppengine.protocol.reports import Finding
from ppengine.protocol.steps import Adjustments, Check, Mask, Move, MoveKind, Row
from ppengine.protocol.token_mask import TokenMask
from ppengine.stage.backends.cuda import chunk_graphs, cuda_runner, decode_graphs, device_buffers
from ppengine.stage.backends.cuda.device_tokens import LocalTokenTable
from ppengine.stage.profile_run import CONTEXTS, small_steps
from ppengine.stage.rank_group import LoneRank
from ppkernels import shared_prefixes
from ppkernels.batch import Batch
from ppkernels.gpu import collectives, norms, paged_decode, paged_prefill
from ppkernels.shared_prefixes import LEAST_TOKENS, on_device, words_of
from standin_card import TOKENS, WIDTH, Device, Layers, Pair, alone, decode, prompt, request
from standin_sampling import booted, sampling_card

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")
SIZES = 4, 8
"""Padded numbers of tokens of the graphs here; a step with more is launched as it is."""
WIDEST = chunk_graphs.SIZES[-1]
SLOTS = 4
LEAST = 4
"""Tokens of the shortest prefix."""
HOT: dict[str, Any] = {"temperature": 0.8}
CHANGE = Adjustments(frequency_penalty=0.5, min_p=0.1)
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "random": HOT,
    "top-k and top-p": {**HOT, "top_k": 3, "top_p": 0.9},
    "adjusted": {"adjustments": CHANGE},
    "adjusted and random": {**HOT, "adjustments": CHANGE},
    "the log-probability": {"logprobs": 0},
    "3 log-probabilities": {"logprobs": 3},
    "prompt scored": {"prompt_logprobs": 2},
}
STEPS = {
    "a decode": decode(9),
    "decodes": [*decode(9), *decode(9, slot=1), *decode(9, slot=2)],
    "a short prompt": prompt(),
    "a prompt beside a decode": [*decode(9, slot=1), *prompt()],
    **{f"{count} tokens": prompt(tokens=count) for count in (9, 10)},
    **{f"{count} tokens beside a decode": [*decode(9, slot=1), *prompt(tokens=count)] for count in (9, 10)},
    **{f"{count} tokens beside decodes": [*decode(9, slot=1), *decode(9, slot=2), *prompt(tokens=count)]
       for count in (9, 10)},
}  # fmt: skip


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    return Variants(monkeypatch, runs=True)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, variants: Variants) -> Device:
    return sampling_card(monkeypatch, SIZES)


def registered(wish: dict[str, Any]) -> dict[str, Any]:
    """Return what a step needs to make requests known, in all slots, that wish for the same."""
    fields: dict[str, Any] = {"register": [], "tables": []}
    for slot in range(SLOTS):
        one = request(slot, tokens=TOKENS, blocks=tuple(range(1, 12)))
        one["register"][0].tokens = [1 + place % (WIDTH - 1) for place in range(TOKENS)]
        for name, value in wish.items():
            setattr(one["register"][0], name, value)
        for name, values in one.items():
            fields[name] += values
    return fields


def wishes() -> Iterator[tuple[list[Row], dict[str, Any]]]:
    """Yield steps of all shapes for requests of all kinds."""
    for wish in WISHES.values():
        for rows in STEPS.values():
            yield rows, registered(wish)
    for rows in STEPS.values():
        yield rows, {**registered(HOT), "masks": [Mask([row.slot for row in rows], TokenMask(b"\x7f\0\0\0"))]}


def test_boot_launches_what_requests_do(variants: Variants, card: Device, tmp_path: Path) -> None:
    stage = alone(card, tmp_path)
    booted(stage)
    warmed = variants.taken()
    steps = [stage.step(rows, **fields).finish() for rows, fields in wishes()]
    used = variants.taken()
    assert {name.rpartition(".")[2] for name, _ in used} == {
        "sample_rows", "adjust_rows", "append_tokens", "logprob_rows", "keep_allowed"
    }  # fmt: skip
    assert 0 < card.log.count("replay") < len(steps), "some by graphs, some not"
    assert used - warmed == set()


def test_boot_launches_what_a_shrink_does(variants: Variants, card: Device, tmp_path: Path) -> None:
    stage = alone(card, tmp_path)
    booted(stage)
    warmed = variants.taken()
    stage.step(map_blocks=12).finish()
    for count in (1, 2, 5):
        stage.step(moves=[Move(MoveKind.DEVICE, 6 + block, 1 + block) for block in range(count)]).finish()
    used = variants.taken()
    assert {name.rpartition(".")[2] for name, _ in used} == {"_copy"}
    assert used - warmed == set()


@pytest.mark.parametrize("by_device", [True, False])
def test_boot_launches_what_a_pipeline_does(variants: Variants, card: Device, tmp_path: Path, by_device: bool) -> None:
    stages = Pair(card, tmp_path, by_device)
    booted(stages.first, stages.last)
    for stage in (stages.first, stages.last):
        stage.checks.checksum = True
    warmed = variants.taken()
    for rows in STEPS.values():
        for wish in (HOT, WISHES["adjusted"]):
            stages.step(rows, **registered(wish))
    used = variants.taken()
    assert {name.rpartition(".")[2] for name, _ in used} == {"sample_rows", "adjust_rows", "append_tokens", "_sum"}
    assert used - warmed == set()


def test_no_graph_has_the_rows_of_sums_by_copies(card: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert WIDEST < 2 * device_buffers.AT_ONCE_ROWS
    for ranks in (2, 3, 4):
        larger = chunk_graphs.larger_tokens(1.0, ranks)
        widest = chunk_graphs.padded_shapes(2**20, 512, larger)[-1]
        assert WIDEST < widest.tokens <= ranks * device_buffers.AT_ONCE_ROWS
    monkeypatch.setattr(device_buffers, "AT_ONCE_ROWS", 1)
    monkeypatch.setattr(Layers, "group", LoneRank(0, 2))
    stage = alone(card, tmp_path)
    booted(stage)
    decodes = stage.buffers.graphs[0]
    assert isinstance(decodes, decode_graphs.DecodeGraphs) and decodes.sizes == [1, 2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_take_no_graph_behind_a_finding(card: Device, tmp_path: Path, ranks: int) -> None:
    """Another rank has not found it yet, or finds nothing: its calls have the step's own rows."""
    stage = alone(card, tmp_path)
    booted(stage)
    stage.run_on(tokens=LocalTokenTable(), group=LoneRank(0, ranks))

    def replays(**more: Any) -> int:
        before = card.log.count("replay")
        stage.step(decode(9), **more).finish()
        return card.log.count("replay") - before

    assert replays(checks=Check.FINITE, **request()) == 0
    stage.checks.non_finite(1, Finding(stage=0, cause="non_finite", summary="a NaN", since_s=0.0, evidence=[]))
    assert replays() == (ranks == 1)
    assert replays(checks=0) == 1


@pytest.mark.parametrize("few", [1, 3])
def test_a_step_without_a_graph_reads_a_shared_prefix_once(
    card: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """All requests here have the same blocks."""
    seen: list[Batch] = []
    on_device = cuda_runner.batch_on_device
    monkeypatch.setattr(cuda_runner, "batch_on_device", lambda *args: seen.append(on_device(*args)) or seen[-1])
    monkeypatch.setattr(cuda_runner, "FEW_ROWS", few)
    monkeypatch.setattr(cuda_runner, "least_saved", lambda kv: 2 * LEAST)
    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", LEAST)
    stage = alone(card, tmp_path)
    booted(stage)
    stage.step(STEPS["decodes"], checks=Check.FINITE, **registered({})).finish()
    (batch,) = seen
    assert (batch.shared is not None) == (few < 3)
    if batch.shared is not None:
        assert batch.shared.used.tolist() == [1] and batch.shared.places.tolist() == [0, 1, 2]


LONGEST, BLOCK, HEAD_DIM, PROCESSORS = 40_960, 16, 128, 132


class Attention:
    """Launches of attention on a card with as many processors as an H200 has; nothing is computed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int) -> None:
        for module in (paged_decode, paged_prefill):
            monkeypatch.setattr(module, "processors", lambda device: PROCESSORS)
        self._variants = Variants(monkeypatch, runs=False)
        self._heads = heads
        self._kv = torch.empty(1, 2, BLOCK, kv_heads, HEAD_DIM, dtype=torch.bfloat16)
        self._width = heads + 2 * kv_heads

    def step(self, tokens: int, rows: int, longest: int, decodes: bool, shared: bool = False) -> set[Variant]:
        """Return the variants of a step of `tokens`; the last row has those that the others have not.

        `shared`: some rows share prefixes.
        """
        lens = [1 if decodes else 2] * (rows - 1)
        ints = torch.empty(rows + 1, dtype=torch.int32)
        tables = torch.empty(rows, -(-longest // BLOCK), dtype=torch.int32)
        lens.append(tokens - sum(lens))
        prefixes = on_device(torch.empty(words_of(rows), dtype=torch.int32), rows) if shared else None
        batch = Batch(ints, ints, ints, lens, ints, tables, tokens == rows, BLOCK, prefixes)
        fused = torch.empty(tokens, self._width, HEAD_DIM, dtype=torch.bfloat16)
        output = torch.empty(tokens, self._heads * HEAD_DIM, dtype=torch.bfloat16)
        if decodes or tokens == 1:
            paged_decode.attend_decodes(fused, self._kv, batch, self._heads, output)
        if not batch.decode_only:
            paged_prefill.attend_chunks(fused, self._kv, batch, self._heads, output)
        return self._variants.taken()


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (16, 4), (8, 2), (4, 1), (32, 32)])
@pytest.mark.parametrize("most", [2, 16, 256])
def test_boot_launches_the_attention_of_each_step(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, most: int
) -> None:
    attention = Attention(monkeypatch, heads, kv_heads)
    warmed: set[Variant] = set()
    for (row,) in small_steps(8192, LONGEST):
        warmed |= attention.step(row.count, 1, row.start + row.count, row.count == 1)
    warmed |= attention.step(8192, 1, LONGEST, decodes=False)
    for size in decode_graphs.batch_sizes(most):
        warmed |= attention.step(size, size, LONGEST, decodes=True)
    for size in decode_graphs.shared_sizes(most):
        warmed |= attention.step(size, size, LONGEST, decodes=True, shared=True)
    for tokens, rows, shared in chunk_graphs.padded_shapes(8192, most):
        warmed |= attention.step(tokens, rows, LONGEST, decodes=True, shared=shared)
    used: set[Variant] = set()
    for longest in (1, *CONTEXTS, 1000, 2500, 7000, 12_000, 25_000, LONGEST):
        for rows in [*range(1, min(most, 40) + 1), min(most, 100), most]:
            used |= attention.step(rows, rows, longest, decodes=True)
            for more in (1, 2000, 6000):
                used |= attention.step(rows + more, rows, longest, decodes=True)
                if rows > chunk_graphs.FEW_ROWS and longest > LEAST_TOKENS:
                    used |= attention.step(rows + more, rows, longest, decodes=True, shared=True)
    assert used - warmed == set()


def test_boot_gathers_logits_of_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    variants, table = Variants(monkeypatch, runs=False), torch.zeros(4, dtype=torch.int64)

    def gather(rows: int) -> None:
        part, whole = (torch.empty(rows, width, dtype=torch.bfloat16) for width in (512, 1024))
        collectives.all_gather(part, whole, table, 512, table, table, 0, 2, 2**20)

    for rows in device_buffers.WARM_ROWS:
        gather(rows)
    warmed = variants.taken()
    for rows in range(1, 66):
        gather(rows)
    assert variants.taken() <= warmed


def test_a_norm_has_one_variant_for_any_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    variants, weight = Variants(monkeypatch, runs=False), torch.ones(1024)
    for rows in (1, 2, 15, 16, 17):
        norms.rms_norm(torch.empty(rows, 1024), weight, 1e-5)
    assert len(variants.taken()) == 1
