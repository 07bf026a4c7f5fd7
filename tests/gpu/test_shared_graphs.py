"""Graphs of steps whose rows share prefixes give what the same steps give as they are.

On a CPU the launches are interpreted, and what a graph would hold is run as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")
pytest.importorskip("msgspec", reason="needs the engine's packages")

import test_chunk_graphs
from ppengine.protocol.steps import Register, Row
from ppengine.stage.backends.cuda import chunk_graphs
from ppengine.stage.backends.cuda.decode_graphs import DecodeGraphs, Padding, shared_sizes
from ppengine.stage.backends.cuda.staging import batch_on_device
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.batch_state import BatchState, Plan
from ppkernels import shared_prefixes
from ppkernels.gpu import paged_decode
from ppkernels.kv_layout import cache_shape
from test_chunk_graphs import BLOCK, LENGTH, Host, eager, make_graphs

ROWS, PREFIX, BLOCKS = 40, 6, 150
LEAST_SAVED = 20 * PREFIX * BLOCK

stage = test_chunk_graphs.stage


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tiles of each launch over shared prefixes."""
    tiles: list[int] = []
    launch = paged_decode.attend_shared

    def counted(fused: Any, kv: Any, batch: Any, shared: Any, *more: Any) -> Any:
        tiles.append(int(shared.used[0]))
        return launch(fused, kv, batch, shared, *more)

    monkeypatch.setattr(shared_prefixes, "LEAST_TOKENS", 4 * BLOCK)
    if not torch.cuda.is_available():
        monkeypatch.setattr(paged_decode, "attend_shared", counted)
    return tiles


@pytest.fixture
def state() -> BatchState:
    """Requests with a prefix of six blocks, and two blocks of their own."""
    state, blocks = BatchState(LENGTH, BLOCK), (torch.randperm(BLOCKS - 1) + 1).tolist()
    prefix = [blocks.pop() for _ in range(PREFIX)]
    for slot in range(ROWS + 1):
        state.register([Register(slot, str(slot), [9] * LENGTH, LENGTH, 0.0, 1.0, 0, slot, 0, 0, [], -1)])
        state.set_tables([(slot, 0, [*prefix, blocks.pop(), blocks.pop()])])
    return state


def decodes(count: int) -> list[Row]:
    return [Row(slot, PREFIX * BLOCK + slot % 20, 1, True, 5 + slot) for slot in range(count)]


def compare(graphs: Any, stage: Any, plan: Plan, state: BatchState, kv: list[torch.Tensor], want: Any) -> None:
    ids = state.input_ids(plan, plan.slots[:0])
    with torch.inference_mode():
        assert graphs.serves(plan)
        graphs.fill(plan, ids)
        graphs.send()
        launched = graphs.run()
        wanted = eager(stage, plan, torch.from_numpy(ids).to(kv[0].device), want)
    torch.testing.assert_close(launched.out, wanted, rtol=1e-5, atol=1e-5)


def caches(stage: Any, device: torch.device) -> list[torch.Tensor]:
    shape = cache_shape(BLOCKS, BLOCK, stage.spec.num_kv_heads, stage.spec.head_dim, device)
    return [torch.randn(shape, device=device) for _ in range(2)]


def test_a_prompt_beside_decodes(
    stage: Any, device: torch.device, state: BatchState, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_graphs, "SHARED_SIZES", (64,))
    kv = caches(stage, device)
    plan = state.plan([*decodes(ROWS), Row(ROWS, PREFIX * BLOCK, 9, True, -2)])
    with torch.inference_mode():
        graphs = make_graphs(
            chunk_graphs.ChunkGraphs, stage, kv, device, torch.zeros(64, dtype=torch.int32, device=device)
        )
    graphs._least_saved = LEAST_SAVED
    compare(graphs, stage, plan, state, kv, [layer.clone() for layer in kv])
    few = state.plan([*decodes(19), Row(ROWS, PREFIX * BLOCK, 9, True, -2)])
    apart = state.plan([Row(slot, 10, 1, True, 5) for slot in range(ROWS)])
    for plan in (few, apart):
        compare(graphs, stage, plan, state, kv, [layer.clone() for layer in kv])
    if device.type == "cpu":
        assert read == [3, 3], "two layers; few rows, and those without a prefix, have graphs without the launch"


def test_decodes(stage: Any, device: torch.device, state: BatchState, read: list[int], tmp_path: Path) -> None:
    kv = caches(stage, device)
    compute: Any = Stream("compute", device) if device.type == "cuda" else Host()
    latest = torch.zeros(64, dtype=torch.int32, device=device)
    graphs = DecodeGraphs(stage, kv, compute, ROWS, LENGTH // BLOCK, BLOCK, latest, None)
    if device.type == "cuda":
        before = [layer.clone() for layer in kv]
        with torch.inference_mode():
            graphs.capture(torch.cuda.graph_pool_handle(), lambda done: None)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(kv, before, strict=True)), "a capture stores nothing"
    else:

        class Replay:
            def __init__(self, shape: Padding) -> None:
                self.shape = shape

            def replay(self) -> None:
                graphs._graphs[self.shape][1].copy_(graphs._forward(self.shape))

        for shape in graphs.shapes:
            graphs._graphs[shape] = Replay(shape), torch.zeros(shape.rows, stage.spec.vocab_size)  # type: ignore[assignment]
    graphs._least_saved = LEAST_SAVED
    for count in (ROWS, 30, 12, 23):
        compare(graphs, stage, state.plan(decodes(count)), state, kv, [layer.clone() for layer in kv])
        assert graphs._next[0].shared == (count > 20)
    if device.type == "cpu":
        assert read == [3, 3, 2, 2, 2, 2]


FORCED = {
    "over the end of the prefix": [*decodes(20), Row(ROWS, PREFIX * BLOCK - 3, 8, True, -2)],
    "some sample": [Row(slot, PREFIX * BLOCK + 2, 3, not slot % 2, -2) for slot in range(13)],
    "one alone": [Row(0, PREFIX * BLOCK - 8, 30, True, -2)],
}


@pytest.mark.parametrize("rows", FORCED.values(), ids=FORCED)
def test_tokens_of_one_row_share_its_prefix(
    stage: Any, device: torch.device, state: BatchState, read: list[int], rows: list[Row]
) -> None:
    """Each is a row of a graph of decodes, and reads tokens that the step itself stores in shared blocks."""
    kv = caches(stage, device)
    with torch.inference_mode():
        latest = torch.zeros(64, dtype=torch.int32, device=device)
        graphs = make_graphs(DecodeGraphs, stage, kv, device, latest)
    graphs._least_saved, want = 1, [layer.clone() for layer in kv]
    compare(graphs, stage, state.plan(rows), state, kv, want)
    assert graphs._next[0].shared and graphs._next[1] == sum(row.count for row in rows)
    for layer, wanted in zip(kv, want, strict=True):
        torch.testing.assert_close(layer, wanted, rtol=1e-5, atol=1e-5)


def test_too_few_rows_for_a_graph_of_their_own(
    stage: Any, device: torch.device, state: BatchState, read: list[int]
) -> None:
    compute: Any = Stream("compute", device) if device.type == "cuda" else Host()
    graphs = DecodeGraphs(stage, caches(stage, device), compute, 3, LENGTH // BLOCK, BLOCK, None, None)
    graphs._least_saved = 1
    plan = state.plan(decodes(3))
    assert plan.shared_prefixes(1) is not None
    graphs.fill(plan, state.input_ids(plan, plan.slots[:0]))
    graphs.send()
    assert graphs._next == (Padding(3, False), 3, 3)


def test_a_step_without_a_graph_has_them_on_the_device(
    device: torch.device, state: BatchState, read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    plan = state.plan([*decodes(ROWS), Row(ROWS, PREFIX * BLOCK, 9, True, -2)])
    words = plan.shared_prefixes(LEAST_SAVED)
    assert words is not None
    assert batch_on_device(plan.batch, device).shared is None
    batch = batch_on_device(plan.batch, device, words)
    assert batch.shared is not None
    found = (batch.shared.used, batch.shared.lengths, batch.shared.members, batch.shared.places)
    for part, want in zip(found, shared_prefixes.parts_of(words, ROWS + 1), strict=True):
        assert part.tolist() == want.tolist()
    assert batch.block_tables.tolist() == plan.batch.block_tables.tolist()


def test_sizes() -> None:
    assert shared_sizes(3) == []
    assert shared_sizes(4) == [4] and shared_sizes(40) == [4, 8, 16, 32, 40]
    assert shared_sizes(512) == [4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512]
