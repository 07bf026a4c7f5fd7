"""A core that follows another one: the state that the journal has goes into the parts of this one.

Outputs, answers and events are there at once. Requests go to the scheduler when the stages have met, as after a lost
stage: each is recomputed from its known tokens, in order of arrival.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.core.answers import Answers
from ppengine.core.events import Events
from ppengine.core.journal_records import Entered, Opened, SampleState, Settings, StageState
from ppengine.core.journal_state import Restored, sample_id
from ppengine.core.live_requests import LiveRequests
from ppengine.core.operations import Operations
from ppengine.core.outputs import OutputHub
from ppengine.core.request_details import restored_ending
from ppengine.core.scheduler import Scheduler
from ppengine.core.scheduler.cache_copies import StartTotals
from ppengine.core.scheduler.request import Request
from ppengine.core.stage_records import PlacedCordon, Stages
from ppengine.core.takeover import Takeover
from ppengine.protocol.reports import Attended
from ppengine.protocol.verbs import RestartStage

MOST_DEATHS = 3
"""Ends of a core, without a token between them, of which a request may be the reason; it is not tried again."""
CURSORS = 2**40
"""Distance between the first cursors of two cores: readers go on with those of the first."""
STEPS = 10_000
"""Numbers of steps that a core may have sent without a record of them."""


@dataclass(eq=False)
class Successor:
    """Restores. `state` is the journal's, and empty once this core serves."""

    state: Restored
    stages: int
    _outputs: OutputHub
    _requests: LiveRequests
    _answers: Answers
    _event: Events
    _clock: Callable[[], float]
    settings: Settings = field(init=False)
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self._clock()
        self.settings = self.state.settings or _unknown(self.stages, self._began)

    # --- at once --------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Restore outputs, answers and the list of ended requests; count one more end for the live requests."""
        self._outputs.restart((self.settings.generation + 1) * CURSORS)
        for replies in self.state.replies.values():
            for reply in replies:
                self._answers.keep(reply)
        self._requests.restore_finished(self.state.finished)
        self._requests.restore_totals(self.settings.prompt_tokens, self.settings.output_tokens)
        self._count_end()
        for entered in sorted(self.state.requests.values(), key=lambda one: one.first):
            self._restore_output(entered)

    def report_losses(self) -> None:
        """End the requests that cannot go on, each with its event."""
        for entered in [one for one in self.state.requests.values() if _lives(one)]:
            if not entered.prompt_ids:
                self._lose(entered, "the engine core was restarted, and its journal is off")
            elif entered.deaths >= MOST_DEATHS:
                ends = f"the engine core ended {entered.deaths} times while it ran"
                self._lose(entered, f"{ends}, without a token between")

    def _count_end(self) -> None:
        """Count the end of the core for the requests that may be its reason."""
        live = [one for one in self.state.requests.values() if _lives(one)]
        begun = [one for one in live if one.begun]
        # One that waits for its turn is no reason, unless the core ends before any has its turn.
        waiting = [] if self.settings.paused_by else [one for one in live if any(map(_waits, one.samples))]
        for one in begun or waiting:
            one.deaths += 1
        for one in live:
            one.begun = False

    def _restore_output(self, entered: Entered) -> None:
        output = self._outputs.restore(entered)
        for index, (sample, known) in enumerate(zip(output.samples, entered.samples, strict=True)):
            if known.finished is not None:
                sample.ending = restored_ending(entered, index, known.finished)

    def _lose(self, entered: Entered, why: str) -> int:
        """End the samples of a submission that have not ended; return their number."""
        del self.state.requests[entered.name]
        self._event("request.lost", f"{entered.name} is lost: {why}", request=entered.name)
        samples = _requests(entered)
        for request in samples:
            request.finish_reason, request.state, request.loss = "lost", "finished", why
            self._requests.ended(request)
        return len(samples)

    def adopt_restarts(self, takeover: Takeover, operations: Operations) -> None:
        """Go on with restarts of stages that the core before this one had begun."""
        for opened in list(self.state.opened.values()):
            verb = opened.command.verb
            if isinstance(verb, RestartStage) and takeover.has_begun(verb.stage, self.settings):
                takeover.adopt(verb.stage, operations.reopen(opened.op, opened.command, opened.client))
                del self.state.opened[opened.command.id]

    def lose_all(self, why: str, operations: Operations) -> int:
        """End every request as lost: the stages do not come. Open commands get operations. Return the number lost."""
        for opened in self.state.opened.values():
            operations.reopen(opened.op, opened.command, opened.client)
        self.state.opened.clear()
        return sum(self._lose(entered, why) for entered in list(self.state.requests.values()) if _lives(entered))

    # --- when the stages have met -----------------------------------------------------------------------------

    def resume(self, scheduler: Scheduler) -> None:
        """Queue the requests that go on, in order of arrival."""
        known = self.settings
        scheduler.steps.go_on_from(self.state.step + STEPS)
        scheduler.steps.revision = known.revision
        if known.paused_by:
            scheduler.pause(known.paused_by, finish=not known.paused)
        scheduler.fences.preemptions_total, scheduler.fences.swaps_total = known.preemptions, known.swaps
        scheduler.blocks.hit_tokens_total = known.hit_tokens
        if known.starts is not None and (copies := scheduler.blocks.copies) is not None:
            # Or device hits, which are the rest of all hits, would jump by those of the other sources.
            one = known.starts
            copies.totals = StartTotals(one.prompt, one.device, one.host, one.computed, Counter(one.backends))
            if (counts := known.copies) is not None:
                copies.out_total, copies.in_total = counts.out, counts.into
                copies.cache.evicted_total, copies.dropped_total = counts.evicted, counts.dropped
        now = self._clock()
        for entered in sorted(self.state.requests.values(), key=lambda one: one.first):
            for request in _requests(entered):
                request.note(now, "the core was restarted: to be recomputed")
                request.begin_phase("restart", self._began, "the core was restarted")
                scheduler.restore(request)
                if len(request.output_ids) >= request.max_tokens:  # The record of its end was damaged.
                    scheduler.retirement.finish(request.id, "length")
                    self._requests.ended(request)
        scheduler.admission.number_from(self.state.next_number)

    def take_opened(self) -> list[Opened]:
        """Return the commands without an end, in the order in which they came. The state is no longer needed."""
        opened, self.state = list(self.state.opened.values()), Restored()
        return opened

    def attended(self) -> list[Attended]:
        """Return the requests that end with their console."""
        return [one.attended for one in self.state.requests.values() if one.attended is not None]

    def place_cordons(self, stages: Stages) -> None:
        """Place the cordons again."""
        for cordon in self.settings.cordons:
            if not stages.unknown(cordon.stage):
                stages.cordon(cordon.stage, PlacedCordon(cordon.by, cordon.reason, cordon.at))


def _lives(entered: Entered) -> bool:
    """Return whether a sample of a submission has not ended."""
    return any(sample.finished is None for sample in entered.samples)


def _waits(sample: SampleState) -> bool:
    """Return whether a sample waits for its turn."""
    return sample.finished is None and not sample.held_by


def _requests(entered: Entered) -> list[Request]:
    """Return the samples of a submission that have not ended. A sample 0 that has ended still is their leader."""
    made: list[Request] = []
    for index, sample in enumerate(entered.samples):
        made.append(
            Request(
                id=sample_id(entered.name, index), prompt_ids=entered.prompt_ids, sampling=entered.sampling,
                seed=entered.seed, owner=entered.owner, principal=entered.principal, client=entered.client,
                sample=index, cache_salt=entered.cache_salt,
                leader=made[0] if made else None,
                arrival_time=entered.arrival, queued_time=entered.queued, arrival=entered.first + index,
                priority=sample.priority,
                output_ids=list(sample.tokens), held_by=sample.held_by, first_token_time=sample.first_token,
                admitted_time=sample.admitted or sample.first_token,
                state="finished" if sample.finished is not None else "waiting",
            )
        )  # fmt: skip
    return [request for request in made if not request.finished]


def _unknown(stages: int, now: float) -> Settings:
    """Return settings for a journal that has none: the generation is above all that the stages can know."""
    return Settings(
        generation=1000, stages=[StageState(1, loaded=False)] * stages, utilization=0.0, revision=0,
        step=0, paused_by="", paused=False, draining=False, checks=0, shadow=0.0, cordons=[], operations=0,
        prompt_tokens=0, output_tokens=0, preemptions=0, swaps=0, hit_tokens=0, began=now,
    )  # fmt: skip
