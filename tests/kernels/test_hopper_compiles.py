"""The attention of chunks for Hopper cards compiles for one, also where there is none."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import fresh_triton
import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which has no macOS build")

PROGRAM = """
import sys
import triton
from ppkernels.gpu.hopper import MOST_ROWS
from ppkernels.gpu.hopper.kernel import attend
from ppkernels.gpu.hopper.shapes import tile_tokens
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

name, group, head_dim, block_size = sys.argv[1], *map(int, sys.argv[2:])
copied = {"queries": (f"{tile_tokens(group) // 2}, {group}, 64", 3), "cache": (f"{min(block_size, 128)}, 64", 2)}
types = dict.fromkeys(("tables", "lengths", "query_start", "pairs", "counter"), "*i32")
types |= {"output": f"*{name}", "partial": "*fp32", "weights": "*fp32", "scale": "fp32"}
for argument, (shape, rank) in copied.items():
    types[argument] = f"tensordesc<{name}[{shape}],{gl.NVMMASharedLayout(128, 16, rank)!r}>"
constants = {
    "KV_HEADS": 8, "GROUP": group, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "MOST_ROWS": MOST_ROWS,
    "DOT": {"bf16": gl.bfloat16, "fp16": gl.float16}[name],
}
names = attend.arg_names
signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
source = GluonASTSource(attend, signature, {(names.index(name),): value for name, value in constants.items()})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
ptx = [line.split("//")[0].strip() for line in compiled.asm["ptx"].splitlines()]
arrives = [at for at, line in enumerate(ptx) if "mbarrier.arrive.shared::cta.b64" in line]
behind = [any(line.startswith(("bar.sync", "bar.warp.sync")) for line in ptx[at - 8 : at]) for at in arrives]
print(compiled.metadata.shared, any("wgmma" in line for line in ptx), len(arrives) >= 10 and all(behind))
"""
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on such a card."""


@pytest.mark.parametrize(
    ("name", "group", "head_dim", "block_size"), [("bf16", 4, 128, 16), ("fp16", 1, 64, 32), ("bf16", 64, 128, 256)]
)
def test_it_compiles(name: str, group: int, head_dim: int, block_size: int, tmp_path: Path) -> None:
    arguments = [name, *map(str, (group, head_dim, block_size))]
    shared, products, behind = fresh_triton.run(PROGRAM, tmp_path, *arguments).split()
    assert int(shared) <= SHARED
    assert products == "True"
    assert behind == "True", "one thread arrives for its warps: the compiler has a barrier before, or it may come early"
