"""The products of few rows for Hopper cards compile for one, also where there is none, and compute as Python does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import fresh_triton
import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which has no macOS build")

PROGRAM = """
import subprocess
import sys
import triton
from pathlib import Path
from ppkernels.gpu.hopper_products import MOST_ROWS
from ppkernels.gpu.hopper_products.product_kernel import multiply
from ppkernels.gpu.hopper_products.product_launch import LAYOUT, REGISTERS, tiles_of
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

name, outputs, words = sys.argv[1], int(sys.argv[2]), sys.argv[3]
parts = 2 if "GATED" in words else 1
tiles = tiles_of(outputs, parts, "INTO" in words)
boxes = {"inputs": (MOST_ROWS, tiles.piece), "weight": (tiles.outputs, tiles.piece)}
types = dict.fromkeys(("bias", "residual", "output"), f"*{name}") | {"partial": "*fp32", "counters": "*i32"}
types |= {key: f"tensordesc<{name}[{rows}, {columns}],{LAYOUT!r}>" for key, (rows, columns) in boxes.items()}
constants = {
    "PAD": MOST_ROWS, "TILE": tiles.outputs, "PIECE": tiles.piece, "STAGES": tiles.stages(parts), "CHAIN": True,
    "DOT": {"bf16": gl.bfloat16, "fp16": gl.float16}[name],
    **{flag: flag in words for flag in ("BIAS", "RELU", "GATED", "RESIDUAL")},
}
names = multiply.arg_names
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("output", "partial", "counters")}
values = {(names.index(name),): value for name, value in constants.items()}
source = GluonASTSource(multiply, signature, values, aligned)
options = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
ptx = [line.split("//")[0].strip() for line in compiled.asm["ptx"].splitlines()]
arrives = [at for at, line in enumerate(ptx) if "mbarrier.arrive.shared::cta.b64" in line]
counts = [at for at, line in enumerate(ptx) if ".acq_rel.add" in line]
behind = [any(line.startswith(("bar.sync", "bar.warp.sync")) for line in ptx[at - 8 : at]) for at in arrives + counts]
copies = [at for at, line in enumerate(ptx) if "cp.async.bulk.tensor" in line]
waits = [at for at, line in enumerate(ptx) if "griddepcontrol.wait" in line]
print(
    compiled.metadata.shared,
    sum("wgmma.mma_async" in line for line in ptx),
    len(arrives) == len(counts) == 1 and all(behind),
    any(copies[0] < at < copies[-1] for at in waits),
)
"""
VARIANTS = """
import torch
from ppkernels.activation_kind import Activation
from ppkernels.gpu.hopper_products import product_launch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

backend, kernel, found = make_backend(GPUTarget("cuda", 90, 32)), product_launch.multiply, set()
bind = create_function_from_signature(kernel.signature, kernel.params, backend)


def record(kernel, *arguments, grid, warmup, **options):
    _, compiled_in, more = bind(*arguments, **options)
    backend.parse_options(dict(more))
    found.add(f"{compiled_in} {sorted(more.items())}")


type(kernel).run = record
torch.cuda.is_current_stream_capturing = lambda: False
product_launch.processors = lambda device: 132


def make(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


for outputs, width in ((4096, 2048), (4096, 4096), (100, 64), (1, 8)):
    weight = make(outputs, width)
    for rows in range(2, 17):
        product_launch.multiply_rows(make(rows, 2 * width)[:, width:], weight)
        residual, bias = make(rows, outputs + rows)[:, rows:], make(outputs + rows)[rows:]
        product_launch.multiply_rows(make(rows, width), weight, bias, Activation.RELU, residual)
print(len(found))
"""
SHARED = 228 * 1024
"""Bytes of shared memory of a multiprocessor. Each program takes 1 KiB more than it asks for."""


OUT = ("bf16", 3072, ""), ("fp16", 8192, "BIAS RELU"), ("bf16", 7168, "GATED BIAS")
INTO = ("bf16", 4096, "INTO RESIDUAL"), ("fp16", 8192, "INTO BIAS")


def test_it_compiles(tmp_path: Path) -> None:
    taken: dict[bool, list[int]] = {True: [], False: []}
    for name, outputs, words in OUT + INTO:
        shared, products, behind, chained = fresh_triton.run(PROGRAM, tmp_path, name, str(outputs), words).split()
        taken["INTO" in words].append(int(shared) + 1024)
        assert int(products) == 8, "64 outputs and 16 inputs each"
        assert behind == "True", "one thread arrives, or counts, for its warps: behind a barrier, or it may come early"
        assert chained == "True", "the weight is copied before the kernel before has ended, and the inputs behind that"
    assert max(taken[True]) + max(taken[False]) <= SHARED, "neighbours share a multiprocessor"
    assert 2 * min(taken[True]) > SHARED, "two programs of a product into the residual stream do not"


def test_rows_and_shapes_need_no_more_variants(tmp_path: Path) -> None:
    """One with and one without what is around: no request is the first to use one."""
    assert fresh_triton.run(VARIANTS, tmp_path).split() == ["2"]


def test_it_computes_products(tmp_path: Path) -> None:
    """See `run_products.py`; it prints a seed first."""
    program = Path(__file__).with_name("run_products.py").read_text()
    assert fresh_triton.run(program, tmp_path).split()[-1] == "right"
