"""The requests that have not ended, from admission to the last token."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain, repeat

import msgspec

from ppengine.common.profile_sections import SloConfig
from ppengine.core.events import Events
from ppengine.core.health import Health
from ppengine.core.journal_writer import JournalWriter
from ppengine.core.latencies import Latencies
from ppengine.core.outputs import OutputHub
from ppengine.core.request_details import ending_of
from ppengine.core.request_metrics import RequestMetrics
from ppengine.core.scheduler import ActionResult, Retirement
from ppengine.core.scheduler.request import Request
from ppengine.core.serving import Serving
from ppengine.protocol.finished import FINISHED_MOST, FinishedInfo
from ppengine.protocol.inspection import FinishedDetail

SLICE = 128
"""Requests that a verb on many changes in one turn: some 8 ms, so that steps and messages need not wait for all."""


@dataclass(slots=True)
class _Aborts:
    """Requests that are left to abort."""

    left: deque[Request]
    by: str
    done: Callable[[], None]
    """Called once none is left."""


@dataclass(eq=False)
class LiveRequests:
    """Keeps the requests of the scheduler and their outputs in step."""

    _health: Health
    _outputs: OutputHub
    _event: Events
    _journal: JournalWriter
    metrics: RequestMetrics
    _slo: SloConfig
    _clock: Callable[[], float]
    _admitted: Callable[[list[Request]], None] = lambda _: None
    """Called with the samples of a prompt that was queued, before a step can begin them."""
    prompt_tokens_total: int = field(init=False, default=0)
    output_tokens_total: int = field(init=False, default=0)
    latencies: Latencies = field(init=False)
    _finished: deque[tuple[float, FinishedInfo]] = field(
        init=False, default_factory=lambda: deque(maxlen=FINISHED_MOST)
    )  # fmt: skip
    """Requests that have ended, the oldest first, with the time of the clock."""
    _aborts: deque[_Aborts] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.latencies = Latencies(self._clock, self.metrics, self._slo)

    def admit(self, serving: Serving, requests: list[Request], session: str) -> None:
        """Queue the samples of one prompt and open their output. Raises DoesNotFit."""
        leader = requests[0]
        serving.scheduler.admit(requests)
        self._outputs.open(leader.group, session, leader.prompt_ids, leader.sampling, leader.arrival)
        self._journal.entered(requests, session)
        self._admitted(requests)

    def abort(self, serving: Serving, request: Request, by: str = "") -> ActionResult:
        """End a request; its output ends here if the effect is immediate, otherwise when it retires."""
        effect = serving.scheduler.actions.abort(request.id, by=by)
        if effect.state == "applied":
            self.ended(request)
        return effect

    def abort_many(self, names: list[str]) -> None:
        """Abort requests of an offline session; unknown ones have ended already."""
        found = (request for name in names for request in self.members(name))
        self.abort_each(found, "", lambda: None)

    def abort_all(self, by: str, done: Callable[[], None]) -> None:
        """Abort every present request that is not ending already, and call `done` after the last."""
        self.abort_each(self.live(), by, done)

    def abort_each(self, requests: Iterable[Request], by: str, done: Callable[[], None]) -> None:
        """Abort those of `requests` that are not ending already, and call `done` after the last."""
        self._aborts.append(_Aborts(deque(requests), by, done))
        if len(self._aborts) == 1:
            self.go_on()

    @property
    def aborting(self) -> bool:
        """Whether requests are left to abort in later turns."""
        return bool(self._aborts)

    def go_on(self) -> None:
        """Abort the next slice of those that are left."""
        budget = SLICE
        while self._aborts and budget:
            aborts = self._aborts[0]
            while aborts.left and budget:
                request, budget = aborts.left.popleft(), budget - 1
                if not request.finished and (request.fence is None or not request.fence.final):
                    self.abort(self._health.require(), request, aborts.by)
            if not aborts.left:
                self._aborts.popleft()
                aborts.done()

    def end_samples(self, samples: Iterable[tuple[str, int]], numbers: Iterable[int] = ()) -> None:
        """End continuations whose reader has found a stop text in them. Those that have ended stay as they are.

        `numbers`: of the requests, if others may have their names by now.
        """
        for (name, index), number in zip(samples, chain(numbers, repeat(None)), strict=False):
            output = self._outputs.get(name)
            if number is not None and output is not None and output.number != number:
                continue
            for request in self.members(name):
                if request.sample == index and (request.fence is None or not request.fence.final):
                    self._health.require().scheduler.retirement.finish(request.id, "stop")
                    self.ended(request)

    def retired(self, serving: Serving, retirement: Retirement) -> None:
        """Hand the tokens of a retired step to the outputs, and end the requests that are complete."""
        self.prompt_tokens_total += retirement.prompt_tokens
        self.latencies.retired(retirement)
        self._journal.tokens(retirement, serving.scheduler.steps.number, self._clock())
        self.output_tokens_total += len(retirement.tokens)
        self._outputs.push(retirement.tokens)
        for request in retirement.finished:
            self.ended(request)

    def forced(self, tokens: Retirement) -> None:
        """Hand out tokens that grammars force."""
        self.retired(self._health.require(), tokens)

    def ended(self, request: Request) -> None:
        """Close the output of a request that has ended."""
        reason, now = request.finish_reason or "abort", self._clock()
        ending = ending_of(request, now)
        self._outputs.finish(request.group, request.sample, reason, ending)
        self._finished.append((now, ending.info))
        self.metrics.ended(request, reason, now)
        self.latencies.ended(request, reason, now)
        self._journal.ended(request)
        self._event.finished(ending.info)

    def lose_all(self, why: str) -> int:
        """End every request as lost: `why` in one line. Return their number. No step may be in flight."""
        live, serving = self.live(), self._health.serving
        for request in live:
            assert serving is not None, "a live request is in the scheduler"
            serving.scheduler.retirement.finish(request.id, "lost")
            request.loss = why
            self.ended(request)
        return len(live)

    def restore_totals(self, prompt_tokens: int, output_tokens: int) -> None:
        """Go on with the totals of the core before this one."""
        self.prompt_tokens_total, self.output_tokens_total = prompt_tokens, output_tokens

    def restore_finished(self, infos: Iterable[FinishedInfo]) -> None:
        """Go on with the list of the core before this one."""
        ago, now = time.time(), self._clock()
        # The wall clock may have been set back since.
        self._finished.extend((now - max(0.0, ago - info.wall), info) for info in infos)

    def finished(self) -> FinishedDetail:
        """Return the requests that have ended, the newest first."""
        now = self._clock()
        return FinishedDetail(
            requests=[msgspec.structs.replace(info, ended_s=now - at) for at, info in reversed(self._finished)]
        )  # fmt: skip

    def members(self, name: str) -> list[Request]:
        """Return the live samples of a request, or the one sample with this name."""
        serving = self._health.serving
        if serving is None:
            return []
        output, requests = self._outputs.get(name), serving.scheduler.queues.requests
        if output is None or output.sampling.n == 1:
            one = requests.get(name)
            lives = one is not None and not one.finished and (output is None or one.group == name)
            return [one] if one is not None and lives else []
        names = [name, *(f"{name}.{index}" for index in range(1, output.sampling.n))]
        found = (requests.get(one) for one in names)
        # A later prompt may have the name of an ended sample.
        return [each for each in found if each is not None and not each.finished and each.group == name]

    def live(self) -> list[Request]:
        """Return the requests that have not ended, in order of arrival."""
        serving = self._health.serving
        if serving is None:
            return []
        return [request for request in serving.scheduler.queues.requests.values() if not request.finished]

    def gone_text(self, name: str) -> str:
        """Return the known end of a request that is not live."""
        output = self._outputs.get(name)
        if output is None:
            return f"no request {name}"
        reason = output.samples[0].finish_reason or "aborted"
        return f"request {name} has finished ({reason}, {len(output.samples[0].tokens)} tokens)"
