"""Jobs: numbered questions to stores, each with a deadline and one end.

A job ends when all stores have answered, at its deadline, or with the first store that is lost. It is *settled* once no
store can write into its slots any more: all have answered, or their processes are dead. Between both its slots are in
quarantine.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import Done, Fetched, Found, Stored

Answer = Found | Fetched | Stored | Done


@dataclass(eq=False, slots=True)
class Job:
    """A question to the stores of some places."""

    number: int
    backend: str
    """Backend that it is about; empty: none."""
    began: float
    """Time at which it was sent, in seconds of the clock."""
    deadline: float
    owed: set[Place]
    """Places whose stores have not answered."""
    end: Callable[[Job], None]
    """Takes the job when it ends, once."""
    settle: Callable[[Job], None]
    """Takes the job when it is settled, once, after its end."""
    slots: int = 0
    """Host slots that the stores may write."""
    for_operator: bool = False
    """Whether an operator asked for it: it may take minutes, and no request waits for it."""
    answers: dict[Place, Answer] = field(default_factory=dict)
    why: str = ""
    """Why it ended without all answers, in one line; empty: it has them."""
    ended: bool = False


def _nothing(job: Job) -> None:
    """Do nothing at the settlement of a job that no store writes for."""


class Jobs:
    """All jobs that are not settled."""

    def __init__(self, cancel: Callable[[Place, int], None], clock: Callable[[], float], first: int = 1) -> None:
        """`cancel` sends the number of a job to a store that owes an answer. `first`: the first number."""
        self._cancel = cancel
        self._clock = clock
        self._number = first
        self._jobs: dict[int, Job] = {}
        """Jobs that are not settled, the oldest first."""
        self._deadlines: list[tuple[float, int]] = []
        """Heap of deadlines and numbers; some are of jobs that have ended."""

    def open(
        self, places: Iterable[Place], seconds: float, end: Callable[[Job], None],
        settle: Callable[[Job], None] = _nothing, *, backend: str = "", slots: int = 0, for_operator: bool = False,
    ) -> Job:  # fmt: skip
        """Return a job that the caller sends to the stores of `places`, with a deadline in `seconds`."""
        now = self._clock()
        job = Job(self._number, backend, now, now + seconds, set(places), end, settle, slots, for_operator)
        self._number += 1
        self._jobs[job.number] = job
        heapq.heappush(self._deadlines, (job.deadline, job.number))
        return job

    def take(self, place: Place, answer: Answer) -> bool:
        """Take an answer; return False for one that is not owed, which changes nothing."""
        job = self._jobs.get(answer.job)
        if job is None or place not in job.owed:
            return False
        job.owed.discard(place)
        job.answers[place] = answer
        if not job.owed:
            self._end(job, "")
            self._settle(job)
        return True

    def lose(self, place: Place, why: str) -> None:
        """Note that the process of a store is dead: it owes nothing any more, and its jobs have failed."""
        for job in [job for job in self._jobs.values() if place in job.owed]:
            job.owed.discard(place)
            self._end(job, why)
            if not job.owed:
                self._settle(job)

    def cancel(self, job: Job, why: str) -> None:
        """End a job now; stores that owe an answer get a `Cancel`."""
        if not job.ended:
            self._end(job, why)

    def advance(self) -> None:
        """End the jobs that are past their deadline."""
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            job = self._jobs.get(number)
            if job is not None and not job.ended:
                self._end(job, f"no answer within {(job.deadline - job.began) * 1e3:.0f} ms")

    @property
    def next_deadline(self) -> float | None:
        """The first deadline, perhaps of a job that has ended; None without one."""
        return self._deadlines[0][0] if self._deadlines else None

    def owing(self, place: Place) -> tuple[int, float | None]:
        """Return how many answers a store owes, and the time of the oldest question of the engine's own."""
        owed = [job for job in self._jobs.values() if place in job.owed]
        return len(owed), min((job.began for job in owed if not job.for_operator), default=None)

    def about(self, backend: str) -> int:
        """Return the number of jobs about a backend that are not settled."""
        return sum(1 for job in self._jobs.values() if job.backend == backend)

    @property
    def quarantined(self) -> int:
        """Slots of jobs that have ended and are not settled."""
        return sum(job.slots for job in self._jobs.values() if job.ended)

    def __iter__(self) -> Iterator[Job]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def _end(self, job: Job, why: str) -> None:
        if job.ended:
            return
        job.ended, job.why = True, why
        for place in sorted(job.owed):
            self._cancel(place, job.number)
        job.end(job)

    def _settle(self, job: Job) -> None:
        del self._jobs[job.number]
        job.settle(job)
