"""Models that are split over ranks compute on a GPU what the whole model does: one token, few tokens, and prompts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec", reason="needs the engine's packages")
pytest.importorskip("safetensors", reason="needs the engine's packages")

from ppengine.checkpoint.model_shard import shard_of
from ppengine.checkpoint.model_spec import ModelSpec, read_spec
from ppengine.common.groups import MLP, site
from ppengine.models import build_stage, init_dummy
from ppengine.protocol.steps import Register, Row
from ppengine.stage.backends.cuda.staging import batch_on_device
from ppengine.stage.batch_state import BatchState
from ppkernels.kv_layout import cache_shape
from thread_group import ThreadGroup, run_ranks
from torch import Tensor

BLOCK, LENGTH, RANKS = 16, 64, 2
_IDS = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "float32"}
CONFIGS: dict[str, dict[str, Any]] = {
    "opt": {
        "architectures": ["OPTForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 80,
        "num_attention_heads": 2, "word_embed_proj_dim": 32, "vocab_size": 67, "max_position_embeddings": LENGTH,
        **_IDS,
    },
    "opt-350m": {
        "architectures": ["OPTForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64,
        "num_attention_heads": 2, "word_embed_proj_dim": 16, "vocab_size": 64, "max_position_embeddings": LENGTH,
        "do_layer_norm_before": False, **_IDS,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 80,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "attention_bias": True,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False, **_IDS,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 80,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False, **_IDS,
    },
}  # fmt: skip
STEPS = [[Row(0, 0, 9, True, -2)], [Row(0, 9, 1, True, 5)], [Row(0, 10, 1, True, 7), Row(1, 0, 3, True, -2)]]
"""A prompt; one token, whose products are of few rows; and a decode beside a prompt."""


class LeavesOut(ThreadGroup):
    """It forgets one sum."""

    def all_reduce(self, part: Tensor, number: int) -> Tensor:
        return part if number == site(1, MLP) else super().all_reduce(part, number)


def run_steps(spec: ModelSpec, group: ThreadGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the logits [R, V] of all steps, gathered, and the hidden states [T, H] of this rank."""
    shard = shard_of(spec, group.rank, group.size)
    model = build_stage(spec, (0, 2), True, True, torch.float32, device, LENGTH, shard, group)
    init_dummy(model, 3)
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "layers" in name:
            weight.mul_(4)  # so that layers move the logits
    state = BatchState(LENGTH, BLOCK)
    for slot in range(2):
        state.register([Register(slot, str(slot), list(range(3, 23)), 20, 0.0, 1.0, 0, slot, 0, 0, [], -1)])
        state.set_tables([(slot, 0, [1 + 2 * slot, 2 + 2 * slot])])
    shape = cache_shape(6, BLOCK, shard.num_kv_heads, spec.head_dim, device)
    kv = [torch.full(shape, float("nan"), device=device) for _ in range(2)]
    logits, hidden = [], []
    for rows in STEPS:
        plan = state.plan(rows)
        ids = torch.from_numpy(state.input_ids(plan, np.empty(0, np.int64))).to(device)
        batch = batch_on_device(plan.batch, device) if device.type == "cuda" else plan.batch
        out = model.run(model.embed(ids, batch.positions), batch, kv)
        logits.append(model.whole_logits(out[torch.from_numpy(plan.last_tokens).to(device)]))
        hidden.append(out)
    return torch.cat(logits), torch.cat(hidden)


@pytest.mark.parametrize("family", CONFIGS)
def test_two_ranks_compute_what_one_does(family: str, tmp_path: Path, device: torch.device) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[family]))
    spec = read_spec(tmp_path)

    def work(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            return run_steps(spec, group, device)

    ((whole, _),) = run_ranks(1, work)
    (first, hidden), (second, other) = run_ranks(RANKS, work)
    assert torch.equal(first, second)
    assert torch.equal(hidden, other)
    torch.testing.assert_close(first, whole, rtol=0, atol=1e-4)
    if family == "opt":
        assert (run_ranks(RANKS, work, LeavesOut)[0][0] - whole).abs().max() > 1e-2
