"""The composition root of the core: makes its parts, routes messages to them, and lets them take a turn."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import EngineConfig
from ppengine.core.answers import Answers
from ppengine.core.block_map import BlockMap
from ppengine.core.client_rules import ClientRules
from ppengine.core.constraints import Constraints
from ppengine.core.cordons import Cordons
from ppengine.core.details import Details
from ppengine.core.device_room import RoomBook
from ppengine.core.dispatcher import Dispatcher
from ppengine.core.engine_verbs import EngineVerbs
from ppengine.core.event_feed import EventFeed
from ppengine.core.events import Events
from ppengine.core.grammar_process import GrammarProcess
from ppengine.core.health import Health
from ppengine.core.journal import Journal
from ppengine.core.journal_state import Restored
from ppengine.core.journal_writer import JournalWriter
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.live_state import LiveState
from ppengine.core.many_requests import ManyRequests
from ppengine.core.mask_processes import make_processes
from ppengine.core.metrics_desk import MetricsDesk
from ppengine.core.offline_requests import OfflineRequests
from ppengine.core.operations import Operations
from ppengine.core.outputs import OutputHub
from ppengine.core.recovery import Recovery
from ppengine.core.report import Reporter
from ppengine.core.request_metrics import RequestMetrics
from ppengine.core.request_verbs import RequestVerbs
from ppengine.core.restart_policy import RestartPolicy
from ppengine.core.scheduler import Scheduler
from ppengine.core.serving import Serving
from ppengine.core.shadow_check import Shadow
from ppengine.core.stage_messages import StageMessages
from ppengine.core.stage_records import Stages
from ppengine.core.stage_tracker import StageTracker
from ppengine.core.start_tries import StartTries
from ppengine.core.startup import Startup
from ppengine.core.submission_steps import SubmissionSteps
from ppengine.core.submissions import Submissions
from ppengine.core.submit_verb import SubmitVerb
from ppengine.core.successor import Successor
from ppengine.core.tiers.backend_verbs import BackendVerbs
from ppengine.core.tiers.open_pools import Send
from ppengine.core.tiers.store_desk import StoreDesk
from ppengine.core.tiers.tier_report import TierReport
from ppengine.core.verb_handlers import VerbHandlers
from ppengine.protocol.facts import Fact
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessReport, Recall, Recalled
from ppengine.protocol.snapshot import Event
from ppengine.protocol.stage_lifecycle import EdgeAddress, NewGeneration

_AT_STAKE = "if the core ends now, they are recomputed from an older token, or lost"


class Engine:
    """Owns the parts of the core; the loop owns the sockets and decides when to take a turn."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        *,
        send_step: Callable[[bytes, bytes], None],
        reply: Callable[[bytes, msgspec.Struct], None],
        happened: Callable[[Event], None],
        send_shadow: Callable[[bytes], None],
        send_grammar: Callable[[bytes, bytes], None],
        send_store: Send,
        start_stage: Callable[[Place, int], None],
        notify_stage: Callable[[Place, NewGeneration | EdgeAddress], None],
        note: Callable[[Fact], None],
        store: Journal,
        restored: Restored | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`restored`: the state that a core before this one has left; None: this one is the first."""
        self.config = config
        self._clock = clock
        self.journal = journal = JournalWriter(store, full=config.profile.journal)
        self.feed = EventFeed()
        self._publish, self._push = happened, note
        happened, note = self._happened, self._note
        self.event = event = Events(happened)
        self.stages = stages = Stages(config.layers, config.groups.tensor)
        self.health = health = Health(stages)
        self.tracker = tracker = StageTracker(stages, send_step, clock)
        self.answers = answers = Answers(reply, note=journal.answered)
        self.operations = operations = Operations(answers, happened, clock)
        self.outputs = OutputHub(reply, clock, lambda: health.failure, journal.dropped)
        metrics = RequestMetrics(config.max_model_len)
        looked = partial(metrics.add, "lookup")
        self.tiers = tiers = StoreDesk(config, spec, stages, send_store, event, clock, looked)
        self.requests = requests = LiveRequests(
            health, self.outputs, event, journal, metrics, config.profile.slo, clock, tiers.admitted
        )
        has_tokenizer = not config.profile.model.skip_tokenizer
        submissions = Submissions(spec, config.max_model_len, self.outputs, has_tokenizer=has_tokenizer)
        processes = make_processes(
            partial(GrammarProcess, Path(config.run_dir), spec.vocab_size, send_grammar, clock, event)
        )
        self.constraints = constraints = Constraints(*processes, requests, frozenset(spec.eos_token_ids), clock)
        self.rules = rules = ClientRules(requests, operations, clock)
        self.offline = OfflineRequests(
            health, submissions, constraints, requests, rules, self.outputs, journal, reply
        )  # fmt: skip
        shadow = Shadow(Path(config.run_dir), stages, operations, event, send_shadow, clock)
        self.checks = checks = Checks(config, stages, health, shadow, operations, event, tracker.send, clock)
        self.rooms = RoomBook(clock)
        parallel = config.profile.parallel
        tries = StartTries(parallel.restart_limit_s, clock)
        policy = RestartPolicy(parallel.restart, stages, health, tries, operations, event, note, clock)
        startup = Startup(
            config, spec, stages, tracker, health, operations, event, self.rooms, policy.stay_down, clock
        )  # fmt: skip
        self._successor = successor = None
        if restored is not None:
            self._successor = successor = Successor(
                restored, config.stages, self.outputs, requests, answers, event, clock
            )
        self.recovery = recovery = Recovery(
            config, stages, tracker, health, requests, checks, operations, event, clock,
            start_stage, notify_stage, note, self.commit, policy, tries, startup, successor,
        )  # fmt: skip
        self.stage_messages = StageMessages(
            stages, tracker, recovery, startup, health, checks, event, clock, notify_stage
        )
        cordons = Cordons(stages, health, requests, policy, recovery, operations, clock)
        one = RequestVerbs(health, requests, tracker, operations, journal)
        many = ManyRequests(health, one, operations)
        backends = BackendVerbs(tiers, config.profile.tiers.host, operations, clock)
        whole = EngineVerbs(config.name, health, stages, requests, operations)
        self.submit = submit = SubmitVerb(health, submissions, requests, operations, journal)
        self.verbs = verbs = VerbHandlers(
            health, requests, submit, whole, one, many, recovery, cordons, checks, rules, backends
        )
        steps = SubmissionSteps(constraints, operations)
        self.commands = Dispatcher(config.epoch, health, verbs, steps, operations, answers)
        self.metrics = MetricsDesk(health, stages, tracker, requests, clock)
        self.details = Details(health, stages, requests, self.outputs, checks, BlockMap(clock), clock)
        began = clock() if restored is None or restored.settings is None else restored.settings.began
        self.reporter = Reporter(
            config, stages, tracker, health, requests, operations, checks, rules, TierReport(tiers, clock),
            constraints.masks, clock, began,
        )  # fmt: skip
        self._state = LiveState(
            config, health, stages, self.recovery, requests, self.outputs, checks, operations, answers, self.offline,
            submit, rules, tiers, self.feed, journal.full, began, successor,
        )  # fmt: skip
        if successor is None:
            journal.begin(self._state.records)
        else:
            self._follow(successor)

    # --- messages -------------------------------------------------------------------------------------------

    def on_grammars(self, name: bytes, message: object) -> bool:
        """Take a message of a grammar process; return whether it calls for a turn now.

        Masks that complete a step go at once: a turn may have many tokens to hand out first.
        """
        news, serving = self.constraints.take(name, message), self.health.serving
        if serving is not None and serving.scheduler.masks.any_complete:
            self._send_masks(serving.scheduler)
        return news

    def _send_masks(self, scheduler: Scheduler) -> None:
        for masks in scheduler.masks.complete():
            self.tracker.send_masks(masks)

    def recalled(self, question: Recall, newest: int) -> Recalled:
        """Return the answers to commands, and the requests that end with their console. `newest`: an event's number."""
        replies, unknown = self.answers.of(question.commands)
        attended = self.submit.attended()
        return Recalled(newest=newest, replies=replies, unknown=unknown, attended=attended, pid=os.getpid())

    def on_processes(self, report: ProcessReport) -> None:
        """Note how the processes of stages and stores are, as the supervisor reports."""
        for process in report.processes:
            if process.role == "stage":
                self.stage_messages.on_process(process)
            else:
                self.tiers.on_process(process)

    # --- a core before this one -------------------------------------------------------------------------------

    def _follow(self, successor: Successor) -> None:
        """Take over what a core before this one has left, and begin a generation: all stages meet this core."""
        restored, known = successor.state, successor.settings
        whole = restored.settings is not None and not restored.damage
        self.feed.restore(restored.events, restored.facts, whole=whole)
        self.offline.added.update(restored.added)
        self.operations.restart(known.operations)
        self.submit.restore_attended(successor.attended())
        self.health.draining = known.draining
        self.rules.restore(known.rules)
        self.tiers.restore(known.tiers)
        successor.place_cordons(self.stages)
        successor.restore()
        self.recovery.follow(known, "the engine core was restarted")
        successor.adopt_restarts(self.recovery.takeover, self.operations)
        self.journal.begin(self._state.records)
        successor.report_losses()
        for text in restored.damage:
            self.event("journal.damaged", text)

    def commit(self) -> None:
        """Write the journal: what happened in this turn may be seen outside from now on."""
        for operation in self.operations.take_opened():
            self.journal.opened(operation)
        self.journal.commit(self._state.settings, self._state.records, self._clock())
        if why := self.journal.take_failure():
            self.event("journal.failed", f"the journal cannot be written: {why}; requests go on, and {_AT_STAKE}")

    def _happened(self, event: Event) -> None:
        """Number an event and note it in the journal; then the loop publishes it."""
        self.journal.noticed(self.feed.add(event), event)
        self._publish(event)

    def _note(self, fact: Fact) -> None:
        """Keep a fact for another gateway and for another core; the loop pushes it."""
        self.feed.keep(fact)
        self.journal.stated(fact)
        self._push(fact)

    @property
    def unfinished(self) -> bool:
        """Whether the next turn has work that waits for no message."""
        return self.health.serving is not None and self.verbs.under_way

    # --- one turn -------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Retire the steps that all stages have retired, end settled operations, schedule new steps."""
        self.constraints.deliver()
        serving = self.health.serving
        if serving is not None:
            self._retire(serving)
        self.constraints.advance(serving.scheduler if serving is not None else None)
        if serving is not None:
            self._send_masks(serving.scheduler)
        self.recovery.advance()
        serving = self.health.serving
        serves = serving is not None and not self.health.blocked
        self.tiers.advance(serving.scheduler if serving and serves else None, self.recovery.generation)
        if serving is None:
            return
        if self._successor is not None:
            successor, self._successor = self._successor, None
            for opened in successor.take_opened():
                self.commands.resume(opened)
        scheduler, memory = serving
        self.checks.shadow.watch()
        for note in scheduler.fences.notes():
            self.event(f"request.{note.kind}", f"{note.request} {note.text}", request=note.request)
        self.verbs.settle()
        memory.advance()
        if self.health.blocked or memory.begins:
            return
        while (step := scheduler.schedule()) is not None:
            if step.register:
                self.journal.began([register.request for register in step.register])
            self.tracker.send(step)

    def _retire(self, serving: Serving) -> None:
        for step in self.tracker.take_retired():
            for scores in step.prompts:
                self.outputs.score(scores)
            retirement = serving.scheduler.retire(step.number, step.sampled)
            # The grammar process works while this one hands out the tokens.
            self.constraints.ask(serving.scheduler)
            self.checks.retired(step.number)
            if step.differing:
                self.checks.ranks_differ(step.number, step.differing)
            if self.checks.shadow.share:
                self.checks.shadow.retired(step.number, [request for request, *_ in retirement.tokens])
            self.requests.retired(serving, retirement)
            self.tiers.retired(retirement, step.sent, step.tokens)
            if retirement.copied_out or retirement.copied_in:
                self.metrics.copied(retirement, step.sent)
        if (change := self.tracker.take_change()) is not None:
            serving.memory.mapped(change)
