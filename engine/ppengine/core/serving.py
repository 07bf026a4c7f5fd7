"""The parts of the core that exist only once all stages have met for the first time."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.core.memory_controller import MemoryController
from ppengine.core.scheduler import Scheduler


class Serving(NamedTuple):
    """The scheduler and the controller of its memory."""

    scheduler: Scheduler
    memory: MemoryController
