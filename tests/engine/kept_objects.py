"""Objects that a part of the engine keeps alive."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType


def reachable(root: object, *beyond: object) -> Iterator[object]:
    """Yield everything that `root` refers to, itself and through others; not `beyond`, classes and modules."""
    seen = {id(one) for one in beyond} | {id(vars(module)) for module in list(sys.modules.values())}
    left = [root]
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | ModuleType):
            continue
        seen.add(id(one))
        yield one
        left += gc.get_referents(one)


def lists_of(tokens: list[int], root: object, *beyond: object) -> int:
    """Return how many lists that `root` keeps begin with `tokens`."""
    lists = (one for one in reachable(root, *beyond) if isinstance(one, list))
    return sum(one[: len(tokens)] == tokens for one in lists)
