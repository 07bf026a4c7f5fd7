"""Sampling on a GPU: parameters that stay on the device, and the launches that read them.

`choose` and `logprobs` do not wait for the device and can be captured in a graph: they read from
tensors all values that change from step to step. `sample` is the operation of `ppkernels.sampling`
on top of them, for callers with lists.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
from torch import Tensor

from ppkernels.gpu.adjustments import DeviceAdjustments
from ppkernels.gpu.draw import sample_rows
from ppkernels.gpu.logprobs import logprob_rows
from ppkernels.gpu.row_passes import MAX_VOCABULARY
from ppkernels.gpu.token_masks import masked
from ppkernels.sampling_inputs import SamplingInputs, SamplingOutput

GREEDY_BLOCK, DRAW_BLOCK = 16384, 4096
CANDIDATES = 8192
"""Tokens of a row that can be gathered for the search of its cut; with more, each pass reads the
whole row.
"""


@dataclass(frozen=True)
class Parameters:
    """Sampling parameters of one request; fields as in `SamplingInputs`."""

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
        """Return the columns of `gpu.draw`, with room for `width` banned tokens."""
        banned = list(dict.fromkeys(self.banned)) if self.banned_until else []
        if len(banned) > width:
            raise ValueError(f"{len(banned)} banned tokens do not fit a table with room for {width}")
        keys = [_signed(self.seed), _signed(self.sample)]
        # A temperature above 0 must stay above 0, also if float32 is too narrow for it.
        temperature = max(self.temperature, _TINY) if self.temperature > 0 else 0.0
        row = [_bits(temperature), _bits(self.top_p), self.top_k, *keys, self.logprobs, self.banned_until]
        return row + banned + [-1] * (width - len(banned))


class DeviceSampling:
    """The parameters of many requests, indexed by slot. A slot that was never set is greedy."""

    def __init__(self, slots: int, device: torch.device, banned: int = 8) -> None:
        self.banned = triton.next_power_of_2(max(banned, 1))
        """Room for banned tokens of a request."""
        row = torch.tensor(Parameters().packed(self.banned))
        self.table = row.repeat(slots, 1).to(device)
        """[slots, 7 + banned] int64."""

    def set(self, slots: Sequence[int], parameters: Sequence[Parameters]) -> None:
        """Write the rows of `slots`, in stream order. Raises ValueError: too many banned tokens."""
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
    """Return a token [R] int64 for each row of `logits` [R, V], in one launch.

    The launch also writes it to `newest` [slots].

    `slots` and `positions` [R] are integers on the device; a position is that of the new token in
    its sequence. With `greedy`, all rows must be greedy, and less code runs. Logits of banned
    tokens are overwritten during the launch, so no two rows may share memory. Raises ValueError for
    a vocabulary of more than 2**20.
    """
    rows, vocabulary = logits.shape
    if vocabulary > MAX_VOCABULARY:
        raise ValueError(f"vocabulary of {vocabulary}: at most {MAX_VOCABULARY} can be sampled from")
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    # Greedy rows need no room, but a kernel takes pointers.
    room = (0 if greedy else rows, CANDIDATES)
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
            CAPACITY=CANDIDATES,
            BLOCK=GREEDY_BLOCK if greedy else DRAW_BLOCK,
            num_warps=32 if greedy else 16,
        )
    return tokens


def choose_adjusted(
    logits: Tensor,
    parameters: DeviceSampling,
    adjustments: DeviceAdjustments,
    slots: Tensor,
    positions: Tensor,
    *,
    greedy: bool,
    newest: Tensor | None = None,
) -> Tensor:
    """Return `choose` of adjusted logits, a few rows at a time, and note the tokens for the next
    step. `logits` is not changed.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for first in range(0, len(logits), adjustments.rows):
        part = slice(first, first + adjustments.rows)
        where = slots[part], positions[part]
        changed = adjustments.adjusted(logits[part], parameters.table, parameters.banned, *where)
        choose(changed, parameters, *where, greedy=greedy, out=tokens[part], newest=newest)
    adjustments.append(slots, positions, tokens)
    return tokens


@dataclass(frozen=True)
class DeviceLogprobs:
    """Log-probabilities of the unmodified distribution; those not requested are undefined."""

    chosen: Tensor
    """[R] float32, of the chosen tokens."""
    tokens: Tensor
    """[R, most] int32, the best tokens, best first, ties by id."""
    values: Tensor
    """[R, most] float32, of `tokens`."""


def logprobs(logits: Tensor, parameters: DeviceSampling, slots: Tensor, tokens: Tensor, most: int) -> DeviceLogprobs:
    """Return the requested log-probabilities of `logits` [R, V]; no row may request more than the
    `most` best.
    """
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
            BLOCK=DRAW_BLOCK,
            num_warps=16,
        )
    return output


def sample(logits: Tensor, inputs: SamplingInputs) -> SamplingOutput:
    """Return one token for each row of `logits` [R, V]; log-probabilities wait for the device."""
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
    greedy = not any(value > 0 for value in inputs.temperature)
    whole, logits = logits, masked(logits, inputs.masks) if inputs.masks else logits
    if inputs.adjustments:
        records = DeviceAdjustments(rows, logits.shape[1], max(inputs.position) + 1, device)
        records.set(range(rows), [inputs.adjustments.get(row) for row in range(rows)])
        tokens = choose_adjusted(logits, table, records, slots, positions, greedy=greedy)
    else:
        tokens = choose(logits, table, slots, positions, greedy=greedy)
    return SamplingOutput(tokens, _listed(whole, table, slots, tokens, wanted))


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
