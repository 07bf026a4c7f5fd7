"""The key of one stage process."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A stage of the pipeline and the tensor rank in it."""

    stage: int
    rank: int
