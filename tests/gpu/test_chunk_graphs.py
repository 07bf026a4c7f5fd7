"""Steps with short prompts as graphs: padded to a size, they give what the same step gives as it is.

On a CPU the launches are interpreted, and what a graph would hold is run as it is.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")
pytest.importorskip("msgspec", reason="needs the engine's packages")

from ppengine.checkpoint.model_spec import read_spec
from ppengine.models import build_stage, init_dummy
from ppengine.protocol.steps import TOKEN_ON_DEVICE, Register, Row
from ppengine.stage.backends.cuda import chunk_graphs
from ppengine.stage.backends.cuda.chunk_graphs import ROWS, ChunkGraphs, Padded, larger_tokens, padded_shapes
from ppengine.stage.backends.cuda.decode_graphs import MORE_READ, MORE_TOKENS, DecodeGraphs
from ppengine.stage.backends.cuda.staging import batch_on_device
from ppengine.stage.backends.cuda.streams import Order, Stream
from ppengine.stage.batch_state import BatchState, Plan
from ppkernels.kv_layout import cache_shape

BLOCK, LENGTH, BLOCKS, REQUESTS = 16, 256, 190, 150
CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2,
        "ffn_dim": 64, "num_attention_heads": 2, "word_embed_proj_dim": 32, "vocab_size": 64,
        "max_position_embeddings": LENGTH, "activation_function": "relu", "do_layer_norm_before": True,
        "torch_dtype": "float32", "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
        "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "torch_dtype": "float32", "tie_word_embeddings": False, "bos_token_id": 2, "eos_token_id": 2,
    },
}  # fmt: skip
STEPS = {
    "prompt": [Row(0, 0, 40, True, -2)],
    "whole size": [Row(0, 0, 64, True, -2)],
    "prompts and decodes": [Row(0, 3, 1, True, 7), Row(1, 0, 17, True, -2), Row(2, 30, 1, True, TOKEN_ON_DEVICE)],
    "chunks": [Row(3, 16, 40, False, -2), Row(1, 0, 50, True, -2), Row(0, 20, 1, True, 5)],
    "nearly all padding": [Row(0, 0, 130, True, -2)],
    "as many rows as few are": [Row(slot, 5, 1, True, 9) for slot in range(ROWS[0] - 1)] + [Row(40, 0, 3, True, -2)],
    "more rows": [Row(slot, 5, 1, True, 9) for slot in range(40)] + [Row(40, 0, 3, True, -2)],
    "as many rows as there can be": [Row(slot, 5, 1, True, 9) for slot in range(REQUESTS)],
}
FEW_MORE = {
    "forced runs": [
        Row(0, 3, 1, True, 7), Row(1, 14, 5, True, -2), Row(3, 9, 2, True, -2), Row(2, 30, 1, True, TOKEN_ON_DEVICE)
    ],
    "a short prompt": [*[Row(slot, 5, 1, True, 9) for slot in range(40)], Row(40, 0, 12, True, -2)],
    "rows that do not sample": [Row(0, 3, 1, True, 7), Row(1, 0, 1, False, -2), Row(2, 14, 4, False, -2)],
}  # fmt: skip


class Host:
    """A stream that is none."""

    order = Order()

    def doing(self, what: str, reads: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def use(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def record(self, name: str) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


@pytest.fixture(params=sorted(CONFIGS))
def stage(request: pytest.FixtureRequest, tmp_path: Path, device: torch.device) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[request.param]))
    spec = read_spec(tmp_path)
    model = build_stage(spec, (0, 2), True, True, torch.float32, device, LENGTH)
    init_dummy(model, 3)
    return model


def make_state() -> BatchState:
    """Requests whose blocks lie apart; the last entries of every table are blocks that do not exist."""
    state, order = BatchState(LENGTH, BLOCK), (torch.randperm(BLOCKS - 1) + 1).tolist()
    prompt = torch.randint(3, 60, (LENGTH,)).tolist()
    for slot in range(REQUESTS):
        state.register([Register(slot, str(slot), prompt, LENGTH, 0.0, 1.0, 0, slot, 0, 0, [], -1)])
        blocks = [order.pop() for _ in range(9 if slot < 4 else 1)]
        state.set_tables([(slot, 0, blocks)])
    return state


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_a_padded_step_is_what_the_step_is(stage: Any, device: torch.device, rows: list[Row]) -> None:
    compare(ChunkGraphs, stage, device, rows)


@pytest.mark.parametrize("rows", FEW_MORE.values(), ids=FEW_MORE)
def test_a_few_more_tokens_than_rows_are_rows_of_a_graph_of_decodes(
    stage: Any, device: torch.device, rows: list[Row]
) -> None:
    compare(DecodeGraphs, stage, device, rows)


def compare(kind: type[ChunkGraphs] | type[DecodeGraphs], stage: Any, device: torch.device, rows: list[Row]) -> None:
    """Run a step as a graph and as it is: logits, keys, values, and where they are sampled are the same."""
    torch.manual_seed(1)
    state = make_state()
    plan = state.plan(rows)
    on_device = np.full(int((plan.tokens == TOKEN_ON_DEVICE).sum()), -1)
    ids = state.input_ids(plan, on_device)
    latest = torch.arange(200, dtype=torch.int32, device=device)
    shape = cache_shape(BLOCKS, BLOCK, stage.spec.num_kv_heads, stage.spec.head_dim, device)
    before = [torch.randn(shape, device=device) for _ in range(2)]
    with torch.inference_mode():
        kv = [layer.clone() for layer in before]
        graphs = make_graphs(kind, stage, kv, device, latest)
        assert graphs.serves(plan)
        # What an earlier step has left: nothing of it may be used, or be read.
        graphs._tables.fill_(2**20)
        graphs._staging._host[1].fill_(2**20)
        if device.type == "cuda":
            torch.cuda.synchronize()  # the graphs have a stream of their own
        graphs.fill(plan, ids)
        graphs.send()
        launched = graphs.run()
        want_kv = [layer.clone() for layer in before]
        want = eager(stage, plan, torch.from_numpy(np.where(ids < 0, plan.slots[-1], ids)).to(device), want_kv)
    torch.testing.assert_close(launched.out, want, rtol=1e-5, atol=1e-5)
    assert launched.slots.tolist() == plan.sampled_slots.tolist()
    assert launched.positions.tolist() == plan.ends[plan.sampled].tolist()
    for layer, wanted in zip(kv, want_kv, strict=True):
        torch.testing.assert_close(layer, wanted, rtol=1e-5, atol=1e-5)


def make_graphs(
    kind: type[ChunkGraphs] | type[DecodeGraphs],
    stage: Any,
    kv: list[torch.Tensor],
    device: torch.device,
    latest: torch.Tensor,
) -> Any:
    """Graphs over a copy of `kv` while they are captured: a capture writes to the null block alone, as it should."""
    compute: Any = Stream("compute", device) if device.type == "cuda" else Host()
    most = (512, REQUESTS) if kind is ChunkGraphs else (REQUESTS,)
    graphs: Any = kind(stage, kv, compute, *most, LENGTH // BLOCK, BLOCK, latest, None)
    if device.type == "cuda":
        before = [layer.clone() for layer in kv]
        torch.cuda.synchronize()
        graphs.capture(torch.cuda.graph_pool_handle(), lambda done: None)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(kv, before, strict=True)), "a capture stores nothing"
        return graphs

    class Replay:
        """Runs what a graph would hold."""

        def __init__(self, shape: Any) -> None:
            self.shape = shape

        def replay(self) -> None:
            graphs._graphs[self.shape][1].copy_(graphs._forward(self.shape))

    for shape in graphs.shapes:
        graphs._graphs[shape] = Replay(shape), torch.zeros(shape.rows, stage.spec.vocab_size)
    return graphs


def eager(stage: Any, plan: Plan, ids: torch.Tensor, kv: list[torch.Tensor]) -> torch.Tensor:
    batch = batch_on_device(plan.batch, device_of(kv)) if kv[0].is_cuda else plan.batch
    out = stage.run(stage.embed(ids, batch.positions), batch, kv)
    logits: torch.Tensor = stage.logits(out[torch.from_numpy(plan.last_tokens).to(out.device)])
    return logits


def device_of(kv: list[torch.Tensor]) -> torch.device:
    return kv[0].device


def test_what_is_too_much_for_a_graph_is_left(stage: Any, device: torch.device) -> None:
    state = make_state()
    compute: Any = Stream("compute", device) if device.type == "cuda" else Host()
    kv = [torch.zeros(cache_shape(4, BLOCK, stage.spec.num_kv_heads, stage.spec.head_dim, device), device=device)] * 2
    graphs = ChunkGraphs(stage, kv, compute, 100, 40, LENGTH // BLOCK, BLOCK, None, None)
    assert graphs.shapes == [Padded(64, 32), Padded(64, 40)]
    assert graphs.serves(state.plan([Row(0, 0, 64, True, -2)]))
    assert not graphs.serves(state.plan([Row(0, 0, 65, True, -2)]))
    none = ChunkGraphs(stage, kv, compute, 63, 40, 16, BLOCK, None, None)
    assert not none.serves(state.plan([Row(0, 0, 1, True, -2)]))
    more = [Row(slot, 5, 1, True, 9) for slot in range(40)]
    assert graphs.serves(state.plan(more)) and not graphs.serves(state.plan([*more, Row(40, 5, 1, True, 9)]))
    assert chunk_graphs.SIZES[-1] == 1024


def test_many_more_tokens_than_rows_are_no_decodes(stage: Any, device: torch.device) -> None:
    """Each of them reads all that is before it, which chunks read once."""
    state, compute = make_state(), Host()
    kv = [torch.zeros(cache_shape(4, BLOCK, stage.spec.num_kv_heads, stage.spec.head_dim, device), device=device)] * 2
    graphs = DecodeGraphs(stage, kv, compute, 40, LENGTH // BLOCK, BLOCK, None, None)  # type: ignore[arg-type]
    decodes = [Row(slot, 5, 1, True, 9) for slot in range(4, 11)]
    most = [*decodes, Row(0, 0, MORE_TOKENS + 1, True, -2)]
    assert sum(row.count for row in most) == 40 and graphs.serves(state.plan(most))
    for more in (Row(0, 0, MORE_TOKENS + 2, True, -2), Row(0, 0, MORE_TOKENS + 3, True, -2)):
        assert not graphs.serves(state.plan([*decodes[1:], more])), "more than all graphs hold, or read too often"
    far = LENGTH - MORE_TOKENS - 1
    assert (far + MORE_TOKENS) * MORE_TOKENS < MORE_READ, "the lengths here are short"
    assert not graphs.serves(state.plan([Row(slot, 5, 1, True, 9) for slot in range(41)]))


def test_shapes_have_no_more_rows_than_tokens_or_requests() -> None:
    assert padded_shapes(128, 4096) == [Padded(64, 32), Padded(64, 64), Padded(128, 32), Padded(128, 128)]
    assert padded_shapes(64, 8) == [Padded(64, 8)] and padded_shapes(63, 8) == []
    most = [Padded(1024, 32), *(Padded(1024, rows, shared) for rows in (128, 512) for shared in (False, True))]
    assert padded_shapes(4096, 4096)[-5:] == most
    larger = [Padded(size, 512) for size in (1536, 2048, 3072, 4096)]
    assert padded_shapes(9000, 4096, larger=5000) == [*padded_shapes(4096, 4096), *larger]
    assert padded_shapes(2048, 4096, larger=5000)[-2:] == larger[:2]


def test_graphs_are_as_large_as_the_host_is_slower_than_the_device() -> None:
    layer_of_8b, layer_of_70b = 218e6, 856e6
    assert larger_tokens(layer_of_8b, 1) < 1024 < 4096 <= larger_tokens(layer_of_8b / 2, 2) < 6144
    assert larger_tokens(layer_of_70b / 2, 2) < 1536
    assert larger_tokens(50e6, 1) >= 3072 and larger_tokens(1e3, 2) == 4096
