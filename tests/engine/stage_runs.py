"""Run a checkpoint through stage models and a paged cache, as stages do, in one process."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from ppengine.checkpoint.model_shard import Shard, shard_of
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.partition import partition_layers
from ppengine.models import build_stage, load_weights
from ppengine.models.group import ALONE, Group
from ppengine.protocol.steps import TOKEN_REGISTERED, Register, Row
from ppengine.stage.batch_state import BatchState
from ppkernels.batch import Batch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

BLOCK = 8


class Pipeline:
    """Stages of one model with a cache each, which starts full of NaN: what is read unwritten shows."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        stages: int = 1,
        partition: list[int] | None = None,
        blocks: int = 64,
        packed: bool = True,
        group: Group = ALONE,
        shard: Shard | None = None,
    ) -> None:
        self.spec = spec = read_spec(folder)
        shard = shard or shard_of(spec, group.rank, group.size)
        cuts = partition_layers(spec.num_layers, stages, partition)
        self.stages = []
        self.caches = []
        for start, end in cuts:
            ends = (start == 0, end == spec.num_layers)
            stage = build_stage(spec, (start, end), *ends, dtype, shard=shard, group=group)
            load_weights(stage, folder)
            if packed:
                stage.pack()
            self.stages.append(stage)
            shape = (blocks, 2, shard.num_kv_heads, BLOCK, spec.head_dim)
            self.caches.append([torch.full(shape, float("nan"), dtype=dtype) for _ in range(start, end)])
        self.state = BatchState(spec.max_model_len, BLOCK)
        self._free = list(range(1, blocks))
        self._free.reverse()
        self.tables: dict[int, list[int]] = {}
        self.passed: list[Tensor] = []
        """Hidden states [T, H] behind the embedding and each stage in the newest step."""

    def add(self, slot: int, tokens: list[int], length: int | None = None) -> None:
        """Register a sequence and give it scattered blocks for `length` tokens."""
        needed = -(-(length or len(tokens)) // BLOCK)
        self.tables[slot] = [self._free.pop(index % 3 if len(self._free) > 3 else 0) for index in range(needed)]
        self.state.register([Register(slot, f"r{slot}", tokens, len(tokens), 0.0, 1.0, 0, 0, 0, 0, [], -1)])
        self.state.set_tables([(slot, 0, self.tables[slot])])

    def batch(self, rows: list[Row]) -> tuple[Batch, Tensor]:
        """Return metadata and input tokens of a step."""
        plan = self.state.plan(rows)
        return plan.batch, torch.from_numpy(self.state.input_ids(plan, np.empty(0, np.int64)))

    def forward(self, batch: Batch, tokens: Tensor) -> Tensor:
        """Return logits [T, V] of every token of a step; of a split vocabulary, this rank's columns."""
        hidden = self.stages[0].embed(tokens, batch.positions)
        self.passed = [hidden]
        for stage, caches in zip(self.stages, self.caches, strict=True):
            before = hidden.clone()
            passed = stage.run(hidden, batch, caches)
            assert torch.equal(before.nan_to_num(), hidden.nan_to_num()), "a stage wrote its input"
            assert passed.shape == (len(tokens), stage.boundary_size)
            hidden = passed
            self.passed.append(hidden)
        return self.stages[-1].logits(hidden)

    def step(self, *rows: tuple[int, int, int]) -> Tensor:
        """Return logits [T, V] of a step of (slot, start, count) rows over registered tokens."""
        return self.forward(
            *self.batch([Row(slot, start, count, True, TOKEN_REGISTERED) for slot, start, count in rows])
        )


def exact_logits(folder: Path, tokens: list[int], dtype: torch.dtype) -> Tensor:
    """Return transformers' logits [T, V], RMS norms in the model's precision instead of float32."""
    written = tuple(path.stat().st_mtime_ns for path in sorted(folder.iterdir()))
    return _exact_logits(folder, written, tuple(tokens), dtype)


@functools.lru_cache(maxsize=64)
def _exact_logits(folder: Path, _: tuple[int, ...], tokens: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Many tests compare with the same logits. Loading the model takes longer than most of what they try."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm_forward(module)
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0]


def random_tokens(count: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Return `count` token ids."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def _norm_forward(module: nn.Module):
    def forward(values: Tensor) -> Tensor:
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + module.variance_epsilon) * module.weight

    return forward
