"""Products of 2 to 16 rows on a Hopper card, against float64: new memory is NaN, and what is behind it stays so."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from bench_attention import paged
from ppengine.models.layers import Linear
from ppkernels import norms
from ppkernels.activation_kind import Activation
from ppkernels.attention_plan import AttentionPlan
from ppkernels.batch import Batch
from ppkernels.few_rows import few_rows_reference
from ppkernels.gpu import hopper_products
from ppkernels.paged_attention import paged_attention
from ppkernels.rotary import rotary_tables
from ppkernels.rotate_and_store import rotate_and_store
from torch import Tensor, nn


def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


pytestmark = pytest.mark.skipif(not _is_hopper(), reason="needs a Hopper card: Gluon has no interpreter")

ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}
ROWS = (2, 3, 8, 15, 16)
HALF_LAYER = (3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)
"""Outputs and inputs of the products of Llama-8B's layer, on one of two ranks."""
WHOLE_LAYER = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)
ODD = (9, 64), (1, 8), (64, 40), (65, 4104), (1000, 72), (127, 20000), (8192, 64), (8200, 1032), (128, 128 * 132)
"""Fewer units than multiprocessors, parts of tiles and of pieces, one tile of many contributors, tiles of one unit."""
GUARD = 4096
"""Elements behind new memory."""


def product(*operands: Any, **more: Any) -> Tensor:
    from ppkernels.gpu.hopper_products.product_launch import multiply_rows

    return multiply_rows(*operands, **more)


@functools.cache
def weights(dtype: torch.dtype, outputs: int, inputs: int, number: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(outputs * 31 + inputs + number)
    return torch.randn(outputs, inputs, dtype=dtype, device="cuda", generator=generator) * inputs**-0.5


def normal(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New memory is NaN. Behind the test, memory behind it is still NaN."""
    seed = torch.seed()
    print("seed", seed)
    guards: list[Tensor] = []
    empty = torch.empty

    def make(*shape: Any, **kind: Any) -> Tensor:
        sizes = shape[0] if isinstance(shape[0], tuple) else shape
        count = math.prod(sizes)
        memory = empty(count + GUARD, **kind)
        if memory.is_cuda and memory.is_floating_point():
            memory.fill_(math.nan)
            guards.append(memory[count:])
        return memory[:count].view(sizes)

    monkeypatch.setattr(torch, "empty", make)
    yield
    assert all(bool(guard.isnan().all()) for guard in guards), "memory behind a tensor was written"


def compare(name: str, actual: Tensor, exact: Tensor, slack: float = 1.0) -> None:
    """Compare; say which rows and columns are wrong. Then see that one wrong element would have been found."""
    bound = slack * ROUNDING[actual.dtype]

    def errors(values: Tensor) -> Tensor:
        return ((values.double() - exact).abs() / (exact.abs() + 1)).nan_to_num(math.inf)

    assert actual.shape == exact.shape
    found = errors(actual)
    wrong = found >= bound
    if bool(wrong.any()):
        rows, columns = (wrong.any(1 - axis).nonzero().flatten().tolist() for axis in range(2))
        first = wrong.nonzero()[:6].tolist()
        examples = [(at, float(actual[tuple(at)]), float(exact[tuple(at)])) for at in first]
        pytest.fail(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, {int(actual.isnan().sum())} NaN, largest error "
            f"{float(found.max()):.3g} of {bound:.3g}\nrows {rows}\n{len(columns)} columns {columns[:40]} to "
            f"{columns[-1]}, tiles of 64: {sorted({column // 64 for column in columns})[:40]}\n"
            f"at, found, exact: {examples}"
        )
    planted = actual.clone()
    planted.view(-1)[planted.numel() // 2] += 3 * bound * (1 + planted.abs().max())
    assert bool((errors(planted) >= bound).any())


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", [*HALF_LAYER, *WHOLE_LAYER, *ODD], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_product(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = weights(dtype, *shape)
    transposed = weight.double().t()
    for rows in ROWS:
        # NaN behind the rows, which must not be read.
        inputs = torch.full((40, shape[1]), math.nan, dtype=dtype, device="cuda")[:rows]
        inputs.copy_(normal(dtype, rows, shape[1]))
        assert hopper_products.serves(inputs, weight)
        compare(f"{rows} rows", product(inputs, weight), inputs.double() @ transposed)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("activation", [None, Activation.RELU, Activation.SILU_AND_MUL])
@pytest.mark.parametrize("shape", [(512, 4096), (2 * 8192, 256), (2 * 72, 264), (2 * 1000, 4096)], ids=str)
def test_what_is_around_the_product(shape: tuple[int, int], activation: Activation | None) -> None:
    outputs, width, dtype = *shape, torch.bfloat16
    weight, bias = weights(dtype, outputs, width), normal(dtype, outputs + 1)[1:]
    last = outputs // 2 if activation is Activation.SILU_AND_MUL else outputs
    for rows in (2, 15, 16):
        inputs = normal(dtype, rows, 2 * width)[:, width:]  # of a wider tensor, as attention leaves it
        residual = normal(dtype, rows, last + 7)[:, 7:]
        before = residual.clone()
        operands = (inputs.double(), weight.double(), bias.double())
        exact = few_rows_reference(*operands, activation, residual.double())
        actual = product(inputs, weight, bias, activation, residual)
        compare(f"{rows} rows", actual, exact, slack=2)
        assert torch.equal(residual, before)
        exact = few_rows_reference(operands[0], operands[1], None, activation, None)
        compare(f"{rows} rows, alone", product(inputs, weight, None, activation), exact, slack=2)


@pytest.mark.parametrize("shape", [HALF_LAYER[1], (127, 20000), (8200, 1032)], ids=str)
def test_a_row_has_the_same_bits_beside_any_others(shape: tuple[int, int]) -> None:
    weight, inputs = weights(torch.bfloat16, *shape), normal(torch.bfloat16, 16, shape[1])
    whole = product(inputs, weight)
    for rows in range(2, 16):
        assert torch.equal(product(inputs[:rows], weight), whole[:rows]), f"{rows} rows"


def test_nan_is_no_zero() -> None:
    weight, inputs = weights(torch.bfloat16, 64, 64), normal(torch.bfloat16, 2, 64)
    weight[3, 5] = math.nan
    found = product(inputs, weight, None, Activation.RELU)
    assert found[:, 3].isnan().all() and not found[:, :3].isnan().any()
    with pytest.raises(ValueError, match="17 rows: the kernel takes 2 to 16"):
        product(normal(torch.bfloat16, 17, 64), weight)


@pytest.mark.parametrize("shape", [HALF_LAYER[1], (127, 20000), (8200, 1032)], ids=str)
def test_launches_in_a_row_give_the_same(shape: tuple[int, int]) -> None:
    from ppkernels.gpu.hopper_products.product_launch import counters_of

    weight, inputs = weights(torch.bfloat16, *shape), normal(torch.bfloat16, 16, shape[1])
    first = product(inputs, weight)
    others = [product(inputs, weight) for _ in range(200)]
    different = [number for number, other in enumerate(others) if not torch.equal(other, first)]
    assert different == [], "sums do not depend on which program is last"
    assert counters_of(weight).tolist() == [0] * (-(-shape[0] // 64))
    compare("first", first, inputs.double() @ weight.double().t())


@functools.cache
def ones(dtype: torch.dtype) -> Tensor:
    return torch.ones(4096, dtype=dtype, device="cuda")


class Cache(NamedTuple):
    """Keys and values of three layers, and a step of decodes."""

    layers: list[Tensor]
    step: Batch
    turns: tuple[Tensor, Tensor]


@functools.cache
def cache(dtype: torch.dtype, rows: int, tokens: int) -> Cache:
    """Return a cache of rows with `tokens` tokens, and fewer; some rows need several programs a head, others one."""
    layers, step = paged([(tokens - 1 - 7 * row, 1) for row in range(rows)], 4, 128, dtype, 3)
    frequencies = 10000.0 ** -(torch.arange(64, device="cuda") / 64)
    return Cache(layers, step, rotary_tables(frequencies, tokens, 1.0, dtype, 128))


def layer(dtype: torch.dtype, hidden: Tensor, number: int, wait: Callable[[], None], tokens: int) -> Tensor:
    """Return what a layer makes of `hidden` [T, 4096]; each kernel reads what the one before wrote.

    `wait` is called between any two. Rows have up to `tokens` tokens.
    """
    layers, step, turns = cache(dtype, len(hidden), tokens)
    kv = layers[number]
    scale = ones(dtype)
    wait()
    normed = norms.rms_norm(hidden, scale, 1e-5)
    wait()
    fused = product(normed, weights(dtype, *HALF_LAYER[0], number))
    wait()
    heads = fused.view(len(hidden), 24, 128)
    rotate_and_store(kv, heads, 16, *turns, step.positions, step.slot_mapping)
    wait()
    attended = paged_attention(heads, kv, AttentionPlan(step, 16, dtype))
    wait()
    inner = product(attended, weights(dtype, *HALF_LAYER[1], number), residual=hidden, into_stream=True)
    wait()
    normed = norms.rms_norm(inner, scale, 1e-5)
    wait()
    gated = product(normed, weights(dtype, *HALF_LAYER[2], number), None, Activation.SILU_AND_MUL)
    wait()
    output = product(gated, weights(dtype, *HALF_LAYER[3], number), residual=inner, into_stream=True)
    wait()
    return output


def layers(dtype: torch.dtype, hidden: Tensor, wait: Callable[[], None], tokens: int = 400) -> list[Tensor]:
    found = [hidden]
    for number in range(3):
        found.append(layer(dtype, found[-1], number, wait, tokens))
    return found[1:]


def nothing() -> None:
    """Do not wait."""


def same(name: str, actual: list[Tensor], expected: list[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        wrong = (one != other).nonzero()
        places = f"{len(wrong)} of {one.numel()}, first {wrong[:5].tolist()}"
        assert bool(one.isfinite().all()), f"{name}, layer {number}: not finite"
        assert torch.equal(one, other), f"{name}, layer {number}: {places}"


@pytest.mark.parametrize("tokens", [120, 400, 6000])
@pytest.mark.parametrize("rows", [2, 16])
def test_chained_launches_wait_for_their_inputs(rows: int, tokens: int) -> None:
    hidden = normal(torch.bfloat16, rows, 4096)
    expected = layers(torch.bfloat16, hidden, torch.cuda.synchronize, tokens)
    for number in range(10):
        same(f"run {number}", layers(torch.bfloat16, hidden, nothing, tokens), expected)


@pytest.mark.parametrize("rows", [3, 16])
def test_in_a_graph(rows: int) -> None:
    hidden = normal(torch.bfloat16, rows, 4096)
    layers(torch.bfloat16, hidden, nothing)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layers(torch.bfloat16, hidden, nothing)
    for number in range(10):
        hidden.copy_(normal(torch.bfloat16, rows, 4096))
        graph.replay()
        kept = [each.clone() for each in found]
        same(f"replay {number}", kept, layers(torch.bfloat16, hidden, torch.cuda.synchronize))


def test_no_first_product_in_a_graph() -> None:
    weight, inputs = normal(torch.bfloat16, 64, 64), normal(torch.bfloat16, 2, 64)
    product(inputs, weight.clone())
    with pytest.raises(RuntimeError, match="must not be captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        inputs.neg_()
        product(inputs, weight)


@pytest.mark.parametrize("activation", [None, Activation.GELU, Activation.SILU_AND_MUL])
def test_layers_use_it(activation: Activation | None) -> None:
    layer = Linear(nn.Parameter(weights(torch.bfloat16, 3072, 4096), False), None)
    inputs = normal(torch.bfloat16, 16, 4096)
    assert layer.takes(inputs) and not layer.takes(normal(torch.bfloat16, 33, 4096))
    expected = product(inputs, layer.weight, None, None if activation is Activation.GELU else activation)
    if activation is Activation.GELU:
        expected = nn.functional.gelu(expected)
    assert torch.equal(layer(inputs, activation), expected)


def test_what_is_not_served() -> None:
    weight, make = weights(torch.bfloat16, 64, 64), partial(normal, torch.bfloat16)
    assert hopper_products.serves(make(2, 64), weight) and hopper_products.serves(make(16, 64), weight)
    assert not hopper_products.serves(make(1, 64), weight)
    assert not hopper_products.serves(make(17, 64), weight)
    assert not hopper_products.serves(make(2, 64).half(), weight)
    assert not hopper_products.serves(make(2, 64).float(), weight.float())
    assert not hopper_products.serves(make(2, 65)[:, 1:], weight)
    assert not hopper_products.serves(make(2, 60), make(64, 60))
    assert not hopper_products.serves(make(64, 2).t(), weight)
    assert not hopper_products.serves(make(2, 64), make(64, 64).t())
