"""Adjustments of requests on a GPU: their records, and the launches that read and extend them.

The device knows the tokens that it samples before the host does, so a record has its request's
tokens by position. Nothing here waits for the device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ppkernels.gpu.adjust import HEAD, MOST_WORDS, adjust_rows, append_tokens
from ppkernels.sampling_inputs import Adjustment

_BLOCK = 4096


class DeviceAdjustments:
    """Records by slot, and scratch for the rows that are adjusted at once."""

    def __init__(self, slots: int, vocabulary: int, longest: int, device: torch.device, rows: int = 32) -> None:
        self.rows = rows
        """Most rows of `adjusted`."""
        self._longest, self._device = longest, device
        """Most tokens of a request."""
        self._records: dict[int, Tensor] = {}
        self._addresses = torch.zeros(slots, dtype=torch.int64, device=device)
        self._logits = torch.empty(rows, vocabulary, dtype=torch.float32, device=device)
        self._counts = torch.empty(rows, vocabulary, dtype=torch.int32, device=device)

    def set(self, slots: Sequence[int], adjustments: Sequence[Adjustment | None]) -> None:
        """Write the records of `slots`, in stream order; None: the slot's request has none.

        Raises ValueError for more tokens or bad words than there is room for.
        """
        wanted = dict(zip(slots, adjustments, strict=True))
        changed = [slot for slot, adjustment in wanted.items() if adjustment is not None or slot in self._records]
        for slot in changed:
            self._records.pop(slot, None)
            if (adjustment := wanted[slot]) is not None:
                self._records[slot] = self._record(adjustment)
        if changed:
            found = [self._records.get(slot) for slot in changed]
            addresses = [0 if record is None else record.data_ptr() for record in found]
            both = self._upload(torch.tensor([changed, addresses]))
            self._addresses.index_copy_(0, both[0], both[1])

    def adjusted(self, logits: Tensor, table: Tensor, banned: int, slots: Tensor, positions: Tensor) -> Tensor:
        """Return `logits` of at most `rows` rows in float32, adjusted, until the next call.

        `table` and `banned` are those of `DeviceSampling`; `slots` and `positions` as for `choose`.
        """
        count, vocabulary = logits.shape
        out = self._logits[:count]
        adjust_rows[(count,)](
            logits,
            out,
            self._counts,
            table,
            self._addresses,
            slots,
            positions,
            logits.stride(0),
            table.stride(0),
            vocabulary,
            BANNED_WIDTH=banned,
            WIDTH=MOST_WORDS,
            BLOCK=_BLOCK,
            num_warps=16,
            # A fused multiply and add rounds once, the reference twice.
            enable_fp_fusion=False,
        )
        return out

    def append(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Note new tokens [R] at their positions."""
        append_tokens[(len(tokens),)](tokens, self._addresses, slots, positions, self._longest, num_warps=1)

    def _record(self, adjustment: Adjustment) -> Tensor:
        head = packed(adjustment)
        tokens = [*adjustment.prompt.tolist(), *adjustment.output.tolist()]
        if len(tokens) > self._longest or len(adjustment.bad_words) > MOST_WORDS:
            raise ValueError(
                f"{len(tokens)} tokens and {len(adjustment.bad_words)} bad words; "
                f"there is room for {self._longest} and {MOST_WORDS}"
            )
        # Positions that are not known yet have no token.
        record = torch.full((len(head) + self._longest,), -1, dtype=torch.int32, device=self._device)
        known = torch.tensor(head + tokens, dtype=torch.int32)
        record[: len(known)].copy_(self._upload(known))
        return record

    def _upload(self, values: Tensor) -> Tensor:
        # torch keeps the pinned memory until the copy is done.
        return values.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else values


def packed(adjustment: Adjustment) -> list[int]:
    """Return head and lists of a record, as `gpu.adjust` reads them."""
    biases, allowed = list(adjustment.logit_bias), list(adjustment.allowed or ())
    lengths = [len(word) for word in adjustment.bad_words]
    starts = list(accumulate(lengths, initial=0))[:-1]
    words = [*starts, *lengths, *(token for word in adjustment.bad_words for token in word)]
    factors = (adjustment.presence_penalty, adjustment.frequency_penalty, adjustment.repetition_penalty)
    least = math.log(adjustment.min_p) if adjustment.min_p > 0 else -math.inf
    at_allowed = HEAD + 2 * len(biases)
    at_words = at_allowed + len(allowed)
    head = [
        *_bits([*factors, least]), len(adjustment.prompt), len(biases), len(allowed), len(lengths),
        max(lengths, default=0), at_allowed, at_words, at_words + len(words),
    ]  # fmt: skip
    head += [0] * (HEAD - len(head))
    return [*head, *biases, *_bits(adjustment.logit_bias.values()), *allowed, *words]


def _bits(values: Iterable[float]) -> list[int]:
    """Return the float32 bits of `values` as int32."""
    numbers = list(values)
    return list(struct.unpack(f"<{len(numbers)}i", struct.pack(f"<{len(numbers)}f", *numbers)))
