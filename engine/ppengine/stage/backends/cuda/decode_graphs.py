"""Decode steps as CUDA graphs: one for each padded batch size, over buffers that never move.

A step with a few tokens more than rows is one of them, too, with a row for each token: grammars force
short runs of tokens, and a graph of chunks takes a sixth longer than one of decodes.

A step's integers go to the device in one copy from pinned memory. Rows beyond the step's own are
padding: slot -1 and length 0, which store and read nothing. Each graph holds the layers of the
stage, with the embedding on the first and the head on the last one. Sampling comes after it, and
ranks exchange logits or best tokens there, because its launches depend on the requests. A step
whose rows share prefixes has a graph that reads them once; there are fewer sizes of these.

Layers are seen with all of their reserved addresses, so that a cache that grows or shrinks leaves
every graph right.
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
from ppengine.stage.backends.cuda.dlpack import tensor_over
from ppengine.stage.backends.cuda.graph_calls import GraphCalls
from ppengine.stage.backends.cuda.staging import Staging
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.batch_state import Plan

_COLUMNS = 6
"""Tokens, slots, positions, slot mapping, lengths, the rows that sample if some do not; then block tables."""
_SLOTS, _LENGTHS, _CHOSEN = 1, 4, 5
_PADDING = (0, 0, 0, -1, 0, 0)
MORE_TOKENS, MORE_READ = 32, 8192
"""Most tokens of a step beyond one a row, and most tokens that they read."""


SHARED_SIZES = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384)
"""Padded sizes of steps whose rows share prefixes, beside the largest."""


def batch_sizes(largest: int) -> list[int]:
    """Return the padded sizes up to `largest`: 1, 2, 4, multiples of 8, above 128 of 16, and above 256 of 32."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, largest, 32), largest]
    return sorted({size for size in sizes if size <= largest})


def shared_sizes(largest: int) -> list[int]:
    """Return the padded sizes up to `largest` of steps whose rows share prefixes; none if all are too few."""
    return sorted({min(size, largest) for size in (*SHARED_SIZES, largest) if largest >= SHARED_SIZES[0]})


class Padding(NamedTuple):
    """Shape of a graph."""

    rows: int
    shared: bool
    """Whether rows share prefixes."""


class Launched(NamedTuple):
    """The results of a step, on the device once the stream is through."""

    out: Tensor
    """Logits [R, V] of the last stage, of a split vocabulary this rank's columns; hidden states [T, H] of others."""
    slots: Tensor
    """[R] of the rows that sample."""
    positions: Tensor
    """[R] positions of their tokens."""


def embed(model: StageModel, tokens: Tensor, slots: Tensor, positions: Tensor, latest: Tensor | None) -> Tensor:
    """Return the embeddings [T, H] of tokens [T]; one below 0 is the newest sampled one of its slot, in `latest`."""
    ids = tokens if latest is None else torch.where(tokens < 0, latest[slots], tokens)
    return model.embed(ids, positions)


def captured(compute: Stream, pool: Any, forward: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """Return the graph of `forward` on `compute`, and the output that each replay writes.

    The output lies in the pool, and other graphs may use its memory, too: logits of all graphs would take 1.5 GB. Its
    readers are on `compute`, before the next replay.
    """
    with compute.use():
        forward()  # compiles, and does all setup that capturing forbids
        compute.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=compute.raw):
        output = forward()
    seen = tensor_over(output.data_ptr(), output.nbytes, output.device)
    return graph, seen.view(output.dtype).view(output.shape)


class DecodeGraphs:
    """Graphs of one stage for steps of up to `rows` decodes.

    `latest` [slots] has the newest sampled token of each slot, for rows whose token only the device
    knows; the first stage has it. `hidden` [rows, H] is where a stage that is not the first finds
    what came in.
    """

    def __init__(
        self,
        model: StageModel,
        layers: list[Tensor],
        compute: Stream,
        rows: int,
        blocks: int,
        block_size: int,
        latest: Tensor | None,
        hidden: Tensor | None,
    ) -> None:
        self.sizes, self.shared_sizes = batch_sizes(rows), shared_sizes(rows)
        self._model, self._layers, self.compute = model, layers, compute
        self._rows, self._blocks, self._block_size = rows, blocks, block_size
        self._latest, self._hidden, self._least_saved = latest, hidden, least_saved(layers[0])
        device = layers[0].device
        self._tables_at = _COLUMNS * rows + words_of(rows)
        length = self._tables_at + rows * blocks
        self._staging = Staging("decode integers", length, compute, device)
        ints = self._staging.on_device
        self._columns = ints[: _COLUMNS * rows].view(_COLUMNS, rows)
        self._words, self._tables = ints[_COLUMNS * rows : self._tables_at], ints[self._tables_at :].view(rows, blocks)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._next = Padding(0, False), 0, 0
        """Graph, rows and sampled rows of the newest step."""
        self._used = 0
        """Integers that it has in pinned memory."""
        self._graphs: dict[Padding, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._calls = GraphCalls(model.group)

    @property
    def shapes(self) -> list[Padding]:
        """All graphs, from small to large."""
        plain = [Padding(size, False) for size in self.sizes]
        return sorted(plain + [Padding(size, True) for size in self.shared_sizes])

    def capture(self, pool: Any, progress: Callable[[int], None]) -> None:
        """Capture all shapes, the largest first, so that the others fit into its memory.

        `progress(done)` is called before each.
        """
        for done, shape in enumerate(reversed(self.shapes)):
            progress(done)
            array = self._staging.next()
            self._pad(array, 0, shape.rows)
            pad_words(None, 0, array[_COLUMNS * self._rows : self._tables_at], shape.rows)
            self._staging.send(len(self._staging.on_device))
            forward = self._calls.noted(shape, partial(self._forward, shape))
            self._graphs[shape] = captured(self.compute, pool, forward)

    def serves(self, plan: Plan) -> bool:
        """Return whether a step can be run as a graph: decodes and few tokens more, not too many."""
        rows, tokens = len(plan.slots), int(plan.query_start[-1])
        if plan.batch.decode_only or not rows < tokens <= min(rows + MORE_TOKENS, self.sizes[-1]):
            return rows == tokens <= self.sizes[-1]
        counts = np.diff(plan.query_start)
        return int((counts * plan.ends)[counts > 1].sum()) <= MORE_READ

    def fill(self, plan: Plan, ids: NDArray[np.int64]) -> None:
        """Note a step's integers in pinned memory; launch nothing.

        `ids` [T] are input tokens, -1 where the newest sampled one of the row's slot is meant.
        """
        plan = plan if plan.batch.decode_only else plan.by_token()
        rows, sampled = len(plan.slots), len(plan.sampled)
        shared = plan.shared_prefixes(self._least_saved) if self.shared_sizes else None
        size = next(size for size in (self.sizes if shared is None else self.shared_sizes) if size >= rows)
        array = self._staging.next()
        self._pad(array, rows, size)
        tables = plan.batch.block_tables.numpy()
        columns = (ids, plan.slots, plan.starts, plan.batch.slot_mapping.numpy(), plan.ends)
        for number, column in enumerate(columns):
            array[number * self._rows : number * self._rows + rows] = column
        if sampled < rows:
            array[_CHOSEN * self._rows :][:sampled] = plan.sampled
        array[self._tables_at :].reshape(self._rows, -1)[:rows, : tables.shape[1]] = tables
        if shared is not None:
            pad_words(shared, rows, array[_COLUMNS * self._rows : self._tables_at], size)
        self._used = self._tables_at + rows * self._blocks
        self._next = Padding(size, shared is not None), rows, sampled

    def send(self) -> None:
        """Launch the copy of the integers, before the stream waits for messages of others."""
        self._staging.send(self._used)

    def run(self) -> Launched:
        """Launch the step whose integers were sent."""
        shape, rows, sampled = self._next
        graph, output = self._graphs[shape]
        self._calls.replayed(shape)
        columns = self._columns
        with self.compute.use():
            graph.replay()
            if sampled < rows and self._model.last:
                chosen = columns[_CHOSEN, :sampled]
                output, columns, rows = output.index_select(0, chosen), columns.index_select(1, chosen), sampled
        # A sampled token goes behind the row's last one.
        return Launched(output[:rows], columns[_SLOTS, :rows], columns[_LENGTHS, :rows])

    def _pad(self, array: NDArray[np.int32], rows: int, size: int) -> None:
        """Make rows [rows, size) padding."""
        for column, value in enumerate(_PADDING):
            first = column * self._rows
            array[first + rows : first + size] = value

    def _forward(self, shape: Padding) -> Tensor:
        size, shared = shape
        tokens, slots, positions, mapping, lengths, _ = (column[:size] for column in self._columns)
        batch = Batch(
            positions=positions,
            slot_mapping=mapping,
            query_start=self._starts[: size + 1],
            query_lens=[1] * size,
            seq_lens=lengths,
            block_tables=self._tables[:size],
            decode_only=True,
            block_size=self._block_size,
            shared=on_device(self._words, size) if shared else None,
        )
        if self._hidden is None:
            hidden = embed(self._model, tokens, slots, positions, self._latest)
        else:
            hidden = self._hidden[:size]
        out = self._model.run(hidden, batch, self._layers)
        return self._model.logits(out) if self._model.last else out
