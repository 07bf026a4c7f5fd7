"""A kernel that runs until a word in host memory ends it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ppengine.stage.backends.cuda.streams import Stream

MOST_NS = 120 * 10**9
"""Nanoseconds after which it ends by itself: its host process may be gone."""


class Spinner:
    """One such kernel, compiled. `end` may be called in any thread."""

    def __init__(self, device: torch.device) -> None:
        self._word = torch.ones(1, dtype=torch.int32, pin_memory=True)
        stream = Stream("compiles", device)
        self.launch(stream)
        stream.synchronize()
        self._word.zero_()

    def launch(self, stream: Stream) -> None:
        """Put it on `stream`."""
        with stream.use():
            _spin[(1,)](self._word, MOST_NS)

    def end(self) -> None:
        """Let it end."""
        self._word.fill_(1)


@triton.jit
def _spin(word: tl.tensor, most_ns: tl.tensor) -> None:
    begun = globaltimer()
    ended = tl.load(word, volatile=True)
    while (ended == 0) & (globaltimer() - begun < most_ns):
        ended = tl.load(word, volatile=True)
