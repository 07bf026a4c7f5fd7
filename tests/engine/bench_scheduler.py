"""Time of schedule() and retire() at full batches: `python tests/engine/bench_scheduler.py`."""

from __future__ import annotations

import gc
import statistics
import time

from ppengine.common.profile_sections import SchedulerConfig
from ppengine.core.scheduler import Scheduler
from ppengine.core.scheduler.request import Request
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.steps import Sampled


def build(stages, waiting, *, running, ahead, by_blocks):
    """Return a scheduler where `running` requests will run and `waiting` more wait for a place, or for blocks."""
    # By blocks: one block of 128 tokens each, and none left for the first in line.
    size, blocks = (128, running + 3) if by_blocks else (16, 60_000)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=2 * running if by_blocks else running, max_num_batched_tokens=2048, schedule_ahead=ahead
        ),
        stages=stages, block_size=size, max_model_len=8192, num_blocks=blocks, num_host_blocks=0,
        eos_token_ids=frozenset([2]),
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=8000)
    for index in range(running + waiting):
        prompt = [index % 1000 + 5, *range(10, 41)]
        scheduler.admit([Request(id=f"r{index}", prompt_ids=prompt, sampling=sampling, seed=1)])
    return scheduler


def measure(stages, waiting, *, running=256, ahead=False, by_blocks=False):
    """Return median microseconds of one schedule() and one retire() with `running` decodes."""
    scheduler = build(stages, waiting, running=running, ahead=ahead, by_blocks=by_blocks)
    # With one block each there is room for 96 decodes; the prefills take some of the steps.
    steps, skipped = (80 * stages, 10 * stages) if by_blocks else (1500, 500)
    sent, schedules, retires = [], [], []
    gc.disable()
    for count in range(steps):
        while True:
            begin = time.perf_counter()
            step = scheduler.schedule()
            end = time.perf_counter()
            if step is None:
                break
            sent.append(step)
            if count > skipped:
                schedules.append(end - begin)
        step = sent.pop(0)
        sampled = [Sampled(row.slot, 7) for row in step.rows if row.sample]
        begin = time.perf_counter()
        scheduler.retire(step.number, sampled)
        if count > skipped:
            retires.append(time.perf_counter() - begin)
    gc.enable()
    found, preempted = scheduler.queues.counts().running, scheduler.fences.preemptions_total
    if found != running or preempted:
        raise SystemExit(f"{found} run and {preempted} were preempted")
    return statistics.median(schedules) * 1e6, statistics.median(retires) * 1e6


def main() -> None:
    """Print the table and the ratios."""
    print("limit   stages ahead  schedule us (0 waiting)  (10,000 waiting)  ratio  retire us")
    for by_blocks in (False, True):
        for stages, ahead in ((1, False), (2, False), (4, False), (1, True), (4, True)):
            # Alternate, so that a change of the machine's clock meets both.
            pairs = [
                [measure(stages, waiting, ahead=ahead, by_blocks=by_blocks) for waiting in (0, 10_000)]
                for _ in range(3)
            ]
            none, many = (min(pair[index][0] for pair in pairs) for index in (0, 1))
            retire = min(pair[0][1] for pair in pairs)
            limit = "blocks" if by_blocks else "places"
            print(f"{limit} {stages:7d} {ahead!s:5s} {none:24.1f} {many:17.1f} {many / none:6.2f} {retire:10.1f}")


if __name__ == "__main__":
    main()
