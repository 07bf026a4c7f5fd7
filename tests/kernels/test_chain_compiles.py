"""Chained kernels compile for a Hopper card, and neither read results nor write before the kernel before has ended."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which has no macOS build")

PROGRAM = """
import sys
import triton
import triton.language as tl
from ppkernels.gpu import paged_decode, rotate_and_store, store_kv
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HALF, INT, SUM = "*bf16", "*i32", "*fp32"
HEADS = {"KV_HEADS": 4, "HEAD_DIM": 128, "BLOCK_SIZE": 16}
PREFIX = {"PREFIX_ROWS": 16, "PREFIX_SCORES": 64, "TILE_ROWS": 16, "TILE": 64, "GROUP": 4, "WIDE": 128}
KERNELS = {
    "attend": (paged_decode._attend, HEADS | PREFIX | {"GROUP_ROWS": 16, "WHOLE": False, "DOT": tl.bfloat16}),
    "attend whole": (paged_decode._attend, HEADS | PREFIX | {"GROUP_ROWS": 16, "WHOLE": True, "DOT": tl.bfloat16}),
    "weigh": (paged_decode._weigh, HEADS | PREFIX | {"PARTS_WIDE": 16}),
    "rotate": (rotate_and_store._rotate_and_store, HEADS | {"QUERY_HEADS": 16, "WIDE": 64, "HEADS": 8}),
    "store": (store_kv._store, {"BLOCK_SIZE": 16, "SIZE": 512, "TILE": 512}),
}
TYPES = {
    **dict.fromkeys(("query", "kv", "output", "fused", "cos", "sin"), HALF),
    **dict.fromkeys(("tables", "lengths", "query_start", "prefix_used", "prefix_lengths", "prefix_places"), INT),
    **dict.fromkeys(("positions", "slots"), INT), "scale": "fp32",
    **dict.fromkeys(("partial", "weights", "prefix_sums", "prefix_weights"), SUM),
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
loads = ("ld.global", "cp.async")
print(
    sum(any(word in line for word in loads) for line in ptx[:wait]),
    sum(any(word in line for word in loads) for line in ptx[wait:]) > 0,
    sum("st.global" in line for line in ptx[:wait]),
)
"""


@pytest.mark.parametrize(
    ("kernel", "most"),
    [("attend", 3), ("attend whole", 3), ("weigh", 0), ("rotate", 0), ("store", 0)],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_results_of_the_kernel_before_are_read_behind_it(kernel: str, most: int, tmp_path: Path) -> None:
    """`most`: loads of integers of the step that may come before."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, kernel], env=environment, capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    before, reads, writes = ended.stdout.split()
    assert int(before) <= most
    assert (reads, writes) == ("True", "0")
