"""Objects and their sizes in the order of their last use. It is no backend; backends with a quota use it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice


class LruIndex:
    """Keys, the least recently used first. The owner holds a lock."""

    def __init__(self) -> None:
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    @property
    def keys(self) -> list[str]:
        """All keys, the least recently used first."""
        return list(self._sizes)

    def put(self, key: str, size: int) -> None:
        """Enter an object as the most recently used."""
        self.remove(key)
        self._sizes[key] = size
        self.used_bytes += size

    def touch(self, key: str) -> None:
        """Note a use; unknown keys are fine."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: str) -> int:
        """Forget an object, and return its size; 0 for an unknown one."""
        size = self._sizes.pop(key, 0)
        self.used_bytes -= size
        return size

    def replace(self, found: Iterable[tuple[str, int]]) -> None:
        """Forget all, and enter `found`, which is in the order of use."""
        self._sizes = OrderedDict(found)
        self.used_bytes = sum(self._sizes.values())

    def below(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`."""
        return [key for key in self._sizes if key.startswith(prefix)]

    def oldest(self, need: int, quota: int, most: int | None = None) -> list[str]:
        """Return the keys whose removal makes room for `need` bytes within `quota`; at most the first `most`."""
        chosen: list[str] = []
        over = self.used_bytes + need - quota
        for key, size in islice(self._sizes.items(), most):
            if over <= 0:
                break
            chosen.append(key)
            over -= size
        return chosen
