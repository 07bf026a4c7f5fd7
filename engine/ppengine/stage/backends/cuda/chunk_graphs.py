"""Steps with short prompts as CUDA graphs, over buffers that never move: one for each padded number of tokens and rows.

Launched one by one, the kernels of a step with prompts take a host 20 ms (OPT-6.7B, Llama-8B), with
ranks 50 ms. The device is faster than that up to about a thousand tokens, two ranks up to four thousand,
small models too. Programs of rows that are not there return at once, and yet take time: so there are
graphs for few rows and for many. A graph serves any mixture of prompts and decodes: both kernels of
attention find their rows in `query_start`. Rows beyond the step's own have no token, and tokens beyond
them are in no row and have slot -1: nothing is stored or read for them, and their values, NaN included,
stay in their rows of every product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from ppkernels.batch import Batch
from ppkernels.shared_prefixes import least_saved, on_device, pad_words, words_of
from torch import Tensor

from ppengine.models import StageModel
from ppengine.stage.backends.cuda.copied_sums import AT_ONCE_ROWS
from ppengine.stage.backends.cuda.decode_graphs import Launched, captured, embed
from ppengine.stage.backends.cuda.graph_calls import GraphCalls
from ppengine.stage.backends.cuda.staging import Staging
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.batch_state import Plan

SIZES = (64, 128, 192, 256, 384, 512, 768, 1024)
"""Padded numbers of tokens; from 128 on less than half as many again as a step has."""
LARGER_SIZES = (1536, 2048, 3072, 4096, 6144, 8192)
"""More of them, for many rows, up to `larger_tokens`."""
_LAUNCH_S, _RANK_LAUNCH_S = 0.6e-3, 1.6e-3
"""Seconds in which a host launches a layer, alone and with ranks."""
_FLOPS = 650e12
"""Rate of a layer's products on an H200. Padding costs a slower card more than that."""
ROWS = (32, 128, 512)
"""Padded numbers of rows; a step has no more rows than tokens."""
FEW_ROWS = ROWS[0]
"""Rows up to which steps with prompts read a shared prefix for each row."""
SHARED_SIZES = (256, 512, 768, 1024)
"""Padded numbers of tokens of steps that read shared prefixes once."""
_ALIGNED = 4
"""Integers by which a column by row is longer than the most rows. One of them is used, and columns begin at multiples
of 16 bytes, or kernels would be compiled once more."""
_BY_TOKEN, _BY_ROW = 4, 5
"""Tokens, slots of their rows, positions, slot mapping; starts, lengths, and of sampled rows token, slot, position."""


class Padded(NamedTuple):
    """Shape of a graph."""

    tokens: int
    rows: int
    shared: bool = False
    """Whether rows share prefixes."""


def larger_tokens(weights: float, ranks: int) -> int:
    """Return the tokens up to which a layer of `weights` on a rank takes the device less time than the host."""
    if ranks == 1:
        return int(_LAUNCH_S * _FLOPS / (2 * weights))
    # Sums by copies are no part of a graph.
    return min(int(_RANK_LAUNCH_S * _FLOPS / (2 * weights)), AT_ONCE_ROWS * ranks)


def padded_shapes(tokens: int, rows: int, larger: int = 0) -> list[Padded]:
    """Return the shapes for steps of at most `tokens` and `rows`, from small to large.

    `larger`: tokens up to which there are `LARGER_SIZES`.
    """
    wide = sorted({min(count, rows) for count in ROWS})
    plain = {Padded(size, min(count, size)) for size in SIZES if size <= tokens for count in wide}
    return sorted(
        plain
        | {Padded(size, wide[-1]) for size in LARGER_SIZES if size <= min(tokens, larger)}
        | {shape._replace(shared=True) for shape in plain if shape.rows > FEW_ROWS and shape.tokens in SHARED_SIZES}
    )


class ChunkGraphs:
    """Graphs of one stage for steps of up to `most` tokens and `requests` rows.

    The other arguments are those of `DecodeGraphs`.
    """

    def __init__(
        self,
        model: StageModel,
        layers: list[Tensor],
        compute: Stream,
        most: int,
        requests: int,
        blocks: int,
        block_size: int,
        latest: Tensor | None,
        hidden: Tensor | None,
    ) -> None:
        self.shapes = padded_shapes(most, requests, larger_tokens(model.layer_weights, model.group.size))
        self._model, self._layers, self.compute = model, layers, compute
        self._block_size, self._latest, self._hidden = block_size, latest, hidden
        self._least_saved = least_saved(layers[0])
        tokens, rows, _ = self.shapes[-1] if self.shapes else Padded(0, 0)
        column = -(-rows // 4) * 4 + _ALIGNED
        self._wide = _BY_TOKEN * tokens, _BY_ROW * column, words_of(rows)
        length = sum(self._wide) + rows * blocks
        self._staging = Staging("chunk integers", length, compute, layers[0].device)
        by_token, by_row, self._words, tables = self._parts(self._staging.on_device)
        self._by_token: list[Tensor] = list(by_token.view(_BY_TOKEN, tokens))
        self._by_row: list[Tensor] = list(by_row.view(_BY_ROW, column))
        self._tables: Tensor = tables.view(rows, blocks)
        self._next = Padded(0, 0), 0, 0
        """Shape, tokens and sampled rows of the newest step."""
        self._used = 0
        """Integers that it has in pinned memory."""
        self._graphs: dict[Padded, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._calls = GraphCalls(model.group)

    def capture(self, pool: Any, progress: Callable[[int], None]) -> None:
        """Capture all shapes, the largest first; `progress(done)` before each."""
        for done, shape in enumerate(reversed(self.shapes)):
            progress(done)
            with self.compute.use():
                self._staging.on_device.zero_()
                self._by_token[-1].fill_(-1)
            forward = self._calls.noted(shape, partial(self._forward, shape))
            self._graphs[shape] = captured(self.compute, pool, forward)

    def serves(self, plan: Plan) -> bool:
        """Return whether a step can be run as a graph: not too many tokens and rows."""
        return self._shape(int(plan.query_start[-1]), len(plan.slots), shared=False) is not None

    def fill(self, plan: Plan, ids: NDArray[np.int64]) -> None:
        """Note a step's integers in pinned memory; `ids` [T] as for `DecodeGraphs`."""
        batch, rows, count, sampled = plan.batch, len(plan.slots), len(ids), len(plan.sampled)
        shared = plan.shared_prefixes(self._least_saved) if rows > FEW_ROWS else None
        shape = self._shape(count, rows, shared is not None) or self._shape(count, rows, shared=False)
        assert shape is not None, "a step that is not served"
        size = shape.tokens
        by_token, by_row, words, tables = self._parts(self._staging.next())
        by_token, by_row = by_token.reshape(_BY_TOKEN, -1), by_row.reshape(_BY_ROW, -1)
        owners = np.repeat(plan.slots, np.diff(plan.query_start))
        columns = ids, owners, batch.positions.numpy(), batch.slot_mapping.numpy()
        for column, values, padding in zip(by_token, columns, (0, 0, 0, -1), strict=True):
            column[:count], column[count:size] = values, padding
        starts, lengths, last, slots, positions = by_row
        starts[: rows + 1], starts[rows + 1 :] = plan.query_start, count
        lengths[:rows], lengths[rows:] = plan.ends, 0
        last[:sampled], last[sampled:] = plan.last_tokens, 0
        slots[:sampled], positions[:sampled] = plan.sampled_slots, plan.ends[plan.sampled]
        if shape.shared:
            pad_words(shared, rows, words, shape.rows)
        found = batch.block_tables.numpy()
        tables.reshape(self._tables.shape)[:rows, : found.shape[1]] = found
        self._used = sum(self._wide) + rows * self._tables.shape[1]
        self._next = shape, count, sampled

    def send(self) -> None:
        """Launch the copy of the integers."""
        self._staging.send(self._used)

    def run(self) -> Launched:
        """Launch the step whose integers were sent."""
        shape, count, sampled = self._next
        graph, output = self._graphs[shape]
        self._calls.replayed(shape)
        with self.compute.use():
            graph.replay()
        _, _, _, slots, positions = self._by_row
        return Launched(output[: sampled if self._model.last else count], slots[:sampled], positions[:sampled])

    def _shape(self, tokens: int, rows: int, shared: bool) -> Padded | None:
        """Return the smallest shape that a step fits into; None if it fits into none."""
        fitting = (shape for shape in self.shapes if shape.tokens >= tokens and shape.rows >= rows)
        return next((shape for shape in fitting if shape.shared == shared), None)

    def _parts(self, ints: Any) -> Any:
        """Return what of `ints` is by token, by row, of shared prefixes, and block tables."""
        by_token, by_row, words = self._wide
        tables = by_token + by_row + words
        return ints[:by_token], ints[by_token : by_token + by_row], ints[by_token + by_row : tables], ints[tables:]

    def _forward(self, shape: Padded) -> Tensor:
        size, rows, shared = shape
        tokens, owners, positions, mapping = (column[:size] for column in self._by_token)
        starts, lengths, last, _, _ = self._by_row
        batch = Batch(
            positions=positions,
            slot_mapping=mapping,
            query_start=starts[: rows + 1],
            query_lens=[1, *[2] * (rows - 1)],  # so that both kernels are launched
            seq_lens=lengths[:rows],
            block_tables=self._tables[:rows],
            decode_only=False,
            block_size=self._block_size,
            shared=on_device(self._words, rows) if shared else None,
        )
        if self._hidden is None:
            hidden = embed(self._model, tokens, owners, positions, self._latest)
        else:
            hidden = self._hidden[:size]
        out = self._model.run(hidden, batch, self._layers)
        return self._model.logits(out[last[:rows]]) if self._model.last else out
