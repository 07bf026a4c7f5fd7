"""Panels of the main screen: which are hidden by choice, and when the right column yields to WHY."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, get_args

Panel = Literal["stages", "requests", "timeline", "kv-map", "log", "output", "trends"]
PANELS: tuple[Panel, ...] = get_args(Panel)
"""In the order of their keys, `1` and up."""
RESET_KEY = "0"
Choices = Mapping[str, bool]
"""Panels that the operator has shown or hidden; every other one is shown by need."""
BY_NEED: Choices = MappingProxyType({})
_YIELD_S, _RETURN_S = 1.5, 6.0


def key_of(panel: Panel) -> str:
    """Return the key that shows and hides a panel."""
    return str(PANELS.index(panel) + 1)


def known(choices: Mapping[str, bool]) -> Choices:
    """Return the choices of panels that exist: a newer version may have others."""
    return MappingProxyType({panel: choices[panel] for panel in PANELS if panel in choices})


class RightColumn:
    """Decides whether the right column yields.

    Both ways it takes some seconds, so that nothing flickers; in a terminal of another width it is decided at once.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.yields = False
        self._clock = clock
        self._since: float | None = None
        """Time since when the opposite of `yields` is needed."""
        self._width: int | None = None

    def look(self, cut: bool, width: int) -> bool:
        """Take whether a WHY is cut beside the column, and return whether the column yields. `width`: terminal's."""
        now, known, self._width = self._clock(), self._width, width
        if known not in (None, width):
            self.yields, self._since = cut, None
        elif cut == self.yields:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since >= (_RETURN_S if self.yields else _YIELD_S):
            self.yields, self._since = cut, None
        return self.yields
