"""The actor of a place, as the driver sees it: from the call that creates it to the report of its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ppengine.protocol.discovery import process_start
from ppengine.protocol.place import Place
from ppengine.supervisor.launch.ray_nodes import Node


@dataclass(eq=False)
class PlaceActor:
    """The actor of a place, running or starting."""

    place: Place
    generation: int
    handle: Any
    """Ray's handle of it."""
    words_from: int
    """Offset of its own lines in the stage's log."""
    waited_for: Any = None
    """The call that we wait for, an ObjectRef: first its place, then its run. None: it has ended."""
    pid: int = 0
    """0: not known yet."""
    start: int | None = None
    node: Node | None = None
    waits_for_node: bool = False
    """It runs as soon as the actor of its node guards it."""
    ends_at: tuple[float, int] | None = None
    """It has ended: the time to report it, and the number of its node's next look, which may bring last lines."""

    @property
    def lives(self) -> bool:
        """Whether its process is there."""
        if self.node is None or not self.pid:
            return False
        if self.node.here:
            return process_start(self.pid) == self.start is not None
        return not self.node.lost and self.pid not in self.node.gone
