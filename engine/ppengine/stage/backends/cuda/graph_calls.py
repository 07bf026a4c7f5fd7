"""The collectives in the graphs of a stage, which no call of Python launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, cast

from torch import Tensor

from ppengine.models.group import Group
from ppengine.stage.backends.cuda.call_log import Calls, calls_of

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.card_group import CardGroup  # imports kernels: a stage alone needs none of them


class GraphCalls:
    """Calls by the shape of a graph. A stage of one rank has none."""

    def __init__(self, group: Group) -> None:
        self._group = cast("CardGroup", group) if hasattr(group, "calls") else None
        self._captured: dict[Hashable, list[bytes]] = {}
        self._calls: dict[Hashable, Calls] = {}

    def noted(self, shape: Hashable, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return `forward` such that the calls of its last run are those of the graph of `shape`."""
        if self._group is None:
            return forward
        calls = self._captured[shape] = []
        return partial(self._group.calls.capture, forward, calls)

    def replayed(self, shape: Hashable) -> None:
        """Note that the graph of `shape` is about to be replayed."""
        if self._group is None:
            return
        if shape not in self._calls:
            captured = self._captured.pop(shape, [])
            if not captured:
                return
            self._calls[shape] = calls_of(captured)
        self._group.calls.replay(self._group.step, self._calls[shape])
