"""The present state of the core as records of its journal, to be read by another core."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ppengine.common.config import EngineConfig
from ppengine.core.answers import Answers
from ppengine.core.client_rules import ClientRules
from ppengine.core.event_feed import EventFeed
from ppengine.core.health import Health
from ppengine.core.journal_records import (
    Added,
    Answered,
    CopyCounts,
    CordonState,
    Entered,
    Noticed,
    Opened,
    Record,
    SampleState,
    Settings,
    StageState,
    StartCounts,
    Stated,
)
from ppengine.core.journal_state import sample_id
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.offline_requests import OfflineRequests
from ppengine.core.operations import Operations
from ppengine.core.output_state import Output
from ppengine.core.outputs import OutputHub
from ppengine.core.recovery import Recovery
from ppengine.core.stage_records import Stages
from ppengine.core.submit_verb import SubmitVerb
from ppengine.core.successor import Successor
from ppengine.core.tiers.store_desk import StoreDesk
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.token_ids import compact

EVENTS_MOST = 2000
"""Events that move to another file; the gateway has older ones for long."""


@dataclass(eq=False)
class LiveState:
    """Reads the parts of the core."""

    _config: EngineConfig
    _health: Health
    _stages: Stages
    _recovery: Recovery
    _requests: LiveRequests
    _outputs: OutputHub
    _checks: Checks
    _operations: Operations
    _answers: Answers
    _offline: OfflineRequests
    _submit: SubmitVerb
    _rules: ClientRules
    _tiers: StoreDesk
    _feed: EventFeed
    _full: bool
    """Whether requests are kept, beyond their ids."""
    _began: float
    """Start of the first core."""
    _successor: Successor | None
    """Has the state of the core before this one, which counts until this one serves."""

    def settings(self) -> Settings:
        """Return everything that is no request, command or event."""
        serving, requests = self._health.serving, self._requests
        before = None if self._successor is None else self._successor.state.settings
        stages = [StageState(record.started, loaded=record.ready is not None) for record in self._stages]
        known = Settings(
            generation=self._recovery.generation, stages=stages,
            utilization=self._config.profile.memory.utilization, revision=0, step=0, paused_by="", paused=False,
            draining=self._health.draining, checks=self._checks.flags, shadow=self._checks.shadow.share,
            cordons=[
                CordonState(record.stage, cordon.by, cordon.reason, cordon.at)
                for record in self._stages
                if (cordon := record.cordon) is not None and not record.place.rank
            ],
            operations=self._operations.count, prompt_tokens=requests.prompt_tokens_total,
            output_tokens=requests.output_tokens_total, preemptions=0, swaps=0, hit_tokens=0, began=self._began,
            rules=self._rules.rules(), tiers=self._tiers.state(),
        )  # fmt: skip
        if serving is not None:
            scheduler, memory = serving
            known.utilization, known.revision = memory.agreed, memory.revision
            known.step, known.paused_by, known.paused = scheduler.steps.number, scheduler.paused_by, scheduler.paused
            known.preemptions, known.swaps = scheduler.fences.preemptions_total, scheduler.fences.swaps_total
            known.hit_tokens = scheduler.blocks.hit_tokens_total
            if (copies := scheduler.blocks.copies) is not None:
                totals = copies.totals
                known.starts = StartCounts(
                    totals.prompt, totals.device, totals.host, totals.computed, dict(totals.backends)
                )
                known.copies = CopyCounts(
                    copies.out_total, copies.in_total, copies.cache.evicted_total, copies.dropped_total
                )
        elif before is not None:
            known.utilization, known.revision = before.utilization, before.revision
            known.step, known.paused_by, known.paused = before.step, before.paused_by, before.paused
            known.checks, known.shadow = before.checks, before.shadow
            known.preemptions, known.swaps, known.hit_tokens = before.preemptions, before.swaps, before.hit_tokens
            known.starts, known.copies = before.starts, before.copies
        return known

    def records(self) -> Iterator[Record]:
        """Yield everything, each record as of the moment at which it is taken."""
        yield self.settings()
        yield from map(Stated, self._feed.facts())
        for number, event in self._feed.kept(EVENTS_MOST):
            yield Noticed(number, event)
        if self._full:
            yield from map(Answered, self._answers.kept())
            for operation in self._operations.live:
                yield Opened(operation.id, operation.client, operation.command)
            for (session, nonce), names in list(self._offline.added.items()):
                yield Added(session, nonce, names)
        if self._successor is not None:
            yield from list(self._successor.state.opened.values())
        attended = {one.request: one for one in self._submit.attended()}
        for output in self._outputs:
            waits = None if self._successor is None else self._successor.state.requests.get(output.request)
            entered = waits or self._entered(output)
            entered.attended = attended.get(output.request, entered.attended)
            yield entered

    def _entered(self, output: Output) -> Entered:
        """Return an output and its live requests as one record."""
        serving = self._health.serving
        live = {} if serving is None else serving.scheduler.queues.requests
        entered = Entered(
            name=output.request, session=output.session, first=output.number,
            prompt_ids=output.prompt_ids if self._full else compact(),
            sampling=output.sampling if self._full else SamplingParams(n=output.sampling.n), seed=0, owner="",
            arrival=0.0, deaths=output.deaths,
        )  # fmt: skip
        for index, sample in enumerate(output.samples):
            state = SampleState()
            if self._full:
                state.tokens, state.logprobs = sample.tokens, list(sample.logprobs)
            request = live.get(sample_id(output.request, index))
            if sample.ending is not None:
                state.finished = sample.ending.info
                state.priority = sample.ending.detail.priority
                entered.owner = sample.ending.info.owner
                entered.arrival = sample.ending.at - sample.ending.info.took_s
                entered.queued = entered.arrival + sample.ending.info.prepare_s
            elif request is not None and request.group == output.request:
                entered.begun = entered.begun or request.slot is not None
                entered.seed, entered.owner, entered.arrival = request.seed, request.owner, request.arrival_time
                entered.principal, entered.client = request.principal, request.client
                entered.queued = request.queued_time
                entered.cache_salt = request.cache_salt if self._full else ""
                state.priority, state.held_by = request.priority, request.held_by
                state.admitted, state.first_token = request.admitted_time, request.first_token_time
            entered.samples.append(state)
        return entered
