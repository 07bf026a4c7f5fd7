"""Parts that the models share: linear layers made of several checkpoint tensors, and the table of those.

A rank of a tensor-parallel stage holds spans of rows or columns of those tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from ppkernels import few_rows
from ppkernels.activation import activate, linear_relu
from ppkernels.activation_kind import Activation
from ppkernels.cpu import linear
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from ppengine.checkpoint.model_shard import Shard
from ppengine.common.groups import EMBED, HEAD, site
from ppengine.models.group import ALONE, Group, LateSum, Sum

T = TypeVar("T")


def part_of(part: T | None, where: str) -> T:
    """Return `part`. Raises RuntimeError on a stage that was built without it: only the `where` one has it."""
    if part is None:
        raise RuntimeError(f"only the {where} stage can do this")
    return part


class Cut(NamedTuple):
    """The rows or columns `[first, end)` of a checkpoint tensor that has `whole` of them."""

    whole: int
    first: int
    end: int
    order: tuple[int, ...] = ()
    """The row, in each head, that each row of a parameter's head is made of; empty: rows stay as they are."""

    @property
    def width(self) -> int:
        """Rows or columns of this rank."""
        return self.end - self.first

    def times(self, width: int) -> Cut:
        """Return the cut of rows of which each head has `width`."""
        return Cut(self.whole * width, self.first * width, self.end * width)

    def pair(self) -> list[Cut]:
        """Return the cuts of a tensor that is two such tensors, one behind the other: one cut if it takes all."""
        both = 2 * self.whole
        if self.width == self.whole:
            return [uncut(both)]
        return [Cut(both, self.first, self.end), Cut(both, self.whole + self.first, self.whole + self.end)]


def uncut(whole: int) -> Cut:
    """Return the cut that takes all."""
    return Cut(whole, 0, whole)


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor of the checkpoint, or a part of it, and the part of a parameter that it fills."""

    name: str
    target: Tensor
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    index: tuple[slice, ...]
    """The part of the tensor that goes to `target`."""
    order: tuple[int, ...] = ()
    """Rows of each head, see `Cut`."""

    def arranged(self, part: Tensor) -> Tensor:
        """Return `part`, which `index` has taken of the tensor, with rows as `target` has them."""
        if not self.order:
            return part
        return part.view(-1, len(self.order), *part.shape[1:])[:, list(self.order)].view(part.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the target takes the whole tensor."""
        return self.target.shape == self.shape


class WeightTable:
    """Makes the parameters of a stage, empty, and remembers which checkpoint tensors they are made of.

    `shard` is this rank's share of the model; `group` sums the products of its ranks.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, shard: Shard, group: Group = ALONE) -> None:
        self.dtype = dtype
        self.device = device
        self.shard = shard
        self.group = group
        self.sources: list[Source] = []
        self.bytes = 0

    def fuse(self, parts: list[tuple[str, Cut]], *inner: int) -> nn.Parameter:
        """Return a parameter [sum of rows, *inner] whose rows are those of the tensors `parts`, in order.

        A part is a tensor's name and the rows that are taken of it.
        """
        data = self._make(sum(cut.width for _, cut in parts), *inner)
        begin = 0
        for name, cut in parts:
            target = data[begin : begin + cut.width]
            self.sources.append(Source(name, target, (cut.whole, *inner), (slice(cut.first, cut.end),), cut.order))
            begin += cut.width
        return nn.Parameter(data, requires_grad=False)

    def take(self, name: str, *shape: int) -> nn.Parameter:
        """Return a parameter of `shape` that is the tensor `name`."""
        return self.fuse([(name, uncut(shape[0]))], *shape[1:])

    def vocabulary(self, name: str, width: int) -> nn.Parameter:
        """Return this rank's rows [V / size, width] of the tensor `name`, which has a row for each token."""
        return self.fuse([(name, Cut(self.shard.vocab_size, *self.shard.vocabulary))], width)

    def linear(self, parts: list[tuple[str, Cut]], inputs: int, bias: bool) -> Linear:
        """Return a linear layer of `parts` (prefix, outputs) side by side; each has `.weight` and maybe `.bias`."""
        weight = self.fuse([(f"{name}.weight", cut) for name, cut in parts], inputs)
        return Linear(weight, self.fuse([(f"{name}.bias", cut) for name, cut in parts]) if bias else None)

    def summed(self, name: str, outputs: int, inputs: Cut, bias: bool, number: int) -> Linear:
        """Return a linear layer whose `inputs` are split over the ranks; `number` is its call site (`site`)."""
        data = self._make(outputs, inputs.width)
        index = (slice(None), slice(inputs.first, inputs.end))
        self.sources.append(Source(f"{name}.weight", data, (outputs, inputs.whole), index))
        weight = nn.Parameter(data, requires_grad=False)
        offset = self.take(f"{name}.bias", outputs) if bias else None
        if self.group.size == 1:
            return Linear(weight, offset, into_stream=True)
        return SummedLinear(weight, offset, self.group, number)

    def _make(self, *shape: int) -> Tensor:
        data = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.bytes += data.numel() * data.element_size()
        return data


def token_rows(rows: Callable[[Tensor], Tensor], ids: Tensor, shard: Shard, group: Group) -> Tensor:
    """Return rows [T, W] of `ids` [T] from a table that is split by rows; `rows` looks up in this rank's part."""
    if group.size == 1:
        return rows(ids)
    first, end = shard.vocabulary
    local = ids - first
    outside = (local < 0) | (local >= end - first)
    part = rows(local.masked_fill(outside, 0)).masked_fill_(outside.unsqueeze(1), 0)
    return group.all_reduce(part.contiguous(), site(0, EMBED))


def gather_logits(logits: Tensor, shard: Shard, group: Group) -> Tensor:
    """Return the logits [R, V] of all ranks, from this rank's `logits` [R, V / size]."""
    if group.size == 1:
        return logits
    return group.all_gather(logits.contiguous(), shard.vocabulary_widths, site(0, HEAD))


class Linear(nn.Module):
    """y = x W^T + b. Every other one of a layer is `into_stream`: y goes into the residual stream."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, *, into_stream: bool = False) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self._into_stream = into_stream
        self.packed = False

    def pack(self) -> None:
        """Bring the weight, in its own memory, into the form that the CPU's kernel takes, where it takes it at all.

        The memory of each checkpoint tensor keeps its numbers, in another order.
        """
        if not self.packed and linear.can_pack(self.weight):
            self.weight = nn.Parameter(linear.pack(self.weight.data), requires_grad=False)
            self.packed = True

    def takes(self, inputs: Tensor) -> bool:
        """Return whether `inputs` [T, inputs] are few rows: activation and sum are then done as y is made."""
        return few_rows.serves(inputs, self.weight)

    def forward(self, inputs: Tensor, activation: Activation | None = None) -> Tensor:
        """Return y [T, outputs] of `inputs` [T, inputs], with the activation behind it."""
        if self.takes(inputs):
            return few_rows.few_rows(inputs, self.weight, self.bias, activation, into_stream=self._into_stream)
        if self.packed:
            return activate(linear.linear(inputs, self.weight, self.bias), activation)
        if activation is Activation.RELU and self.bias is not None:
            return linear_relu(inputs, self.weight, self.bias)
        return activate(functional.linear(inputs, self.weight, self.bias), activation)

    def of_pieces(self, rows: int, pieces: Iterable[tuple[slice, Tensor]], activation: Activation | None) -> Tensor:
        """Return y [rows, outputs], with the activation behind it, of inputs that come in pieces of some rows each."""
        if self.packed:
            return torch.cat([Linear.forward(self, inputs, activation) for _, inputs in pieces])
        output = self.weight.new_empty(rows, len(self.weight))
        fused = activation is Activation.RELU and self.bias is not None
        for span, inputs in pieces:
            if self.bias is None:
                torch.mm(inputs, self.weight.t(), out=output[span])
            elif fused:
                linear_relu(inputs, self.weight, self.bias, output[span])
            else:
                torch.addmm(self.bias, inputs, self.weight.t(), out=output[span])
        return output if fused else activate(output, activation)

    def added(self, residual: Tensor, inputs: Tensor) -> Tensor:
        """Return `residual` + y as a new tensor."""
        if self.takes(inputs):
            return few_rows.few_rows(inputs, self.weight, self.bias, residual=residual, into_stream=self._into_stream)
        if self.packed:
            output = residual.clone(memory_format=torch.contiguous_format)
            linear.linear_added(output, inputs, self.weight, self.bias)
            return output
        output = torch.addmm(residual, inputs, self.weight.t())
        return output if self.bias is None else output.add_(self.bias)

    def add_to(self, residual: Tensor, inputs: Tensor) -> None:
        """Add y to `residual`, which is contiguous, in place."""
        if self.packed:
            linear.linear_added(residual, inputs, self.weight, self.bias)
            return
        residual.addmm_(inputs, self.weight.t())
        if self.bias is not None:
            residual.add_(self.bias)

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows [T, inputs] of the weight: a head that is tied to the embedding serves as that."""
        return linear.rows_of(self.weight, indices) if self.packed else functional.embedding(indices, self.weight)


class SummedLinear(Linear):
    """y = x W^T + b of inputs that are split over the ranks of a group: each rank has a part of every sum."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: Group, number: int) -> None:
        # One rank adds the bias.
        super().__init__(weight, bias if group.rank == 0 else None, into_stream=True)
        self._group = group
        self._number = number

    @override
    def forward(self, inputs: Tensor, activation: Activation | None = None) -> Tensor:
        """Return y [T, outputs], the same on all ranks, of this rank's `inputs` [T, inputs / size]."""
        return activate(self._group.all_reduce(super().forward(inputs), self._number), activation)

    def sums(self, inputs: Tensor) -> Iterator[tuple[slice, Sum]]:
        """Begin the sums of all ranks' parts of y, piece by piece; yield the rows of each."""
        pieces = self._group.pieces(len(inputs), self.weight.shape[0] * inputs.itemsize)
        if len(pieces) == 1:
            yield pieces[0], LateSum(self._group, super().forward(inputs), self._number)
            return
        for rows in pieces:
            yield rows, self._group.send(super().forward(inputs[rows]), self._number)
