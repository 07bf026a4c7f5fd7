"""Random paged batches, with what each row should see written plainly beside."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ppkernels.batch import Batch
from ppkernels.kv_layout import cache_shape
from ppkernels.kv_layout import keys as keys_of
from ppkernels.kv_layout import values as values_of
from torch import Tensor

NAN = float("nan")
CPU = torch.device("cpu")


@dataclass
class Paged:
    """A cache that is NaN wherever nothing was written, and the sequences in it."""

    batch: Batch
    kv: Tensor
    keys: list[Tensor]
    """Of each row, [seq_len, kv_heads, head_dim] in float64."""
    values: list[Tensor]


def make_paged(
    rows: list[tuple[int, int]],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    block_size: int = 8,
    seed: int = 0,
    device: torch.device = CPU,
    integers: torch.dtype = torch.int64,
) -> Paged:
    """Return a cache for `rows` of (tokens before this step, tokens of this step), blocks scattered at random."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [start + count for start, count in rows]
    widths = [-(-length // block_size) for length in lengths]
    blocks = (torch.randperm(sum(widths) + 3, generator=generator) + 1).tolist()
    kv = torch.full(
        cache_shape(len(blocks) + 1, block_size, kv_heads, head_dim, device), NAN, dtype=dtype, device=device
    )
    tables = torch.zeros((len(rows), max(widths)), dtype=torch.int64)
    positions, slots, keys, values = [], [], [], []
    for row, (start, count) in enumerate(rows):
        own = torch.tensor([blocks.pop() for _ in range(widths[row])])
        tables[row, : widths[row]] = own
        shape = (2, lengths[row], kv_heads, head_dim)
        both = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        every = torch.arange(lengths[row])
        put(kv, own[every // block_size], every % block_size, both[0], both[1])
        keys.append(both[0].double())
        values.append(both[1].double())
        new = torch.arange(start, start + count)
        positions.append(new)
        slots.append(own[new // block_size] * block_size + new % block_size)
    counts = [count for _, count in rows]

    def placed(integer: list[int] | Tensor) -> Tensor:
        return torch.as_tensor(integer, dtype=integers, device=device)

    batch = Batch(
        positions=placed(torch.cat(positions)),
        slot_mapping=placed(torch.cat(slots)),
        query_start=placed([0, *torch.tensor(counts).cumsum(0).tolist()]),
        query_lens=counts,
        seq_lens=placed(lengths),
        block_tables=placed(tables),
        decode_only=all(count == 1 for count in counts),
        block_size=block_size,
    )
    return Paged(batch, kv, keys, values)


def put(kv: Tensor, block: int | Tensor, offset: int | Tensor, key: Tensor, value: Tensor) -> None:
    """Write one token's key and value [kv_heads, head_dim], or those of many."""
    keys_of(kv)[block, :, :, offset] = key.to(kv)
    values_of(kv)[block, :, offset] = value.to(kv)


def plain_attention(paged: Paged, query: Tensor) -> Tensor:
    """Return attention [T, heads * head_dim] in float64, one query and one head at a time."""
    query = query.cpu().double()
    heads, width = query.shape[1:]
    kv_heads = paged.keys[0].shape[1]
    outputs = []
    token = 0
    for keys, values, count in zip(paged.keys, paged.values, paged.batch.query_lens, strict=True):
        for visible in range(len(keys) - count + 1, len(keys) + 1):
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = keys[:visible, shared] @ query[token, head] / width**0.5
                outputs.append(torch.softmax(scores, 0) @ values[:visible, shared])
            token += 1
    return torch.stack(outputs).view(token, heads * width)


def share(paged: Paged, rows: list[int], tokens: int) -> None:
    """Make the first `tokens` of `rows`, whole blocks, those of the first of them: one prefix in the same blocks."""
    first, blocks = rows[0], tokens // paged.batch.block_size
    for row in rows[1:]:
        paged.batch.block_tables[row, :blocks] = paged.batch.block_tables[first, :blocks]
        paged.keys[row][:tokens] = paged.keys[first][:tokens]
        paged.values[row][:tokens] = paged.values[first][:tokens]
