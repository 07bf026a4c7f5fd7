"""The key of one stage process."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """A stage of the pipeline and the tensor rank in it."""

    stage: int
    rank: int

    @property
    def log_name(self) -> str:
        """Name of its log file: `stage1.log`, of other ranks than 0 `stage1.2.log`."""
        return f"stage{self.stage}.log" if not self.rank else f"stage{self.stage}.{self.rank}.log"

    @property
    def store_role(self) -> str:
        """Role of its store process, and its routing id: `store1`, of other ranks than 0 `store1.2`."""
        return f"store{self.stage}" if not self.rank else f"store{self.stage}.{self.rank}"
