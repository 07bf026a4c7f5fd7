"""Operands whose types are remembered, and shifted bfloat16, give the bits of Triton's own interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a card")
SIZE = 16


def mixed(x, y, integers, output, counts, n, SIZE: tl.constexpr):
    """Operate on blocks, rows, columns, scalars, numbers and addresses of several types."""
    row, column = tl.arange(0, SIZE), tl.arange(0, 2 * SIZE)
    a, b, i = tl.load(x + row), tl.load(column + y), tl.load(integers + row)
    m = a[:, None] * b[None, :] + 1.5 - i[:, None] / 3
    m = tl.where((i[:, None] > 3) & (column[None, :] < n), m, -1.0)
    m = tl.minimum(tl.maximum(m, a[:, None]), 7) / (1 + tl.abs(b)[None, :]) + -0.25
    q = ((i // 3) * 2 + (i % 5) - n) ^ (i << 2) | (i >> 1)
    w = tl.where(n > 3, i, 0) + tl.where(i > 2, 1, 0) + (i == 4) + (n + i - 1) // 2
    z = tl.clamp(a, -0.5, 0.5) + tl.cdiv(n, 4) * 2.0 - (2 - a) + 3 / (a + 10)
    h = (a.to(tl.float16) * 3 + tl.sum(b.to(tl.float16), 0)) / 2
    u = (i.to(tl.uint32) * 2654435761) >> 7
    u = u ^ tl.umulhi(u, 12345)
    f = tl.sum(m, 1) + z + h.to(tl.float32) + (a.to(tl.bfloat16) * i).to(tl.float32)
    tl.store(output + row[:, None] * (2 * SIZE) + column[None, :], m + f[:, None])
    tl.store(counts + row, q + w + u.to(tl.int32))


def results() -> list[list[int]]:
    """Return the bits of what the kernel stores, for several numbers."""
    draw, kernel, found = torch.Generator().manual_seed(1), triton.jit(mixed), []
    x, y = torch.randn(SIZE, generator=draw), torch.randn(2 * SIZE, generator=draw)
    integers = torch.randint(0, 50, (SIZE,), generator=draw, dtype=torch.int32)
    for n in (1, 5, 20, 5):
        output, counts = torch.zeros(SIZE, 2 * SIZE), torch.zeros(SIZE, dtype=torch.int32)
        kernel[(1,)](x, y, integers, output, counts, n, SIZE=SIZE)
        found.append([*output.view(torch.int32).flatten().tolist(), *counts.tolist()])
    assert len({tuple(each) for each in found}) == 3
    return found


def test_remembered_operands_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = results()
    assert quick == results(), "now all of them are remembered"
    monkeypatch.delattr(interpreter.interpreter_semantic, "binary_op_type_checking_impl")
    assert quick == results()


def test_shifts_are_conversions_of_bfloat16() -> None:
    """Convert each bfloat16, and round down floats between two of them, as the interpreter does."""
    builder, halves = interpreter.interpreter_builder, np.arange(2**16, dtype=np.uint16)
    whole = builder.cast_impl(interpreter.TensorHandle(halves, tl.bfloat16), tl.float32)
    assert whole.data.tobytes() == torch.from_numpy(halves).view(torch.bfloat16).float().numpy().tobytes()
    more = (whole.data.view(np.uint32) | 0xFFFF).view(np.float32)
    for floats in (whole.data, more):
        again = builder.cast_impl(interpreter.TensorHandle(floats, tl.float32), tl.bfloat16)
        assert np.array_equal(again.data, halves)
    usual = halves & 0x7F80 != 0
    own = interpreter._convert_float(more, tl.float32, tl.bfloat16, None)
    assert np.array_equal(own[usual], halves[usual]), "but for subnormal numbers"
