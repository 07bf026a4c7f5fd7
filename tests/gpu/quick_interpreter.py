"""Triton's interpreter with less work for the same results: types and shapes of tensors are made once.

For each operation it makes those of the result, of each operand that is broadcast and of each number, which took it
half of the time. None of them changes once it is made. `dtype.name` names a type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter

language = interpreter.tl
core = language.core
MOST_OPERANDS = 10_000
"""Pairs of operands that are remembered."""


def use() -> None:
    """Have all launches of this process interpreted so."""
    _patch_language_once()
    _compute_no_sum_twice()
    _remember_numpy_types()
    _remember_block_types()
    _remember_shapes()
    _compare_shapes_as_lists()
    _compare_types_by_name()
    _unwrap_constants_alone()
    _pass_arguments_on()
    _remember_operands()
    _shift_bfloat16()


def _patch_language_once() -> None:
    """Replace the functions of Triton's language once a launch, not at every call of a device function."""
    patch, known = interpreter._patch_lang, dict[Callable[..., Any], list[Any]]()

    def patch_once(function: Callable[..., Any]) -> Any:
        if function not in known:
            known[function] = [module for module in (language, core) if module in function.__globals__.values()]
        replaced = all(not core.is_builtin(module.load) for module in known[function])
        return interpreter._LangPatchScope() if replaced else patch(function)

    interpreter._patch_lang = patch_once


def _compute_no_sum_twice() -> None:
    """Leave out the search for overflows, as launches without `debug` do on a card.

    The interpreter computes each sum of integers again in 64 bits. Without `debug` it then drops what it found.
    """
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


def _remember_numpy_types() -> None:
    """Keep the type of numpy's that stands for a type: each look made a table of all of them."""
    find, known = interpreter._get_np_dtype, dict[str, Any]()

    def remembered(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = find(kind)
        return known[name]

    interpreter._get_np_dtype = remembered


def _remember_block_types() -> None:
    """Keep what a type of blocks has, by element and shape, once they have been checked."""
    make, known = core.block_type.__init__, dict[Any, dict[str, Any]]()

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = element_ty.name, *sizes
        if key in known:
            vars(self).update(known[key], element_ty=element_ty)
        else:
            make(self, element_ty, shape)
            known[key] = dict(vars(self))

    core.block_type.__init__ = remembered


def _remember_shapes() -> None:
    """Keep the shape of the tensors of a type, and the number of their elements."""
    make, known = core.tensor.__init__, dict[tuple[int, ...], tuple[Any, Any]]()

    def remembered(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known[sizes]
        else:
            make(self, handle, type)
            known[sizes] = self.shape, self.numel

    core.tensor.__init__ = remembered


def _compare_shapes_as_lists() -> None:
    """Compare shapes of numbers without a copy of each that has types."""
    compare = core.tuple.__eq__

    def compared(self: Any, other: Any) -> Any:
        values = other.values if isinstance(other, core.tuple) else other
        if isinstance(values, list) and all(type(value) is int for value in values):
            return core.constexpr(self.values == values)
        return compare(self, other)

    core.tuple.__eq__ = compared


def _compare_types_by_name() -> None:
    """Compare two plain types before any look at what else a type may be compared with."""
    compare = core.dtype.__eq__

    def compared(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is core.dtype else bool(compare(self, other))

    core.dtype.__eq__ = compared


def _unwrap_constants_alone() -> None:
    """Return tensors and numbers before any look at what constants may be in."""
    unwrap, plain = core._unwrap_if_constexpr, (core.tensor, int, bool, float)

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrapped


def _pass_arguments_on() -> None:
    """Call a function of the language with the arguments of the call, not with a copy of them."""

    def patch(where: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
        # A builtin looks for `_semantic`, and then calls what it wraps.
        function = getattr(member, "__wrapped__", member) if core.is_builtin(member) else member

        def called(*arguments: Any, **named: Any) -> Any:
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        scope.set_attr(where, name, called)

    interpreter._patch_attr = patch


def _remember_operands() -> None:
    """Keep the types that operands of two types get, and the tensors of numbers. To broadcast is left to numpy."""
    semantic, known = interpreter.interpreter_semantic, dict[Any, Any]()
    check, numbers = semantic.binary_op_type_checking_impl, (int, float, bool)

    def kind(operand: Any) -> Any:
        if type(operand) is core.tensor:
            return operand.type.name
        return (type(operand), operand) if type(operand) in numbers else None

    def remembered(lhs: Any, rhs: Any, *options: Any) -> tuple[Any, Any]:
        key = kind(lhs), kind(rhs), options
        if key[0] is None or key[1] is None:
            return check(lhs, rhs, *options)  # type: ignore[no-any-return]
        if key not in known:
            if len(known) > MOST_OPERANDS:
                known.clear()
            known[key] = [_plan(semantic, *pair) for pair in zip((lhs, rhs), check(lhs, rhs, *options), strict=True)]
        left, right = known[key]
        return left(lhs), right(rhs)

    semantic.binary_op_type_checking_impl = remembered


def _plan(semantic: Any, operand: Any, checked: Any) -> Callable[[Any], Any]:
    """Return what makes an operand the `checked` one; its elements stay as few as they are."""
    if operand is checked:
        return lambda operand: operand
    kind, scalar = checked.type, checked.type.scalar
    if type(operand) is not core.tensor:
        number = core.tensor(semantic.scalar_constant(operand, scalar).handle, kind)
        return lambda _: number
    if operand.type.scalar == scalar:
        return lambda operand: core.tensor(operand.handle, kind)
    return lambda operand: core.tensor(semantic.cast(operand, scalar).handle, kind)


def _shift_bfloat16() -> None:
    """Make bfloat16 of float32 and the other way round by a shift of 16 bits. The interpreter takes floats to pieces.

    Subnormal numbers keep their value, as on a card; the interpreter spoils them.
    """
    handle, cast = interpreter.TensorHandle, interpreter.InterpreterBuilder.cast_impl

    def shifted(self: Any, source: Any, target: Any) -> Any:
        names = source.dtype.scalar.name, target.scalar.name
        if names == ("bf16", "fp32"):
            return handle((source.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32), target.scalar)
        if names == ("fp32", "bf16"):
            return handle((source.data.view(np.uint32) >> 16).astype(np.uint16), target.scalar)
        return cast(self, source, target)

    interpreter.InterpreterBuilder.cast_impl = shifted
