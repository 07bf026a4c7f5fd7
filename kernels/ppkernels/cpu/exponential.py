"""The exponential function for compiled code, in a form that becomes vector code in float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from ppkernels.cpu import jit

_EXP2 = (1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1,
         6.931472028550421e-1, 1.0)  # fmt: skip
"""Polynomial of 2^f for f in [-0.5, 0.5], error below 2e-8 (from exp2f of the Cephes library, S.
Moshier).
"""
_C0, _C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(value) for value in _EXP2)
_LOG2_E = np.float32(1.4426950408889634)
_LOWEST, _HIGHEST = np.float32(-100.0), np.float32(127.4)
"""Bounds of the power of two. Multiplications by subnormal weights of a softmax would be slow."""
_HALF = np.float32(0.5)


def exp(x: Any) -> Any:
    """Return e^x in compiled code, in float32 limited to [2^-100, 2^127.4]; NaN stays NaN."""
    return math.exp(x)


@overload(exp, jit_options={"fastmath": jit.REORDER})
def _exp(x):  # type: ignore[no-untyped-def]
    if x != types.float32:
        return lambda x: math.exp(x)

    def exp32(x):  # type: ignore[no-untyped-def]
        power = x * _LOG2_E
        # These comparisons are false for a NaN, which therefore passes through.
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
        # Added to 1.5 * 2^23, a whole number fills the last bits of a float32. Exponents begin at bit 23; 127 is 0.
        shifted = build.fadd(arguments[0], ir.Constant(ir.FloatType(), 12582912.0))
        bits = build.shl(build.bitcast(shifted, integer), integer(23))
        return build.bitcast(build.add(bits, integer(127 << 23)), ir.FloatType())

    return n(n), generate


_power_of_two = cast(Callable[[Any], Any], intrinsic(_two_to))
"""Function of compiled code: 2^n of a whole float32 n from -100 to 127; any number for a NaN."""
