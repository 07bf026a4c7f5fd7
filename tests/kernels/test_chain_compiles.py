"""Chained kernels compile for a Hopper card, and touch no results before the kernel before them has ended."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import fresh_triton
import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which has no macOS build")

PROGRAM = r"""
import re
import sys
import triton
import triton.language as tl
from ppkernels.gpu import activation, collectives, few_rows, norms, paged_decode, rotate_and_store, store_kv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HALF, INT, SUM = "*bf16", "*i32", "*fp32"
HEADS = {"KV_HEADS": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
PREFIX = {"PREFIX_ROWS": 16, "PREFIX_SCORES": 64, "TILE_ROWS": 16, "TILE": 64, "GROUP": 4, "WIDE": 128}
NORM = {"CENTRED": True, "WEIGHT": True, "BIAS": True, "BLOCK": 1024}
SUMS = {"WIDTH": 1000, "NORM": True, "RANK": 0, "SIZE": 2, "PART_BYTES": 2**20, "WORDS_AT": 2**23, "MOST": 128}
PRODUCT = {"WIDTH": 1000, "ROWS": 1, "BIAS": True, "BLOCK": 8, "WIDE": 1024}
KERNELS = {
    "attend": (paged_decode._attend, HEADS | PREFIX | {"GROUP_ROWS": 16, "WHOLE": False, "DOT": tl.bfloat16}),
    "attend whole": (paged_decode._attend, HEADS | PREFIX | {"GROUP_ROWS": 16, "WHOLE": True, "DOT": tl.bfloat16}),
    "weigh": (paged_decode._weigh, HEADS | PREFIX | {"PARTS_WIDE": 16}),
    "rotate": (rotate_and_store._rotate_and_store, HEADS | {"QUERY_HEADS": 16, "WIDE": 64, "HEADS": 8}),
    "store": (store_kv._store, {"BLOCK_SIZE": 16, "SIZE": 512, "TILE": 512}),
    "activation": (activation._silu_and_mul, {"BLOCK": 1024}),
    "norm": (norms._norm_rows, NORM | {"width": 1000, "UPDATE": True, "TILE": 1}),
    "sum": (collectives._reduce_rows, NORM | SUMS | {"WORDS": 0}),
    "sum in words": (collectives._reduce_rows, NORM | SUMS | {"WORDS": 2**17}),
    "product": (few_rows._few_rows, PRODUCT | {"GATED": False, "RELU": True, "RESIDUAL": True}),
    "gated product": (few_rows._few_rows, PRODUCT | {"GATED": True, "RELU": False, "RESIDUAL": False}),
}
TYPES = {
    **dict.fromkeys(("query", "kv", "output", "fused", "cos", "sin", "gate_up", "part", "residual", "inputs"), HALF),
    **dict.fromkeys(("values", "update", "weight", "bias"), HALF),
    **dict.fromkeys(("tables", "lengths", "query_start", "prefix_used", "prefix_lengths", "prefix_places"), INT),
    **dict.fromkeys(("positions", "slots"), INT), **dict.fromkeys(("scale", "eps"), "fp32"),
    **dict.fromkeys(("partial", "weights", "prefix_sums", "prefix_weights"), SUM),
    **dict.fromkeys(("table", "counters"), "*i64"),
}

kernel, constants = KERNELS[sys.argv[1]]
names = kernel.arg_names
constants = {name: value for name, value in (constants | {"CHAIN": True}).items() if name in names}
signature = {name: "constexpr" if name in constants else TYPES.get(name, "i32") for name in names}
aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name].startswith("*")}
values = {(names.index(name),): value for name, value in constants.items()}
source = ASTSource(kernel, signature, values, aligned)
options = {"num_warps": 4, "num_stages": 3, "launch_pdl": True}
ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"].splitlines()
wait = next(at for at, line in enumerate(ptx) if "griddepcontrol.wait" in line)
arguments, bases = [name for name in names if name not in constants], {}
read, written = set(), set()
for line in ptx[:wait]:
    access = re.search(r"\b(ld|st|atom|red|cp)\S*global\S* .*\[ *(%\w+)", line.replace("\t", " "))
    registers = re.findall(r"%(?!p\d)\w+", line)
    if found := re.search(r"_param_(\d+)\]", line):
        bases[registers[0]] = {arguments[int(found[1])]} if int(found[1]) < len(arguments) else set()
    elif access:
        (read if access[1] in ("ld", "cp") else written).update(bases.get(access[2]) or {"?"})
        bases.update(dict.fromkeys(registers[: registers.index(access[2])], set()))
    elif registers:
        bases[registers[0]] = set().union(*(bases.get(source, ()) for source in registers[1:]))
targets = [f"{name}:" for line in ptx[:wait] for name in re.findall(r"\bbra\S*\s+(\S+);", line)]
shown = [",".join(sorted(name for name in found if signature.get(name, "*")[0] == "*")) for found in (read, written)]
print(
    *(names or "-" for names in shown),
    any("ld.global" in line or "cp.async" in line for line in ptx[wait:]),
    any(re.search(r"\b(ret|exit);", line) for line in ptx[:wait]),
    all(any(line.startswith(target) for line in ptx[:wait]) for target in targets),
)
"""


@pytest.mark.parametrize(
    ("kernel", "read"),
    [
        ("attend", "lengths,query_start"), ("attend whole", "lengths,query_start"), ("weigh", "-"), ("rotate", "-"),
        ("store", "-"), ("activation", "-"), ("norm", "bias,weight"), ("sum", "bias,weight"),
        ("sum in words", "bias,weight"), ("product", "bias,weight"), ("gated product", "bias,weight"),
    ],
    ids=lambda value: str(value).replace(" ", "-"),
)  # fmt: skip
def test_every_program_waits_for_the_kernel_before(kernel: str, read: str, tmp_path: Path) -> None:
    """Before that, it reads nothing but weights, or integers of the step (`read`), writes nothing, and does not end.

    So the end of a kernel is the end of all kernels before it: one may write what any of them reads.
    """
    before, written, reads, ends, comes_to_it = fresh_triton.run(PROGRAM, tmp_path, kernel).split()
    assert (before, written) == (read, "-")
    assert reads == "True", "what the kernel before has written is read behind its end"
    assert (ends, comes_to_it) == ("False", "True"), "no program ends, or branches off, before it has waited"


def test_all_chained_kernels_are_looked_at() -> None:
    """Products for Hopper cards have a test of their own, `test_products_compile`."""
    spec = find_spec("ppkernels.gpu")
    assert spec is not None and spec.submodule_search_locations is not None
    paths = Path(spec.submodule_search_locations[0]).rglob("*.py")
    chained = {path.stem for path in paths if "launch_pdl=" in path.read_text()}
    known = {"activation", "collectives", "few_rows", "norms", "paged_decode", "rotate_and_store", "store_kv"}
    assert chained == known | {"product_launch"}
