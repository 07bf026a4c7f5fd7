"""The inner loop of products and attention on a CPU: rows times a panel as wide as one vector.

A compiler keeps the sums of plain loops in memory. So this file writes the loop in LLVM's IR, with
the sums of all rows in registers. Each step loads one vector of the panel, multiplies it by one
number of each row, and prefetches a later vector.
"""

from __future__ import annotations

from collections.abc import Callable
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
    phases = max(1, min(unroll, 16 // height))

    @intrinsic
    def tile(_: Any, x: Any, x_at: Any, x_step: Any, w: Any, w_at: Any, w_step: Any, fetch_at: Any, depth: Any, y: Any,
             y_at: Any, y_step: Any, rows: Any, add: Any) -> Any:  # fmt: skip
        at = types.intp
        signature = types.void(x, at, at, w, at, at, at, at, y, at, at, at, types.boolean)

        def generate(context: Any, build: Any, _: Any, values: Any) -> Any:
            x_value, x_at, x_step, w_value, w_at, w_step, fetch_at, depth, y_value, y_at, y_step, rows, add = values
            real = context.get_data_type(x.dtype)
            vector = ir.VectorType(real, VECTOR_BYTES * 8 // x.dtype.bitwidth)
            zero, undefined = ir.Constant(vector, None), ir.Constant(vector, ir.Undefined)
            align = x.dtype.bitwidth // 8
            lanes = ir.Constant(ir.VectorType(_INT, vector.count), None)
            fetch_type = ir.FunctionType(ir.VoidType(), [_BYTES, _INT, _INT, _INT])
            fetch = build.module.globals.get(_FETCH) or ir.Function(build.module, fetch_type, _FETCH)

            def data(kind: Any, value: Any) -> Any:
                return context.make_array(kind)(context, build, value).data

            def place(base: Any, index: Any, step: Any, offset: Any) -> Any:
                return build.gep(base, [build.add(build.mul(index, step), offset)])

            def as_vector(pointer: Any) -> Any:
                return build.bitcast(pointer, vector.as_pointer())

            def row(r: int) -> Any:
                # Rows beyond the last one repeat it.
                return build.select(build.icmp_signed("<", _INDEX(r), rows), _INDEX(r), build.sub(rows, _INDEX(1)))

            x_data, w_data, y_data = data(x, x_value), data(w, w_value), data(y, y_value)
            x_rows = [build.add(x_at, build.mul(row(r), x_step)) if by_row else None for r in range(height)]
            before, loop, after = build.block, build.append_basic_block("loop"), build.append_basic_block("after")
            build.branch(loop)
            build.position_at_end(loop)
            step = build.phi(_INDEX)
            step.add_incoming(_INDEX(0), before)
            sums = [[build.phi(vector) for _ in range(height)] for _ in range(phases)]
            totals: Any = [list(phase) for phase in sums]
            for number in range(unroll):
                k = build.add(step, _INDEX(number))
                panel = build.load(as_vector(place(w_data, k, w_step, w_at)), align=align)
                ahead = build.bitcast(place(w_data, k, w_step, fetch_at), _BYTES)
                build.call(fetch, [ahead, _INT(0), _INT(3), _INT(1)])  # to read, into all levels, data
                for r in range(height):
                    if by_row:
                        source = build.gep(x_data, [build.add(x_rows[r], k)])
                    else:
                        source = place(x_data, k, x_step, build.add(x_at, _INDEX(r)))
                    single = build.insert_element(undefined, build.load(source), _INT(0))
                    product = build.fmul(build.shuffle_vector(single, undefined, lanes), panel, flags=["contract"])
                    total = totals[number % phases]
                    total[r] = build.fadd(total[r], product, flags=["contract"])
            following = build.add(step, _INDEX(unroll))
            step.add_incoming(following, loop)
            for phase, total in zip(sums, totals, strict=True):
                for r in range(height):
                    phase[r].add_incoming(zero, before)
                    phase[r].add_incoming(total[r], loop)
            build.cbranch(build.icmp_signed("<", following, depth), loop, after)
            build.position_at_end(after)

            targets = [as_vector(place(y_data, row(r), y_step, y_at)) for r in range(height)]
            results = totals[0]
            for total in totals[1:]:
                results = [build.fadd(one, other) for one, other in zip(results, total, strict=True)]
            with build.if_else(add) as branches:
                for branch, adds in zip(branches, (True, False), strict=True):
                    with branch:
                        stored = results
                        if adds:
                            olds = [build.load(target, align=align) for target in targets]
                            stored = [build.fadd(old, new) for old, new in zip(olds, results, strict=True)]
                        for target, value in zip(targets, stored, strict=True):
                            build.store(value, target, align=align)
            return context.get_dummy_value()

        return signature, generate

    return tile
