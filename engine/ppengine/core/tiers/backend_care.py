"""The care of a backend: `store test` and `store clear`, which all stores carry out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ppengine.common.sizes import size_text
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.tiers.backends import Backend
from ppengine.core.tiers.jobs import Job
from ppengine.core.tiers.open_pools import FIRST
from ppengine.core.tiers.store_desk import StoreDesk
from ppengine.protocol.place import Place
from ppengine.protocol.store_messages import Clear, Done, Test

CARE_S = 15 * 60.0
"""Most seconds for a `clear`."""
TEST_CALLS = 8
"""Calls of a test, each of which may take the time of a call."""


@dataclass(eq=False)
class BackendCare:
    """Plans the two verbs and asks the stores."""

    _desk: StoreDesk
    _operations: Operations
    _clock: Callable[[], float]

    def plan_test(self, backend: Backend) -> Plan:
        """Return the plan of a test. Raises CommandError."""
        name, places = backend.name, self._answering()
        line = f"write, read, compare and delete one object in {name}, from {len(places)} places"

        def begin(operation: Operation) -> None:
            seconds = TEST_CALLS * backend.config.timeout_ms / 1e3 + 1
            end = partial(self._cared, operation, list(places), "")
            job = self._desk.jobs.open(places, seconds, end, backend=name, for_operator=True)
            for place in places:
                self._desk.send(place, Test(job.number, name))

        return Plan([line], begin, target=name)

    def plan_clear(self, backend: Backend) -> Plan:
        """Return the plan of a clear. Raises CommandError."""
        name, places = backend.name, self._answering()
        used = self._desk.links.used_bytes(name)
        holds = "" if used is None else f"; it holds {size_text(used)}"
        lines = [f"delete all chunks of this model from {name}{holds}"]
        if backend.config.kind != "memory":
            lines.append("other engines with this model that share it lose them, too; chunks of other models stay")

        def begin(operation: Operation) -> None:
            self._desk.forget_chunks(name)
            others = [place for place in places if place != FIRST]
            # Markers first: no chunk is there in part.
            end = partial(self._cleared_first, operation, others, name)
            first = self._desk.jobs.open([FIRST], CARE_S, end, backend=name, for_operator=True)
            self._desk.send(FIRST, Clear(first.number, name))

        return Plan(lines, begin, target=name)

    def _cleared_first(self, operation: Operation, others: list[Place], name: str, job: Job) -> None:
        self._desk.forget_chunks(name)
        answer = job.answers.get(FIRST)
        if not others or not isinstance(answer, Done) or answer.error:
            self._cared(operation, [FIRST], "", job)
            return
        done = f"{self._names([FIRST])}: {answer.text}; " if answer.text else ""
        end = partial(self._cared, operation, others, done)
        second = self._desk.jobs.open(others, CARE_S, end, backend=name, for_operator=True)
        for place in others:
            self._desk.send(place, Clear(second.number, name))

    def _answering(self) -> list[Place]:
        """Return all places. Raises CommandError unless their stores answer."""
        now = self._clock()
        silent = next((store for store in self._desk.links.records.values() if not store.answers(now)), None)
        if silent is not None:
            raise CommandError("BUSY", f"{silent.name} does not answer; try again when it does")
        return list(self._desk.links.records)

    def _cared(self, operation: Operation, places: list[Place], done: str, job: Job) -> None:
        """End the operation of a test or a clear with the answers of all places."""
        by_text: dict[str, list[Place]] = {}
        failed = bool(job.why)
        for place in places:
            answer = job.answers.get(place)
            if isinstance(answer, Done):
                failed = failed or bool(answer.error)
                text = answer.error or answer.text or "done"
            else:
                text = job.why or "no answer"
            by_text.setdefault(text, []).append(place)
        text = "; ".join(f"{self._names(found)}: {text}" for text, found in by_text.items())
        self._operations.end(operation, "failed" if failed else "applied", done + text)

    def _names(self, places: list[Place]) -> str:
        """Return `stage 0`, or `stages 0.0, 0.1 and 1.0` with their ranks."""
        ranked = any(place.rank for place in self._desk.links.records)
        *others, last = [f"{place.stage}.{place.rank}" if ranked else f"{place.stage}" for place in places]
        return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"
