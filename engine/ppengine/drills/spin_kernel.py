"""A kernel that does not end until a word in host memory says so."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ppengine.stage.backends.cuda.streams import Stream

MOST_NS = 120 * 10**9
"""It ends by itself then: nobody may be left to tell it."""


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
    told = tl.load(word, volatile=True)
    while (told == 0) & (globaltimer() - begun < most_ns):
        told = tl.load(word, volatile=True)
