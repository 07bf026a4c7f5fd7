"""Kernels that wait for words of other ranks compile so that no two warps share the words of a wait, and all end it.

A warp that shares them reads them at its own time. If it ends the wait, the words of the others may be older ones. Each
warp sees a release at its own time, too. One that ended the wait alone would leave the barriers of the others' looks.
"""

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
from ppkernels.gpu import collectives, greedy_ranks, top_k_ranks
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

name, number = sys.argv[1], int(sys.argv[2])
RANKS = {"RANK": 1, "SIZE": 2, "WORDS_AT": 2**23, "WORDS": 2**17}
TOKENS = RANKS | {"NEWEST": True, "BANNED_WIDTH": 8}
BELOW = {"PROGRAMS": 128, "LANES": number, "MERGED": 128, "ROOM": 8320, "CAPACITY": 8192, "BLOCK": 4096}
SUM = {"NORM": True, "CENTRED": False, "WEIGHT": True, "BIAS": False, "CHAIN": True, "PART_BYTES": 2**20, "MOST": 128}
kernel, constants, warps = {
    "below": (top_k_ranks._choose_rows, TOKENS | BELOW, top_k_ranks.WARPS),
    "greedy": (greedy_ranks._choose_rows, TOKENS | {"MOST": 128, "BLOCK": 16384}, 32),
    "sum": (collectives._reduce_rows, RANKS | SUM | {"WIDTH": number, "BLOCK": number}, collectives.warps_of(number)),
}[name]
HALF = dict.fromkeys(("logits", "candidates", "part", "residual", "weight", "bias", "output"), "*bf16")
LONG = dict.fromkeys(("parameters", "tokens", "newest", "table", "counters"), "*i64")
types = HALF | LONG | dict.fromkeys(("slots", "positions", "ids"), "*i32") | {"eps": "fp32"}
names = kernel.arg_names
signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in names}
aligned = {(at,): [["tt.divisibility", 16]] for at, each in enumerate(names) if signature[each].startswith("*")}
source = ASTSource(kernel, signature, {(names.index(each),): value for each, value in constants.items()}, aligned)

class Layouts(Exception):
    # All that is read is here. The rest of the compilation takes three quarters of the time.
    pass

def stop(*compilation):
    if not compilation:
        return "", ""

    def found(code, _):
        raise Layouts(str(code))

    compilation[1]["llir"] = found

triton.knobs.runtime.add_stages_inspection_hook = stop
try:
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    raise AssertionError("it goes on")
except Layouts as layouts:
    code = layouts.args[0]

def numbers(text):
    return [int(one) for one in re.findall(r"\d+", text)]

found = []
for line in code.splitlines():
    if "isVolatile = true" in line and (words := re.search(r"tensor<([\dx]+)x!tt.ptr<i64>, (#\w+)>", line)):
        layout = re.search(rf"{words[2]} = #ttg.blocked<(.*)>", code)[1]
        _, each, lanes, rows, _ = (numbers(part) for part in re.split(r"\w+ = ", layout))
        spans = list(zip(numbers(words[1]), each, lanes, rows, strict=True))
        shared = any(row > 1 and row * lane * own > size for size, own, lane, row in spans)
        in_a_warp = all(size <= own * lane for size, own, lane, _ in spans)
        found.append(shared and not in_a_warp)
lines, together = code.splitlines(), []
for at, line in enumerate(lines):
    indent = line[: len(line) - len(line.lstrip())]
    if "scf.while" not in line:
        continue
    middle, end = [number for number in range(at, len(lines)) if lines[number].startswith(indent + "}")][:2]
    before, body = lines[at + 1 : middle], lines[middle + 1 : end]
    if not any("isVolatile = true" in each and "tensor<" in each for each in body):
        continue
    carried = re.findall(r"(%\w+) = ", line.split("scf.while")[1])
    condition = re.search(r"scf.condition\((%\w+)\)", before[-1])[1]
    goes_on = next(each for each in before if each.lstrip().startswith(f"{condition} = "))
    names = re.findall(r"%\w+", goes_on.split(" = ", 1)[1])
    given = re.findall(r"%\w+", body[-1].split(" : ")[0])
    values = [given[carried.index(each)] for each in names if each in carried]
    reduced = [f'{each} = "tt.reduce"' in "".join(body) for each in values]
    together.append("arith.cmpi" in goes_on and reduced == [True])
print(len(found), any(found), len(together), all(together))
"""


def compiled(kernel: str, number: int, cache: Path) -> tuple[int, bool]:
    """Return how many reads a kernel's waits have, and whether warps share the words of one. All end each wait."""
    reads, shared, waits, together = fresh_triton.run(PROGRAM, cache, kernel, str(number)).split()
    assert int(waits) == int(reads) // 2, "a read before the loop, and one in it"
    assert together == "True", "what one thread has seen ends a wait"
    return int(reads), shared == "True"


@pytest.mark.parametrize("width", [32, 64, 128, 256, 512, 1024, 4096, 16384])
def test_a_sum_of_rows(width: int, tmp_path: Path) -> None:
    assert compiled("sum", width, tmp_path) == (2, False)


def test_greedy_tokens(tmp_path: Path) -> None:
    assert compiled("greedy", 0, tmp_path) == (2, False)


def test_tokens_below_top_k(tmp_path: Path) -> None:
    from ppkernels.gpu import top_k_ranks

    assert compiled("below", top_k_ranks.LANES, tmp_path / "own") == (4, False)
    assert compiled("below", top_k_ranks.MOST, tmp_path / "shared") == (4, True), "warps share fewer lanes"
