"""Python's search for garbage in a process that serves: a turn waits for each, and few objects are in cycles."""

from __future__ import annotations

import gc

YOUNG_MOST = 10_000
"""Objects that are made before Python looks for garbage; it has 700. A step of 512 rows makes thousands."""


def settle() -> None:
    """Leave out all objects of now, which stay for good: modules and loaded data. Look at new ones less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_MOST)
