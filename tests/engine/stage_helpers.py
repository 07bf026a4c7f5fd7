"""Helpers of the stage tests: polling with a deadline, and the upstream process of the transport tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from forks import fork
from ppengine.common import lifeline
from ppengine.common.child_process import Child
from ppengine.stage.edge import Edge
from ppengine.stage.edge_addresses import FolderBook
from ppengine.stage.meeting import meet
from ppengine.stage.recorder import Recorder
from ppengine.stage.transport import WireSender

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOKENS = (1, 7, 64, 33, 64)
"""Tokens of the steps that the upstream sends in each dtype."""
WIDTH = 48
BIG = (60_000, 50_000, 1, 40_000)
"""Tokens of steps that are too big for what the kernel holds of a connection: 23 MB, 19 MB, 15 MB."""
RETURNS = ([5, 6, 7], [8, 9], [10, 11, 12])


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Poll `condition`; fail the test when it stays false."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.01)


def resident(base: int, length: int, pid: int | str = "self") -> int:
    """Return the Rss in bytes of the mappings of a process that overlap [base, base + length)."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low < base + length and high > base
        elif inside and head == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def hidden_states(step: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """The same on both sides: [tokens, WIDTH]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def start_upstream(folder: Path, mode: str) -> Child:
    """Start the process before ours: `main` of this file."""
    return fork("stage_helpers", [str(folder), mode], folder / "upstream.log")


def make_ring(folder: Path, name: str) -> Recorder:
    """A ring in `folder`."""
    return Recorder(folder / f"{name}.ring", name, 0, 0)


def upstream(folder: Path, mode: str) -> None:
    """Play stage 0: send hidden states, or sampled tokens, until told to die by closing the edge."""
    torch.set_num_threads(1)
    main = make_ring(folder, "main")
    edge = Edge(
        meet(FolderBook(folder, 1), "e0", True, 1, lambda: False), upstream=True, ring=make_ring(folder, "send")
    )
    sender = WireSender(edge, main)
    if mode == "hidden":
        step = 0
        for dtype in DTYPES:
            for tokens in TOKENS:
                step += 1
                sender.put(step, hidden_states(step, tokens, dtype))
    elif mode == "big":
        for step in range(1, len(BIG) + 1):
            sender.put(step, hidden_states(step, BIG[step - 1], torch.float64))
    elif mode == "tokens":
        for step, tokens in enumerate(RETURNS):
            sender.put(step + 1, torch.tensor(tokens))
    elif mode == "silent":
        time.sleep(3600)
    sender.finish(30)


def main() -> None:
    """Entry point of the upstream: folder, mode, and its lifeline."""
    folder, mode, _, line = sys.argv[1:]
    lifeline.adopt(int(line))
    upstream(Path(folder), mode)
