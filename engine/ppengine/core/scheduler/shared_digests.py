"""Digests of prompts that begin as an earlier one: they are taken over, since hashing takes most of a start's time."""

from __future__ import annotations

from ppengine.core.scheduler.request import Request
from ppengine.protocol.token_ids import TokenIds

KEPT_MOST = 64
"""Prompts whose digests are known, one for each salt and first block."""


class SharedDigests:
    """The newest prompt for each salt and first block, with its digests."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._known: dict[bytes, tuple[TokenIds, list[bytes]]] = {}
        """By the digest of the salt and the bytes of the first block, the oldest entry first."""

    def take(self, request: Request) -> None:
        """Give a request without digests those of its shared prefix; note its prompt for later ones."""
        prompt = request.prompt_ids
        if request.digests or len(prompt) < self._size:
            return
        first = request.digest_root + prompt[: self._size].tobytes()
        known = self._known.pop(first, None)
        if known is not None:
            request.digests = known[1][: self._shared(prompt, *known)]
        elif len(self._known) >= KEPT_MOST:
            del self._known[next(iter(self._known))]
        self._known[first] = prompt, request.digests

    def _shared(self, prompt: TokenIds, other: TokenIds, digests: list[bytes]) -> int:
        """Return the number of leading blocks that two prompts have in common, of those with a digest."""
        size = self._size
        low, high = 0, min(len(prompt) // size, len(other) // size, len(digests))
        if prompt[: high * size] == other[: high * size]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if prompt[low * size : middle * size] == other[low * size : middle * size]:
                low = middle
            else:
                high = middle
        return low
