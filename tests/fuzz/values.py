"""Random values of any message type, so that most inputs pass the first checks of a decoder."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

import msgspec
from msgspec import inspect

DEPTH_MOST = 6
NUMBERS = [0, 1, -1, 2, 127, 128, 255, 65_535, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1]
FLOATS = [0.0, -0.0, 0.5, 1.0, -1.0, 1e-308, 1e308, float("inf"), float("-inf"), float("nan")]
TEXTS = ["a", "b", "c", "r-1234"]
"""Few, so that commands meet the requests of others."""
ODD_TEXTS = ["", "\x1b[31m", "\0", "\n", "é", "\U0001f600", "x" * 300, "../../etc", "0", "-1", "None"]
ODD = 0.03
"""Share of values that a reader may not expect."""


def value_of(kind: Any, chance: Random) -> Any:
    """Return a value that msgspec encodes as a `kind`; ranges and lengths may be broken."""
    return _value(_info(kind), chance, 0)


@cache
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)  # Its annotations are compiled, which takes milliseconds.


def _value(info: inspect.Type, chance: Random, depth: int) -> Any:
    match info:
        case inspect.UnionType():
            return _value(_chosen(info.types, chance, depth), chance, depth)
        case inspect.StructType():
            return _struct(info, chance, depth)
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [_value(info.item_type, chance, depth + 1) for _ in range(_length(chance, depth))]
        case inspect.TupleType():
            return [_value(each, chance, depth + 1) for each in info.item_types]
        case inspect.DictType():
            pairs = range(_length(chance, depth))
            return {_value(info.key_type, chance, depth + 1): _value(info.value_type, chance, depth + 1) for _ in pairs}
        case _:
            return _scalar(info, chance)


def _scalar(info: inspect.Type, chance: Random) -> Any:
    match info:
        case inspect.BoolType():
            return chance.random() < 0.5
        case inspect.IntType():
            return chance.choice(NUMBERS) if chance.random() < ODD else round(_within(info, chance, 8))
        case inspect.FloatType():
            return chance.choice(FLOATS) if chance.random() < ODD else _within(info, chance, 100)
        case inspect.StrType():
            return chance.choice(ODD_TEXTS if chance.random() < ODD else TEXTS)
        case inspect.BytesType():
            return chance.randbytes(chance.randrange(40))
        case inspect.LiteralType():
            return chance.choice(info.values)
        case inspect.EnumType():
            return chance.choice(list(info.cls)).value
        case inspect.NoneType():
            return None
        case _:  # Any, Raw: a value that a caller may have put there.
            return chance.choice([None, True, 7, "text", [1, [2]], {"a": 1}])


def _within(info: inspect.IntType | inspect.FloatType, chance: Random, most: float) -> float:
    """Return a number in the range of its type, `most` wide where that is open."""
    low = next((bound for bound in (info.ge, info.gt) if bound is not None), 0)
    high = next((bound for bound in (info.le, info.lt) if bound is not None), low + most)
    return low + (high - low) * chance.choice([0.0, 1.0, chance.random(), chance.random()])


def _struct(info: inspect.StructType, chance: Random, depth: int) -> Any:
    """Return a mapping, or a list where the type is written as one, with its tag."""
    fields = [field for field in info.fields if field.required or info.array_like or chance.random() < 0.7]
    values = [_value(field.type, chance, depth + 1) for field in fields]
    if info.array_like:
        return ([info.tag] if info.tag is not None else []) + values
    tagged = {info.tag_field: info.tag} if info.tag_field is not None else {}
    return tagged | {field.encode_name: value for field, value in zip(fields, values, strict=True)}


def _chosen(types: tuple[inspect.Type, ...], chance: Random, depth: int) -> inspect.Type:
    plain = [each for each in types if not isinstance(each, inspect.StructType)]
    return chance.choice(plain if depth >= DEPTH_MOST and plain else list(types))


def _length(chance: Random, depth: int) -> int:
    return 0 if depth >= DEPTH_MOST else chance.choice([0, 1, 1, 2, 3])


def packed(kind: Any, chance: Random) -> bytes:
    """Return the msgpack form of a random `kind`."""
    return msgspec.msgpack.encode(value_of(kind, chance))
