"""Time of schedule() and retire() at full batches: `python tests/engine/bench_scheduler.py`."""

from __future__ import annotations

import gc
import statistics
import time

from ppengine.config import SchedulerConfig
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.steps import Sampled
from ppengine.request import Request
from ppengine.scheduler import Scheduler


def measure(stages, waiting, *, running=256, steps=1500, ahead=False):
    """Return median microseconds of one schedule() and one retire() with `running` decodes."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=2048, schedule_ahead=ahead),
        stages=stages, block_size=16, max_model_len=8192, num_blocks=60_000, num_host_blocks=0,
        eos_token_ids=frozenset([2]),
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=8000)
    for index in range(running + waiting):
        prompt = [index % 1000 + 5, *range(10, 41)]
        scheduler.add([Request(id=f"r{index}", prompt_ids=prompt, sampling=sampling, seed=1)])
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
            if count > steps // 3:
                schedules.append(end - begin)
        step = sent.pop(0)
        sampled = [Sampled(row.slot, 7) for row in step.rows if row.sample]
        begin = time.perf_counter()
        scheduler.retire(step.number, sampled)
        if count > steps // 3:
            retires.append(time.perf_counter() - begin)
    gc.enable()
    return statistics.median(schedules) * 1e6, statistics.median(retires) * 1e6


def main() -> None:
    """Print the table and the ratios."""
    print("stages ahead  schedule us (0 waiting)  (10,000 waiting)  ratio   retire us")
    for stages, ahead in ((1, False), (2, False), (4, False), (1, True), (4, True)):
        # Alternate, so that a change of the machine's clock meets both.
        pairs = [(measure(stages, 0, ahead=ahead), measure(stages, 10_000, ahead=ahead)) for _ in range(3)]
        none = min(pair[0][0] for pair in pairs)
        many = min(pair[1][0] for pair in pairs)
        retire = min(pair[0][1] for pair in pairs)
        print(f"{stages:6d} {ahead!s:5s} {none:24.1f} {many:17.1f} {many / none:6.2f} {retire:11.1f}")


if __name__ == "__main__":
    main()
