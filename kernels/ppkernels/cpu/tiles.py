"""The inner loop of products and attention on a CPU: rows times a panel as wide as one vector.

A compiler keeps the sums of plain loops in memory. So this file writes the loop in LLVM's IR, with
the sums of all rows in registers. Each step loads one vector of the panel, multiplies it by one
number of each row, and prefetches a later vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ppkernels.cpu.vectors import VECTOR_BYTES

HEIGHT = 16 if VECTOR_BYTES == 64 else 8
"""Rows of the highest tile; the panel gets the registers that their sums leave free."""


def _lanes_of(_: Any, values: Any) -> Any:
    lanes = VECTOR_BYTES * 8 // values.dtype.bitwidth
    return types.intp(values), lambda context, *_: context.get_constant(types.intp, lanes)


lanes_of = cast(Callable[[Any], int], intrinsic(_lanes_of))
"""Function of compiled code: how many of an array's numbers one vector holds, a constant."""
_INDEX = ir.IntType(64)
_INT = ir.IntType(32)
_FETCH = "llvm.prefetch.p0i8"
_BYTES = ir.IntType(8).as_pointer()


class _Code:
    """Writes the code of one tile. Its arguments have the names that `make_tile` explains."""

    def __init__(self, context: Any, build: Any, kinds: Sequence[Any], values: Sequence[Any], height: int) -> None:
        """`kinds` are the types of `x`, `w` and `y`."""
        (x, self._x_at, self._x_step, w, self._w_at, self._w_step, self._fetch_at, self._depth, y, self._y_at,
         self._y_step, self._rows, self._add) = values  # fmt: skip
        self._build, self._height = build, height
        number = kinds[0].dtype
        self._vector = ir.VectorType(context.get_data_type(number), VECTOR_BYTES * 8 // number.bitwidth)
        self._align = number.bitwidth // 8
        fetch_type = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
        self._fetch = build.module.globals.get(_FETCH) or ir.Function(build.module, fetch_type, _FETCH)
        self._x, self._w, self._y = (
            context.make_array(kind)(context, build, value).data for kind, value in zip(kinds, (x, w, y), strict=True)
        )

    def write_sums(self, unroll: int, by_row: bool) -> list[list[Any]]:
        """Write the loop over k; return one sum a row for each of several phases, which add up."""
        build, zero = self._build, ir.Constant(self._vector, None)
        rows = [build.add(self._x_at, build.mul(self._row(r), self._x_step)) if by_row else None
                for r in range(self._height)]  # fmt: skip
        before, loop, after = build.block, build.append_basic_block("loop"), build.append_basic_block("after")
        build.branch(loop)
        build.position_at_end(loop)
        step = build.phi(_INDEX)
        step.add_incoming(_INDEX(0), before)
        phases = max(1, min(unroll, 16 // self._height))
        sums = [[build.phi(self._vector) for _ in range(self._height)] for _ in range(phases)]
        totals: list[list[Any]] = [list(phase) for phase in sums]
        for number in range(unroll):
            k = build.add(step, _INDEX(number))
            panel = self._load_panel(k)
            total = totals[number % phases]
            for r, row in enumerate(rows):
                total[r] = build.fadd(total[r], self._product(r, row, k, panel), flags=["contract"])
        following = build.add(step, _INDEX(unroll))
        step.add_incoming(following, loop)
        for phase, total in zip(sums, totals, strict=True):
            for one, grown in zip(phase, total, strict=True):
                one.add_incoming(zero, before)
                one.add_incoming(grown, loop)
        build.cbranch(build.icmp_signed("<", following, self._depth), loop, after)
        build.position_at_end(after)
        return totals

    def write_results(self, sums: list[list[Any]]) -> None:
        """Store the sums of all phases in `y`, or add them to it."""
        build = self._build
        targets = [
            self._as_vector(self._place(self._y, self._row(r), self._y_step, self._y_at)) for r in range(self._height)
        ]
        results = sums[0]
        for phase in sums[1:]:
            results = [build.fadd(one, other) for one, other in zip(results, phase, strict=True)]
        with build.if_else(self._add) as branches:
            for branch, adds in zip(branches, (True, False), strict=True):
                with branch:
                    stored = results
                    if adds:
                        olds = [build.load(target, align=self._align) for target in targets]
                        stored = [build.fadd(old, new) for old, new in zip(olds, results, strict=True)]
                    for target, value in zip(targets, stored, strict=True):
                        build.store(value, target, align=self._align)

    def _load_panel(self, k: Any) -> Any:
        """Return w[k], and prefetch a later vector."""
        build = self._build
        panel = build.load(self._as_vector(self._place(self._w, k, self._w_step, self._w_at)), align=self._align)
        ahead = build.bitcast(self._place(self._w, k, self._w_step, self._fetch_at), _BYTES)
        build.call(self._fetch, [ahead, _INT(0), _INT(3), _INT(1)])  # to read, into all levels, data
        return panel

    def _product(self, r: int, row: Any, k: Any, panel: Any) -> Any:
        """Return x[r, k] * `panel`. `row`: place of x[r, 0]; None: the rows lie side by side."""
        build = self._build
        if row is None:
            source = self._place(self._x, k, self._x_step, build.add(self._x_at, _INDEX(r)))
        else:
            source = build.gep(self._x, [build.add(row, k)])
        undefined = ir.Constant(self._vector, ir.Undefined)
        lanes = ir.Constant(ir.VectorType(_INT, self._vector.count), None)
        single = build.insert_element(undefined, build.load(source), _INT(0))
        return build.fmul(build.shuffle_vector(single, undefined, lanes), panel, flags=["contract"])

    def _row(self, r: int) -> Any:
        """Return `r`, or the last row if there are fewer."""
        build = self._build
        return build.select(build.icmp_signed("<", _INDEX(r), self._rows), _INDEX(r), build.sub(self._rows, _INDEX(1)))

    def _place(self, base: Any, index: Any, step: Any, offset: Any) -> Any:
        return self._build.gep(base, [self._build.add(self._build.mul(index, step), offset)])

    def _as_vector(self, pointer: Any) -> Any:
        return self._build.bitcast(pointer, self._vector.as_pointer())


def make_tile(height: int, *, unroll: int, by_row: bool) -> Any:
    """Return a function `tile` for compiled code, with the parameters below.

    The tile sets y[r] to the sum over k < `depth` of x[r, k] * w[k], for each row r < `rows` <=
    `height`; with `add` it adds the sum to y[r]. `depth` must be a multiple of `unroll`. Low tiles
    need an `unroll` of 4: each step has its own sums, since one sum can grow only every fourth
    cycle.

    Arrays are contiguous and of one type; places are counted in elements:
    - `y[r]`: one vector, at `y_at` + r * `y_step`;
    - `w[k]`: one vector, at `w_at` + k * `w_step`;
    - the vector at `fetch_at` + k * `w_step`, which may be any number, is prefetched;
    - `x[r, k]`: at `x_at` + r * `x_step` + k if `by_row`; otherwise at `x_at` + k * `x_step` + r,
      with the last row repeated up to `height`.
    """

    @intrinsic
    def tile(_: Any, x: Any, x_at: Any, x_step: Any, w: Any, w_at: Any, w_step: Any, fetch_at: Any, depth: Any, y: Any,
             y_at: Any, y_step: Any, rows: Any, add: Any) -> Any:  # fmt: skip
        at = types.intp
        signature = types.void(x, at, at, w, at, at, at, at, y, at, at, at, types.boolean)

        def generate(context: Any, build: Any, _: Any, values: Any) -> Any:
            code = _Code(context, build, (x, w, y), values, height)
            code.write_results(code.write_sums(unroll, by_row))
            return context.get_dummy_value()

        return signature, generate

    return tile
