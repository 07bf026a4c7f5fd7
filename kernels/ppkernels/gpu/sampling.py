"""Sampling on a GPU: parameters that stay on the device, and the launches that read them.

Nothing here waits for the device, and `choose` and `logprobs` can be captured in a graph: all that changes from step
to step is read from tensors. `sample` is the operation of `ppkernels.sampling` on top of them, for whoever has lists.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from ppkernels.gpu.draw import MAX_VOCABULARY, sample_rows
from ppkernels.gpu.logprobs import logprob_rows
from ppkernels.sampling import SamplingInputs, SamplingOutput

_GREEDY_BLOCK, _DRAW_BLOCK = 16384, 4096
_CANDIDATES = 8192
"""Tokens a row that can be left when the cut is searched; where more are, the whole row is read each time."""


@dataclass(frozen=True)
class Parameters:
    """How the tokens of one request are chosen; the fields are those of `SamplingInputs`."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    sample: int = 0
    logprobs: int = -1
    banned: Sequence[int] = field(default=())
    """Tokens that must not be chosen at positions below `banned_until`."""
    banned_until: int = 0

    def packed(self, width: int) -> list[int]:
        """Return the row of the table, in the order of the columns in `gpu.draw`, with `width` banned tokens."""
        banned = list(dict.fromkeys(self.banned)) if self.banned_until else []
        if len(banned) > width:
            raise ValueError(f"{len(banned)} banned tokens do not fit a table with room for {width}")
        keys = [_signed(self.seed), _signed(self.sample)]
        # What is above 0 stays above 0, also where float32 is too narrow for it.
        temperature = max(self.temperature, _TINY) if self.temperature > 0 else 0.0
        row = [_bits(temperature), _bits(self.top_p), self.top_k, *keys, self.logprobs, self.banned_until]
        return row + banned + [-1] * (width - len(banned))


class DeviceSampling:
    """The parameters of many requests, indexed by slot. A slot that was never set is greedy."""

    def __init__(self, slots: int, device: torch.device, banned: int = 8) -> None:
        self.banned = triton.next_power_of_2(max(banned, 1))
        """Banned tokens that a request can have."""
        row = torch.tensor(Parameters().packed(self.banned))
        self.table = row.repeat(slots, 1).to(device)
        """[slots, 7 + banned] int64."""

    def set(self, slots: Sequence[int], parameters: Sequence[Parameters]) -> None:
        """Write the rows of `slots`, in order with what else is on the stream. Raises ValueError: too many banned."""
        if slots:
            rows = [[slot, *one.packed(self.banned)] for slot, one in zip(slots, parameters, strict=True)]
            packed = torch.tensor(rows)
            if self.table.is_cuda:
                packed = packed.pin_memory().to(self.table.device, non_blocking=True)
            self.table.index_copy_(0, packed[:, 0], packed[:, 1:])


def choose(
    logits: Tensor,
    parameters: DeviceSampling,
    slots: Tensor,
    positions: Tensor,
    *,
    greedy: bool,
    out: Tensor | None = None,
    newest: Tensor | None = None,
) -> Tensor:
    """Return a token [R] int64 for each row of `logits` [R, V]: one launch, which also writes it to `newest` [slots].

    `slots` and `positions` [R] are integers on the device; `positions` say where in its sequence each token goes.
    `greedy` says that all rows are: then less code runs. Logits of banned tokens are overwritten while this runs, so
    no two rows may share memory. Raises ValueError for a vocabulary of more than 2**20.
    """
    rows, vocabulary = logits.shape
    if vocabulary > MAX_VOCABULARY:
        raise ValueError(f"vocabulary of {vocabulary}: at most {MAX_VOCABULARY} can be sampled from")
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    # Greedy rows need no room, but a kernel takes pointers.
    room = (0 if greedy else rows, _CANDIDATES)
    candidates = torch.empty(room, dtype=logits.dtype, device=logits.device)
    ids = torch.empty(room, dtype=torch.int32, device=logits.device)
    if rows:
        sample_rows[(rows,)](
            logits,
            parameters.table,
            slots,
            positions,
            tokens,
            newest if newest is not None else tokens,
            candidates,
            ids,
            logits.stride(0),
            parameters.table.stride(0),
            vocabulary,
            NEWEST=newest is not None,
            RANDOM=not greedy,
            BANNED_WIDTH=parameters.banned,
            CAPACITY=_CANDIDATES,
            BLOCK=_GREEDY_BLOCK if greedy else _DRAW_BLOCK,
            num_warps=32 if greedy else 16,
        )
    return tokens


@dataclass(frozen=True)
class DeviceLogprobs:
    """Log-probabilities of the unmodified distribution, on the device; rows and places not asked for are undefined."""

    chosen: Tensor
    """[R] float32: of the chosen token."""
    tokens: Tensor
    """[R, most] int32: the best tokens, best first, ties by id."""
    values: Tensor
    """[R, most] float32"""


def logprobs(logits: Tensor, parameters: DeviceSampling, slots: Tensor, tokens: Tensor, most: int) -> DeviceLogprobs:
    """Return what the rows of `logits` [R, V] asked for; none may ask for more than the `most` best."""
    rows, vocabulary = logits.shape
    output = DeviceLogprobs(
        torch.empty(rows, dtype=torch.float32, device=logits.device),
        torch.empty((rows, most), dtype=torch.int32, device=logits.device),
        torch.empty((rows, most), dtype=torch.float32, device=logits.device),
    )
    if rows:
        logprob_rows[(rows,)](
            logits,
            parameters.table,
            slots,
            tokens,
            output.chosen,
            output.tokens,
            output.values,
            logits.stride(0),
            parameters.table.stride(0),
            most,
            vocabulary,
            BLOCK=_DRAW_BLOCK,
            num_warps=16,
        )
    return output


def sample(logits: Tensor, inputs: SamplingInputs) -> SamplingOutput:
    """Return one token for each row of `logits` [R, V]; waits for the device where log-probabilities are wanted."""
    rows, device = len(logits), logits.device
    if rows > 1 and logits.stride(0) < logits.shape[1]:
        logits = logits.contiguous()
    wanted = inputs.logprobs or [-1] * rows
    table = DeviceSampling(rows, device, max((len(tokens) for tokens in inputs.banned.values()), default=0))
    given = [
        Parameters(
            inputs.temperature[row],
            inputs.top_p[row],
            inputs.top_k[row],
            inputs.seed[row],
            inputs.sample[row],
            wanted[row],
            inputs.banned.get(row, ()),
            banned_until=inputs.position[row] + 1,
        )
        for row in range(rows)
    ]
    table.set(range(rows), given)
    slots = torch.arange(rows, device=device)
    positions = torch.tensor(inputs.position, dtype=torch.int64, device=device)
    tokens = choose(logits, table, slots, positions, greedy=not any(value > 0 for value in inputs.temperature))
    return SamplingOutput(tokens, _listed(logits, table, slots, tokens, wanted))


def _listed(
    logits: Tensor, table: DeviceSampling, slots: Tensor, tokens: Tensor, wanted: list[int]
) -> dict[int, tuple[float, list[tuple[int, float]]]]:
    if max(wanted, default=-1) < 0:
        return {}
    most = min(max(wanted), logits.shape[1])
    output = logprobs(logits, table, slots, tokens, most)
    chosen, ids, values = output.chosen.tolist(), output.tokens.tolist(), output.values.tolist()
    return {
        row: (chosen[row], list(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, count in enumerate(wanted)
        if count >= 0
    }


_TINY = torch.finfo(torch.float32).tiny


def _bits(value: float) -> int:
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


def _signed(key: int) -> int:
    """Return the int64 with the low 64 bits of `key`."""
    return ((key & 2**64 - 1) ^ 2**63) - 2**63
