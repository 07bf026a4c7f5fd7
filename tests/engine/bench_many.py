"""CPU time of the turns of one abort of 1,000 waiting requests: `python tests/engine/bench_many.py`."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable

from core_world import CoreWorld
from ppengine.protocol.control import Command
from ppengine.protocol.verbs import MANY_MOST, Abort, Many

ROUNDS = 7


def turns() -> list[float]:
    """Return the CPU milliseconds of each turn until all are aborted."""
    world = CoreWorld(stages=1, max_num_seqs=4)
    for number in range(MANY_MOST):
        world.submit([1, 2, 3, 4], name=f"r{number}", max_tokens=8)
    world.engine.advance()
    command = Command(
        id="many", epoch="epoch", verb=Many(verbs=[Abort(request=f"r{each}") for each in range(MANY_MOST)]), by="eve"
    )
    gc.collect()
    found = [_cpu_ms(lambda: world.engine.commands.handle(b"c", command))]
    while world.engine.unfinished:
        found.append(_cpu_ms(world.engine.advance))
    return found


def _cpu_ms(turn: Callable[[], None]) -> float:
    begun = time.process_time_ns()
    turn()
    return (time.process_time_ns() - begun) / 1e6


def main() -> None:
    """Print the longest turn and the sum of each round, and their medians."""
    rounds = [turns() for _ in range(ROUNDS)]
    longest, sums = [max(each) for each in rounds], [sum(each) for each in rounds]
    for turn, total, each in zip(longest, sums, rounds, strict=True):
        print(f"longest turn {turn:5.1f} ms, {len(each)} turns, {total:5.1f} ms in all")
    print(f"median: longest {statistics.median(longest):.1f} ms, in all {statistics.median(sums):.1f} ms")


if __name__ == "__main__":
    main()
