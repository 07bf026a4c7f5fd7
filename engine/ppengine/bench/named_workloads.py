"""The workloads of docs/performance.md by name: the same requests each time, so that anyone repeats a figure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from ppengine.bench.workload import GREEDY, Job, Sampling


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with prompts of uniform length `low` to `high`, behind a shared prefix."""

    requests: int
    low: int
    high: int
    output: int
    prefix: int = 0
    sampling: Sampling = GREEDY

    def scaled(self, factor: float) -> Workload:
        """Return it with all counts and lengths times `factor`, at least 1."""

        def least(count: int) -> int:
            return max(1, round(count * factor))

        prefix = least(self.prefix) if self.prefix else 0
        return Workload(
            least(self.requests), least(self.low), least(self.high), least(self.output), prefix, self.sampling
        )

    def jobs(self, vocab: int, number: int) -> list[Job]:
        """Return round `number`: the lengths are those of every round, the ids are its own."""
        lengths, ids = random.Random(f"lengths {self}"), random.Random(f"ids {number} {self}")
        prefix = [ids.randrange(4, vocab) for _ in range(self.prefix)]
        return [
            Job(
                prefix + [ids.randrange(4, vocab) for _ in range(lengths.randint(self.low, self.high))],
                self.output,
                self.sampling,
            )
            for _ in range(self.requests)
        ]


WORKLOADS = {
    "offline": Workload(512, 64, 512, 256),
    "single": Workload(1, 128, 128, 256),
    "single-long": Workload(1, 12_000, 12_000, 256),
    "sixteen": Workload(16, 64, 512, 256),
    "long-prompts": Workload(48, 4_000, 14_000, 128),
    "sampled": Workload(256, 64, 512, 256, sampling=Sampling(0.8, 0.95, 50)),
    "prefix": Workload(256, 16, 128, 64, prefix=1_500),
}
