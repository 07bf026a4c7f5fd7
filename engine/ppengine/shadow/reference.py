"""A single-stage run of a request from its tokens, and the same-tokens rule."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ppengine.checkpoint.model_spec import DUMMY_SEED, read_spec
from ppengine.common.config import EngineConfig
from ppengine.models import build_stage, init_dummy, load_weights
from ppengine.protocol.check_messages import ShadowAnswer, ShadowTask
from ppengine.protocol.reports import Finding
from ppengine.protocol.steps import TOKEN_REGISTERED, Register, Row
from ppengine.protocol.token_ids import compact
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cpu.kv_cache import CpuKvCache
from ppengine.stage.backends.selection import resolve_dtype
from ppengine.stage.batch_state import BatchState

CHUNK = 256
"""Tokens of one pass."""
ERROR_FACTOR = 4.0
"""A logit may be off by this times the type's precision, the largest logit and the root of the layers."""


class Reference:
    """The model of an engine as one stage on the CPU. Raises what loading raises.

    Half precision of stages on `gpus` is theirs alone: here the same weights are computed with in float32, which a CPU
    does faster, and what may differ is what half precision rounds.
    """

    def __init__(self, config: EngineConfig, gpus: bool = False) -> None:
        folder, profile = Path(config.model_path), config.profile
        spec = read_spec(folder)
        theirs = resolve_dtype(profile.model.dtype, spec.dtype, half=gpus)
        self._eps = torch.finfo(theirs).eps
        self._dtype = torch.float32 if gpus and theirs in (torch.bfloat16, torch.float16) else theirs
        size = profile.memory.block_size
        self._model = build_stage(
            spec, (0, spec.num_layers), first=True, last=True, dtype=self._dtype, max_model_len=config.max_model_len
        )
        if profile.model.load_format == "dummy":
            init_dummy(self._model, DUMMY_SEED)
        else:
            load_weights(self._model, folder)
        if self._dtype != theirs:
            for weight in self._model.parameters():
                weight.data.copy_(weight.data.to(theirs))
        self._model.pack()
        shape = KvShape(spec.num_layers, size, spec.num_kv_heads, spec.head_dim, self._dtype)
        self._blocks = -(-config.max_model_len // size)
        self._state = BatchState(config.max_model_len, size)
        self._cache = CpuKvCache(shape, self._blocks + 1)
        if error := self._cache.map_blocks(self._blocks + 1):
            raise MemoryError(error)

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights."""
        return self._model.weights_bytes

    @torch.inference_mode()
    def judge(self, task: ShadowTask) -> ShadowAnswer:
        """Compare the outputs of `task` from `first` on with what this model chooses behind the same tokens."""
        logits = self._logits(task)
        banned = torch.tensor([token for token in task.stop_token_ids if token < logits.shape[1]], dtype=torch.int64)
        for index in range(task.first, task.first + len(logits)):
            row = logits[index - task.first].double()
            # Before tokens are banned: their logits are as good a measure as the others.
            limit = 2 * self._tolerance(row)
            if index < task.min_tokens:
                row[banned] = float("-inf")
            token, best = task.output_ids[index], int(row.argmax())
            margin = float(row[best] - row[token])
            if token != best and not margin < limit:
                return ShadowAnswer(
                    nonce=task.nonce,
                    compared=index - task.first + 1,
                    difference=_difference(task, index, best, margin, limit, row),
                )
        return ShadowAnswer(nonce=task.nonce, compared=len(logits))

    def _logits(self, task: ShadowTask) -> Tensor:
        """Return [outputs from `first` on, vocabulary]: what each of those tokens was chosen from."""
        # The last output has not been read by anybody.
        tokens = (task.prompt_ids + task.output_ids)[:-1]
        register = Register(0, task.request, compact(tokens), len(tokens), 0.0, 1.0, 0, 0, 0, 0, [], -1)
        self._state.register([register])
        self._state.set_tables([(0, 0, list(range(1, self._blocks + 1)))])
        wanted = len(task.prompt_ids) + task.first - 1
        parts = []
        for start in range(0, len(tokens), CHUNK):
            count = min(CHUNK, len(tokens) - start)
            plan = self._state.plan([Row(0, start, count, True, TOKEN_REGISTERED)])
            ids = torch.from_numpy(self._state.input_ids(plan, np.empty(0, np.int64)))
            hidden = self._model.embed(ids, plan.batch.positions)
            hidden = self._model.run(hidden, plan.batch, self._cache.layers)
            parts.append(hidden[max(0, wanted - start) :])
        return self._model.logits(torch.cat(parts))

    def _tolerance(self, row: Tensor) -> float:
        depth = math.sqrt(len(self._cache.layers))
        return ERROR_FACTOR * self._eps * depth * max(1.0, float(row.abs().max()))


def _difference(task: ShadowTask, index: int, best: int, margin: float, limit: float, row: Tensor) -> Finding:
    position = len(task.prompt_ids) + index
    token = task.output_ids[index]
    (first, second), ids = row.topk(2)
    return Finding(
        stage=None,
        cause="mismatch",
        summary=f"request {task.request}: token {token} at position {position}, the reference gives {best}"[:100],
        since_s=0.0,
        evidence=[
            f"output {index} (position {position}): the pipeline chose token {token}, one stage chooses {best}",
            f"the reference puts token {best} ahead by {margin:.3g}; up to {limit:.3g} rounding would explain",
            f"its best two: {int(ids[0])} and {int(ids[1])}, {float(first - second):.3g} apart",
            f"looked at with step {task.step}; the {index - task.first} outputs before it that were compared agree",
            "to find where: ppconsole check finite on, ppconsole check ledger on",
        ],
    )
