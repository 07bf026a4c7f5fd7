"""The composition root of the core: makes its parts, routes messages to them, and lets them take a turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import EngineConfig
from ppengine.core.answers import Answers
from ppengine.core.block_map import BlockMap
from ppengine.core.capacity import Capacity
from ppengine.core.cordons import Cordons
from ppengine.core.details import Details
from ppengine.core.device_room import RoomBook
from ppengine.core.events import Events
from ppengine.core.health import Health
from ppengine.core.live_checks import Checks
from ppengine.core.live_requests import LiveRequests
from ppengine.core.many_requests import ManyRequests
from ppengine.core.memory_controller import MemoryController
from ppengine.core.offline_requests import OfflineRequests
from ppengine.core.operations import Operations
from ppengine.core.outputs import OutputHub
from ppengine.core.recovery import Recovery
from ppengine.core.report import Reporter
from ppengine.core.request_verbs import RequestVerbs
from ppengine.core.scheduler import Scheduler
from ppengine.core.serving import Serving
from ppengine.core.shadow_check import Shadow
from ppengine.core.stage_records import Stages
from ppengine.core.stage_tracker import StageTracker
from ppengine.core.submissions import Submissions
from ppengine.core.template_process import TemplateProcess
from ppengine.core.verb_handlers import Commands
from ppengine.protocol.facts import Fact
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessReport, Recall, Recalled
from ppengine.protocol.snapshot import Event
from ppengine.protocol.steps import (
    Drained,
    LedgerPicture,
    Mapped,
    NewGeneration,
    Retired,
    ShadowAnswer,
    ShadowReady,
    StageFailed,
    StageFindings,
    StageProgress,
    StageReady,
)


class Engine:
    """Owns the parts of the core; the loop owns the sockets and decides when to take a turn."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        *,
        send_step: Callable[[bytes], None],
        reply: Callable[[bytes, msgspec.Struct], None],
        happened: Callable[[Event], None],
        send_shadow: Callable[[bytes], None],
        send_renderer: Callable[[bytes, bytes], None],
        start_stage: Callable[[Place, int], None],
        notify_stage: Callable[[Place, NewGeneration], None],
        note: Callable[[Fact], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._spec = spec
        self._clock = clock
        self.event = event = Events(happened)
        self.stages = stages = Stages(config.layers)
        self.health = health = Health(stages)
        self.tracker = tracker = StageTracker(stages, send_step, clock)
        self.answers = answers = Answers(reply)
        self.operations = operations = Operations(answers, happened, clock)
        self.outputs = OutputHub(tokenizer, reply, clock, lambda: health.failure)
        self.requests = requests = LiveRequests(health, self.outputs, event, clock)
        submissions = Submissions(spec, tokenizer, config.max_model_len, self.outputs)
        self.templates = TemplateProcess(Path(config.run_dir), send_renderer, clock)
        self.offline = OfflineRequests(health, submissions, requests, reply)
        shadow = Shadow(Path(config.run_dir), stages, operations, event, send_shadow, clock)
        self.checks = checks = Checks(config, stages, health, shadow, operations, event, tracker.send, clock)
        self.recovery = recovery = Recovery(
            config, stages, tracker, health, requests, checks, operations, event, clock,
            start_stage, notify_stage, note,
        )  # fmt: skip
        cordons = Cordons(stages, health, requests, recovery, operations, clock)
        one = RequestVerbs(health, requests, tracker, operations)
        many = ManyRequests(health, one, operations)
        self.commands = Commands(
            config, health, one, many, stages, requests, submissions, self.templates, recovery, cordons, checks,
            operations, answers,
        )  # fmt: skip
        self.rooms = RoomBook(clock)
        self.details = Details(health, stages, requests, self.outputs, checks, BlockMap(clock), clock)
        self.reporter = Reporter(config, stages, tracker, health, requests, operations, checks, clock, clock())

    # --- messages -------------------------------------------------------------------------------------------

    def on_stage(self, message: object) -> bool:
        """Route one message of a stage; return whether it calls for a turn."""
        recovery = self.recovery
        match message:
            case Retired(fatal=False):
                return message.generation == recovery.generation and self.tracker.acknowledge(message)
            case Retired():
                recovery.on_fatal(message)
            case Mapped():
                return message.generation == recovery.generation and self.tracker.mapped(message)
            case StageReady():
                recovery.on_ready(message)
                self._begin_serving()
            case StageProgress():
                recovery.on_progress(message)
            case StageFailed():
                recovery.on_failed(message)
            case Drained():
                recovery.on_drained(message)
            case StageFindings() | LedgerPicture():
                if message.generation == recovery.generation:
                    self.checks.take(message)
            case ShadowReady() | ShadowAnswer():
                self.checks.take(message)
        return True

    def recalled(self, question: Recall, newest: int) -> Recalled:
        """Return the answers to commands, and the requests that end with their console. `newest`: an event's number."""
        replies, unknown = self.answers.of(question.commands)
        attended = self.commands.attended()
        return Recalled(newest=newest, replies=replies, unknown=unknown, attended=attended)

    def on_processes(self, report: ProcessReport) -> None:
        """Note which stage processes have ended, as the supervisor reports."""
        for process in report.processes:
            if process.role == "stage" and process.exit_code is not None:
                self.recovery.on_process(process)

    def _begin_serving(self) -> None:
        """Make scheduler and memory controller once all stages have met for the first time."""
        config, profile, generation = self.config, self.config.profile, self.recovery.generation
        if self.health.serving is not None or self.health.blocked or not self.stages.all_met(generation):
            return
        utilization = profile.memory.utilization
        capacity = Capacity(self.stages.ready, profile.memory.block_size, config.max_model_len)
        plan = capacity.plan(utilization)
        if refusal := capacity.refusal(utilization):
            self.health.refuse(refusal)
            return
        scheduler = Scheduler(
            profile.scheduler,
            stages=config.stages,
            block_size=profile.memory.block_size,
            max_model_len=config.max_model_len,
            num_blocks=plan.mapped,
            num_host_blocks=capacity.host_blocks,
            eos_token_ids=frozenset(self._spec.eos_token_ids),
            clock=self._clock,
        )
        scheduler.steps.generation = generation
        self.stages.serve()
        memory = MemoryController(
            scheduler, capacity, utilization, self.operations, self.event, self.tracker.send,
            lambda: self.health.blocked, self.health.fail, self.recovery.stay_down, self.rooms,
        )  # fmt: skip
        self.health.serve(Serving(scheduler, memory))
        self.tracker.send(scheduler.resize.map_step(plan.mapped))
        self.event("engine.serving", f"serving with {plan.mapped} blocks, stage {plan.binding} is binding")

    @property
    def unfinished(self) -> bool:
        """Whether the next turn has work that waits for no message."""
        return self.health.serving is not None and self.commands.under_way

    # --- one turn -------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Retire the steps that all stages have retired, end settled operations, schedule new steps."""
        self.templates.advance()
        serving = self.health.serving
        if serving is not None:
            self._retire(serving)
        self.recovery.advance()
        if serving is None:
            return
        scheduler, memory = serving
        self.checks.shadow.watch()
        for note in scheduler.fences.notes():
            self.event(f"request.{note.kind}", f"{note.request} {note.text}", request=note.request)
        self.commands.settle()
        memory.advance()
        if self.health.blocked or memory.begins:
            return
        while (step := scheduler.schedule()) is not None:
            self.tracker.send(step)

    def _retire(self, serving: Serving) -> None:
        for step in self.tracker.take_retired():
            retirement = serving.scheduler.retire(step.number, step.sampled)
            self.checks.retired(step.number)
            if self.checks.shadow.share:
                self.checks.shadow.retired(step.number, [request for request, *_ in retirement.tokens])
            self.requests.retired(serving, retirement)
        if (change := self.tracker.take_change()) is not None:
            serving.memory.mapped(change)
