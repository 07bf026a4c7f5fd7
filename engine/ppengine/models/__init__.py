"""Models, a stage at a time: `build_stage`, then `load_weights` or `init_dummy`."""

from __future__ import annotations

import torch

from ppengine.checkpoint.model_shard import Shard, shard_of
from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.models.group import ALONE, Group
from ppengine.models.layers import WeightTable
from ppengine.models.llama import LlamaStage
from ppengine.models.loader import init_dummy, load_weights
from ppengine.models.opt import OptStage
from ppengine.models.stage_model import StageModel

__all__ = ["STAGES", "StageModel", "build_stage", "init_dummy", "load_weights"]

STAGES: dict[str, type[LlamaStage] | type[OptStage]] = {
    "opt": OptStage,
    "llama": LlamaStage,
    "mistral": LlamaStage,
    "qwen2": LlamaStage,
    "qwen3": LlamaStage,
    "glm": LlamaStage,
    "glm4": LlamaStage,
}
"""Stage class of every `model_type` in `ppengine.checkpoint.model_spec.ARCHITECTURES`."""


def build_stage(
    spec: ModelSpec,
    layers: tuple[int, int],
    first: bool,
    last: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    shard: Shard | None = None,
    group: Group = ALONE,
) -> StageModel:
    """Return layers `[start, end)` of a model with empty weights; `first` adds the embedding, `last` the head.

    Tokens at positions up to `max_model_len` (None: the model's) can be run. The stage holds `shard` (None: all) of
    each layer; `group` has the ranks with the other shards.
    """
    shard = shard or shard_of(spec)
    if (shard.rank, shard.size) != (group.rank, group.size):
        raise ValueError(f"shard {shard.rank} of {shard.size} for rank {group.rank} of {group.size}")
    table = WeightTable(dtype, torch.device(device), shard, group)
    stage = STAGES[spec.model_type](spec, layers, first, last, table, max_model_len or spec.max_model_len)
    return stage.eval()
