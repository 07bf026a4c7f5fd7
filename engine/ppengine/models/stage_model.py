"""A model's layers `[start, end)` with what the ends need: the embedding on the first stage, the head on the last."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from ppkernels.attention_plan import AttentionPlan
from ppkernels.batch import Batch
from torch import Tensor, nn

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.models.layers import Linear, Source, WeightTable, gather_logits
from ppengine.models.residual import Residual


class Layer(nn.Module, ABC):
    """Attention and MLP, each of which is added to the residual stream."""

    @abstractmethod
    def attend(self, residual: Residual, plan: AttentionPlan, kv: Tensor) -> None:
        """Add the attention to the residual stream; keys and values go into `kv`, the cache of the layer."""

    @abstractmethod
    def feed(self, residual: Residual) -> None:
        """Add the MLP to the residual stream."""


class StageModel(nn.Module, ABC):
    """One pipeline stage of a model. The residual stream travels between stages as one tensor [T, boundary_size].

    Call it in inference mode: to enter that for each method would cost as much as a small operation. No method writes
    its arguments, the KV cache excepted.

    With tensor parallelism, `shard` is the share of this rank, and the ranks of `group` call the same methods in the
    same order. Hidden states are bitwise equal on all of them.
    """

    layers: nn.ModuleList
    """Each is a `Layer`."""

    def __init__(self, spec: ModelSpec, layers: tuple[int, int], first: bool, last: bool, table: WeightTable) -> None:
        super().__init__()
        self.spec = spec
        self.layer_range = layers
        self.first = first
        self.last = last
        self.shard = table.shard
        self.group = table.group
        self._table = table

    @property
    def boundary_size(self) -> int:
        """Width of the hidden states that go to the next stage."""
        return self.spec.hidden_size

    @property
    def weights_bytes(self) -> int:
        """Bytes of all parameters of this stage and rank."""
        return self._table.bytes

    @property
    def layer_weights(self) -> float:
        """Parameters of a layer on this rank, in the mean."""
        first, end = self.layer_range
        return sum(one.numel() for one in self.layers.parameters()) / (end - first)

    @property
    def sources(self) -> list[Source]:
        """Checkpoint tensors of this stage and where they go."""
        return self._table.sources

    def pack(self) -> None:
        """Bring the weights, all loaded, into the form that this machine's kernels take, see `Linear.pack`."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    @abstractmethod
    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """First stage: return hidden states [T, H] of `token_ids` [T] at `positions` [T]."""

    def run(self, hidden: Tensor, batch: Batch, kv: list[Tensor], behind: Callable[[], None] | None = None) -> Tensor:
        """Return [T, H] after this stage's layers; keys and values of the tokens are written into `kv`.

        `kv` has one tensor a layer of this stage (see `ppkernels.kv_layout`). `behind` is called behind each part of
        a layer, see `parts`; no number changes by it.
        """
        if behind is None:
            return self._run(hidden, batch, kv)
        looked = ((residual, behind()) for _, _, residual in self._residuals(hidden, batch, kv))
        return deque(looked, 1)[0][0].values

    def _run(self, hidden: Tensor, batch: Batch, kv: list[Tensor]) -> Tensor:
        """As `run`; a model that has something faster than its parts overrides it."""
        # A deque of one takes an iterator to its end without a loop of Python's.
        return deque(self._residuals(hidden, batch, kv), 1)[0][2].values

    def parts(self, hidden: Tensor, batch: Batch, kv: list[Tensor]) -> Iterator[tuple[int, str, Tensor]]:
        """Run as `run` does, and yield layer, part (`attention` or `MLP`) and the residual stream behind it.

        A yielded tensor is valid until the next part is requested. Call it in inference mode.
        """
        return ((index, part, residual.values) for index, part, residual in self._residuals(hidden, batch, kv))

    def _residuals(self, hidden: Tensor, batch: Batch, kv: list[Tensor]) -> Iterator[tuple[int, str, Residual]]:
        residual, plan = Residual(hidden), AttentionPlan(batch, self.shard.num_heads, hidden.dtype)
        layers = cast(Iterable[Layer], self.layers)
        for index, layer, cache in zip(range(*self.layer_range), layers, kv, strict=True):
            layer.attend(residual, plan, cache)
            yield index, "attention", residual
            layer.feed(residual)
            yield index, "MLP", residual

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Last stage: return [R, V] of the rows `hidden` [R, H]; of a split vocabulary, this rank's columns."""

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """Last stage: return [R, V] of the rows `hidden` [R, H], on every rank."""
        return self.gather(self.logits(hidden))

    def gather(self, logits: Tensor) -> Tensor:
        """Return all ranks' `logits` [R, V], of which this rank has its columns."""
        return gather_logits(logits, self.shard, self.group)
