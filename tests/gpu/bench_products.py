"""Microseconds of products with few rows on a Hopper card: `python tests/gpu/bench_products.py [--tiles]`.

cuBLAS and the own kernel multiply with each weight of a layer of Llama-8B, of one rank and of one of two. Each time is
the median of replays of a graph that goes through more weights than the L2 cache holds. `layer` is the sum of four
products, one behind the other, `all` has the norms and gates between them, too. `--tiles` also tries shapes of tiles.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from bench_ops import microseconds
from ppkernels import activation, norms
from ppkernels.activation_kind import Activation
from ppkernels.gpu.hopper_products.product_launch import INTO_RING, OUT_RING, Tiles, multiply_rows
from torch import Tensor
from torch.nn.functional import linear

LAYERS = {
    "half": ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168)),
    "whole": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
ROWS = (2, 8, 16)
READ = 400 << 20
"""Bytes of weights that a graph reads before it reads any of them again."""
WHOLE_RING = OUT_RING + INTO_RING
"""Bytes of the stages of a program that has a multiprocessor alone."""
TILES = [
    Tiles(*tile, ring)
    for ring, tiles in {
        INTO_RING: ((64, 128), (64, 64), (128, 64), (128, 128)),
        WHOLE_RING: ((64, 128), (128, 64), (128, 128), (256, 64)),
    }.items()
    for tile in tiles
]
Product = Callable[[Tensor, Tensor], Tensor]


def like(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


class Weights:
    """Weights of several layers, made once for all rows."""

    def __init__(self, shapes: tuple[tuple[int, int], ...]) -> None:
        size = 2 * sum(outputs * inputs for outputs, inputs in shapes)
        self.layers = [
            [like(*shape) * shape[1] ** -0.5 for shape in shapes] for _ in range(max(3, -(-READ // size)))
        ]  # fmt: skip
        self.bytes = size
        self.scale = torch.ones(shapes[0][1], dtype=torch.bfloat16, device="cuda")

    def of(self, number: int) -> list[Tensor]:
        """Return many weights of the shape of product `number`."""
        first = self.layers[0][number]
        more = -(-READ // first.nbytes) - len(self.layers)
        return [layer[number] for layer in self.layers] + [first.clone() for _ in range(max(0, more))]


def copy_speed() -> float:
    """Return the GB/s of a copy."""
    source = torch.zeros(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / microseconds([lambda: torch.neg(source, out=target)] * 3) / 1000


def of_products(weights: list[Tensor], rows: int, product: Product) -> float:
    inputs = like(rows, weights[0].shape[1])
    for weight in weights:
        product(inputs, weight)
    return microseconds([partial(product, inputs, weight) for weight in weights])


def check(weight: Tensor, rows: int, product: Product) -> float:
    """Return the largest difference to cuBLAS's result."""
    inputs = like(rows, weight.shape[1])
    return float((product(inputs, weight).float() - linear(inputs, weight).float()).abs().max())


def products_of_layer(weights: list[Tensor], inputs: dict[int, Tensor], product: Product) -> None:
    for weight in weights:
        product(inputs[weight.shape[1]], weight)


def of_layers(weights: Weights, rows: int, product: Product) -> float:
    """Return the time of four products, one layer after the other."""
    inputs = {weight.shape[1]: like(rows, weight.shape[1]) for weight in weights.layers[0]}
    operations = [partial(products_of_layer, layer, inputs, product) for layer in weights.layers]
    for operation in operations:
        operation()
    return microseconds(operations)


def library_layer(weights: list[Tensor], scale: Tensor, hidden: Tensor) -> None:
    """A layer without attention as an engine has it with cuBLAS."""
    first, second, third, fourth = weights
    fused = linear(norms.rms_norm(hidden, scale, 1e-5), first)
    update = linear(fused[:, : second.shape[1]], second)
    gates = linear(norms.add_rms_norm(hidden, update, scale, 1e-5), third)
    linear(activation.silu_and_mul(gates), fourth)


def own_layer(weights: list[Tensor], scale: Tensor, hidden: Tensor) -> None:
    """The same layer with the own kernel; sums and gates are the kernel's."""
    first, second, third, fourth = weights
    fused = multiply_rows(norms.rms_norm(hidden, scale, 1e-5), first)
    inner = multiply_rows(fused[:, : second.shape[1]], second, None, None, hidden, into_stream=True)
    gated = multiply_rows(norms.rms_norm(inner, scale, 1e-5), third, None, Activation.SILU_AND_MUL)
    multiply_rows(gated, fourth, None, None, inner, into_stream=True)


def of_whole_layers(weights: Weights, rows: int, layer: Callable[[list[Tensor], Tensor, Tensor], None]) -> float:
    hidden = like(rows, len(weights.scale))
    operations = [partial(layer, each, weights.scale, hidden) for each in weights.layers]
    for operation in operations:
        operation()
    return microseconds(operations)


def bench(name: str, weights: Weights, copy: float) -> list[str]:
    """Print a line for each product; return those of the last table."""
    for number, rows in itertools.product(range(4), ROWS):
        many = weights.of(number)
        library, own = of_products(many, rows, linear), of_products(many, rows, multiply_rows)
        speed = many[0].nbytes / own / 1000
        shape = "x".join(map(str, many[0].shape))
        print(
            f"{name:6} {shape:12} {rows:3} rows: cuBLAS {library:7.2f} own {own:7.2f} us, {speed:5.0f} GB/s, "
            f"{speed / copy:4.0%} of a copy, difference {check(many[0], rows, multiply_rows):.3f}",
            flush=True,
        )
    table = []
    for rows in ROWS:
        layer = [of_layers(weights, rows, product) for product in (linear, multiply_rows)]
        whole = [of_whole_layers(weights, rows, product) for product in (library_layer, own_layer)]
        table.append(
            f"| {name:6} | {rows:4} | {layer[0]:7.1f} | {layer[1]:7.1f} | {weights.bytes / copy / 1000:7.1f} "
            f"| {whole[0]:7.1f} | {whole[1]:7.1f} |"
        )
    return table


def bench_tiles(name: str, weights: Weights, rows: int) -> None:
    """Print a line for each product: times of all shapes of tiles, the best first."""
    for number in range(4):
        many, times = weights.of(number), {}
        for tiles in TILES:
            if tiles.stages(1) < 3:
                continue
            product = partial(multiply_rows, tiles=tiles)
            wrong = check(many[0], rows, product)
            times[f"{tiles.outputs}x{tiles.piece}/{tiles.ring >> 10}K"] = of_products(many, rows, product)
            if not wrong < 0.1:
                print(f"{tiles} is wrong by {wrong}")
        shape = "x".join(map(str, many[0].shape))
        entries = ", ".join(f"{tiles} {times[tiles]:.2f}" for tiles in sorted(times, key=times.__getitem__))
        print(f"{name:6} {shape:12} {rows:3} rows: {entries}", flush=True)


def main() -> None:
    start = time.perf_counter()
    torch.manual_seed(0)
    copy = copy_speed()
    print(torch.cuda.get_device_name(), torch.__version__, f"a copy reaches {copy:.0f} GB/s", flush=True)
    table = []
    for name, shapes in LAYERS.items():
        weights = Weights(shapes)
        if "--tiles" in sys.argv:
            for rows in (8, 16):
                bench_tiles(name, weights, rows)
        table += bench(name, weights, copy)
    print(f"{time.perf_counter() - start:.0f} s\n")
    print("| layer  | rows | cuBLAS  |  own    | as copy | cuBLAS, all | own, all |\n|---|---|---|---|---|---|---|")
    print("\n".join(table))


if __name__ == "__main__":
    main()
