"""The exponential function for compiled code, in a form that becomes vector code in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from ppkernels import jit

_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
         6.931472028550421e-1, 1.0)  # fmt: skip
"""2^f for f in [-0.5, 0.5], error below 2e-8 (coefficients of the Cephes library's exp2f, S. Moshier)."""
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(value) for value in _EXP2)
_LOG2_E = np.float32(1.4426950408889634)
_LOWEST, _HIGHEST = np.float32(-100.0), np.float32(127.4)
"""Powers of two. Weights of a softmax that are as small as a float32 can be would slow down what multiplies them."""
_HALF = np.float32(0.5)


def exp(x: Any) -> Any:
    """Return e^x in compiled code. In float32 what is beyond 2^-100 and 2^127.4 is taken as these; NaN stays NaN."""
    return math.exp(x)


@overload(exp, jit_options={"fastmath": jit.REORDER})
def _exp(x):  # type: ignore[no-untyped-def]
    if x != types.float32:
        return lambda x: math.exp(x)

    def exp32(x):  # type: ignore[no-untyped-def]
        power = x * _LOG2_E
        # Written so that a NaN, of which no comparison is true, goes through.
        power = _LOWEST if power < _LOWEST else power
        power = _HIGHEST if power > _HIGHEST else power
        whole = np.floor(power + _HALF)
        f = power - whole
        value = (((((_C0 * f + _C1) * f + _C2) * f + _C3) * f + _C4) * f + _C5) * f + _C6
        return value * _power_of_two(whole)

    return exp32


def _two_to(_: Any, n: Any) -> Any:
    def generate(_: Any, build: Any, __: Any, arguments: Any) -> Any:
        integer = ir.IntType(32)
        # Beside 1.5 * 2^23 the last bits of a float32 are a whole number. An exponent begins at bit 23, 127 meaning 0.
        shifted = build.fadd(arguments[0], ir.Constant(ir.FloatType(), 12582912.0))
        bits = build.shl(build.bitcast(shifted, integer), integer(23))
        return build.bitcast(build.add(bits, integer(127 << 23)), ir.FloatType())

    return n(n), generate


_power_of_two = cast(Callable[[Any], Any], intrinsic(_two_to))
"""Returns, in compiled code, 2^n of a whole float32 n from -100 to 127; of NaN any number."""
