"""The rows of one step, as the kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ppkernels.shared_prefixes import SharedPrefixes


@dataclass(frozen=True)
class Batch:
    """B rows, one a request, of T tokens in all; row b's tokens are `[query_start[b], query_start[b
    + 1])`.

    All tensors are int64; on a GPU they may be int32. A row with one token is a decode; a longer
    one is a chunk of a prompt. A batch for a GPU may be padded with rows of one token, slot -1 and
    length 0: they store and read nothing, and their attention is 0.
    """

    positions: Tensor
    """[T] position of each token in its sequence."""
    slot_mapping: Tensor
    """[T] slot of each token's key and value: block * block_size + offset."""
    query_start: Tensor
    """[B + 1] first token of each row, on the device of the kernels."""
    query_lens: list[int]
    """[B] tokens of each row."""
    seq_lens: Tensor
    """[B] tokens visible to the row's last token, itself included."""
    block_tables: Tensor
    """[B, M] blocks of each sequence in order, padded with the null block 0."""
    decode_only: bool
    """Whether every row has one token."""
    block_size: int
    """Tokens of a block."""
    shared: SharedPrefixes | None = None
    """Prefixes that decodes share, which GPUs read once; None: each row reads all of its own."""
