"""The engine's state without its sockets: requests in, steps out, retirements in, outputs out."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import EngineConfig
from ppengine.core.block_map import BlockMap
from ppengine.core.capacity import Capacity
from ppengine.core.cordons import Cordons
from ppengine.core.endings import ending_of
from ppengine.core.live_checks import Checks
from ppengine.core.memory_controller import Resizer
from ppengine.core.operations import Operations
from ppengine.core.outputs import OutputHub
from ppengine.core.recovery import Recovery
from ppengine.core.scheduler import ActionResult, DoesNotFit, Retirement, Scheduler
from ppengine.core.scheduler.request import Request
from ppengine.core.stage_tracker import Flight, StageBoard
from ppengine.core.submissions import Submissions
from ppengine.core.verb_handlers import Commands
from ppengine.protocol.control import Inspect, Logprob
from ppengine.protocol.frames import encode
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.reports import ProcessReport
from ppengine.protocol.snapshot import Event
from ppengine.protocol.steps import (
    LedgerPicture,
    Mapped,
    NewGeneration,
    Quiet,
    Retired,
    ShadowAnswer,
    ShadowReady,
    StageFailed,
    StageFindings,
    StageProgress,
    StageReady,
    Step,
)
from ppengine.protocol.verbs import Submit


class Engine:
    """Owns scheduler, stage board, outputs and operations; the loop owns the sockets and the clock's turns."""

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
        start_stage: Callable[[int, int], None],
        tell_stage: Callable[[int, NewGeneration], None],
    ) -> None:
        self.config = config
        self.spec = spec
        self.board = StageBoard(config.stages, config.layers)
        self.outputs = OutputHub(tokenizer, reply)
        self.operations = Operations(reply, happened)
        self.commands = Commands(self)
        self.cordons = Cordons(self)
        self.recovery = Recovery(self, start_stage, tell_stage)
        self.submissions = Submissions(spec, tokenizer, config.max_model_len, self.outputs)
        self.reply = reply
        self.happened = happened
        self.scheduler: Scheduler
        self.resizer: Resizer
        self.serving = False
        self.draining = False
        self.leaving = ""
        self.failed = ""
        """Why the engine had to leave by itself; empty when it was told to."""
        self.unfit = ""
        """Why it cannot begin to serve: the memory of the stages does not hold one sequence."""
        self.message = "stages are loading"
        self.prompt_tokens_total = 0
        self.output_tokens_total = 0
        self._send_step = send_step
        self.send_shadow = send_shadow
        self.checks = Checks(self)
        self.block_map = BlockMap(self)
        self.clock = time.monotonic
        self._begun = self.clock()

    # --- life -----------------------------------------------------------------------------------------------

    @property
    def uptime_s(self) -> float:
        """Seconds since the core began."""
        return time.monotonic() - self._begun

    @property
    def state(self) -> str:
        """Engine state as in a snapshot."""
        if self.leaving:
            return "stopped"
        if self.board.lost or self.recovery.down or self.unfit:
            return "degraded"
        if not self.serving or self.recovery.active:
            return "loading"
        if self.resizer.busy:
            return "resizing"
        if self.draining:
            return "draining"
        return "paused" if self.scheduler.paused or self.scheduler.batcher.draining else "serving"

    def leave(self, why: str) -> None:
        """Leave the loop at its next turn."""
        self.leaving = self.leaving or why
        self.outputs.failure = self.outputs.failure or f"the engine stopped: {why}"

    def event(self, kind: str, text: str, *, stage: int | None = None, request: str | None = None) -> None:
        """Publish something that happened."""
        self.happened(Event(seq=0, wall=time.time(), kind=kind, text=text, stage=stage, request=request))

    # --- stages ---------------------------------------------------------------------------------------------

    def on_stage(self, message: object) -> bool:
        """Take one message of a stage; return whether there is something to do about it in this turn."""
        recovery = self.recovery
        if isinstance(message, Retired):
            if not message.fatal:
                return message.generation == recovery.generation and self.board.acknowledge(message)
            recovery.on_fatal(message)
        elif isinstance(message, Mapped):
            return message.generation == recovery.generation and self.board.mapped(message)
        elif isinstance(message, StageReady):
            recovery.on_ready(message)
            if not self.serving and not recovery.holds and self.board.all_ready(recovery.generation):
                self._begin_serving()
        elif isinstance(message, StageProgress):
            recovery.on_progress(message)
        elif isinstance(message, StageFailed):
            recovery.on_failed(message)
        elif isinstance(message, Quiet):
            recovery.on_quiet(message)
        elif isinstance(message, StageFindings | LedgerPicture):
            if message.generation == recovery.generation:
                self.checks.take(message)
        elif isinstance(message, ShadowReady | ShadowAnswer):
            self.checks.take(message)
        return True

    def on_processes(self, report: ProcessReport) -> None:
        """The supervisor says who is alive."""
        for process in report.processes:
            if process.role == "stage" and process.exit_code is not None:
                self.recovery.on_process(process)

    def _begin_serving(self) -> None:
        config, profile = self.config, self.config.profile
        utilization = profile.memory.utilization
        capacity = Capacity(self.board.ready.values(), profile.memory.block_size, config.max_model_len)
        plan = capacity.plan(utilization)
        if refusal := capacity.refusal(utilization):
            self.unfit = self.message = refusal
            return
        self.scheduler = Scheduler(
            profile.scheduler,
            stages=config.stages,
            block_size=profile.memory.block_size,
            max_model_len=config.max_model_len,
            num_blocks=plan.mapped,
            num_host_blocks=capacity.host_blocks,
            eos_token_ids=frozenset(self.spec.eos_token_ids),
        )
        self.scheduler.steps.generation = self.recovery.generation
        self.resizer = Resizer(self, capacity, utilization)
        self.send(self.scheduler.resize.map_step(plan.mapped))
        self.serving = True
        self.message = ""
        self.event("engine.serving", f"serving with {plan.mapped} blocks, stage {plan.binding} is binding")

    def send(self, step: Step) -> None:
        """Send one step to every stage."""
        self.board.sent(step)
        self._send_step(encode(step))

    # --- requests -------------------------------------------------------------------------------------------

    def admit(self, requests: list[Request], session: str) -> None:
        """Queue the samples of one prompt and open their output. Raises DoesNotFit."""
        leader = requests[0]
        self.scheduler.admit(requests)
        self.outputs.open(leader.group, session, leader.prompt_ids, leader.sampling)

    def add_many(self, client: bytes, message: AddMany) -> None:
        """Queue the requests of an offline session: all of them or none."""
        lost = bool(self.recovery.down)
        try:
            if not self.serving or lost:
                raise ValueError(f"the engine is {self.state}: {self.message}")
            if self.draining:
                raise ValueError("the engine is draining and takes no new requests; drain --undo ends that")
            groups = self._groups(message)
        except ValueError as problem:
            self.reply(client, Added(nonce=message.nonce, requests=[], error=str(problem), lost=lost))
            return
        for group in groups:
            self.admit(group, session=message.session)
        self.reply(client, Added(nonce=message.nonce, requests=[group[0].group for group in groups]))

    def _groups(self, message: AddMany) -> list[list[Request]]:
        """Return the requests of each prompt. Raises ValueError naming the first prompt that cannot be taken."""
        count, names = len(message.prompts), message.requests
        if len(message.sampling) != count or len(names) not in (0, count):
            raise ValueError(f"{count} prompts, {len(message.sampling)} sampling params and {len(names)} request ids")
        groups: list[list[Request]] = []
        seen: set[str] = set()
        for index, (prompt, sampling) in enumerate(zip(message.prompts, message.sampling, strict=True)):
            words, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
            name = names[index] if names else None
            verb = Submit(prompt=words, prompt_token_ids=ids, sampling=sampling, request=name)
            try:
                group = self.submissions.requests(verb, owner=message.session)
                self.scheduler.admission.check(group)
            except (DoesNotFit, ValueError) as problem:
                raise ValueError(f"prompt {message.first + index}: {problem}") from None
            for request in group:
                if request.id in seen:
                    raise ValueError(f"request id {request.id} is given twice; ids are used once")
                seen.add(request.id)
            groups.append(group)
        return groups

    def abort_many(self, names: list[str]) -> None:
        """Abort requests of an offline session; unknown ones have ended already."""
        for name in names:
            for request in self.members(name):
                if request.fence is None or not request.fence.final:
                    self.abort(request)

    def abort_all(self, by: str) -> None:
        """Abort every request that is not ending already."""
        for request in self.live():
            if request.fence is None or not request.fence.final:
                self.abort(request, by)

    def abort(self, request: Request, by: str = "") -> ActionResult:
        """End a request; its output ends here when the effect is immediate, else when it retires."""
        effect = self.scheduler.actions.abort(request.id, by=by)
        if effect.state == "applied":
            self.ended(request)
        return effect

    def ended(self, request: Request) -> None:
        """Close the output of a request that has ended."""
        reason = request.finish_reason or "abort"
        self.outputs.finish(request.group, request.sample, reason, ending_of(request, self.clock()))
        text = f"{request.id} {reason}, {len(request.output_ids)} tokens"
        self.event("request.finished", text, request=request.id)

    def members(self, name: str) -> list[Request]:
        """Return the live samples of a request, or the one sample that is named."""
        if not self.serving:
            return []
        output = self.outputs.get(name)
        names = [name, *(f"{name}.{index}" for index in range(1, output.sampling.n))] if output else [name]
        found = (self.scheduler.queues.requests.get(one) for one in names)
        # Somebody may have taken the name of an ended sample for a prompt of their own.
        live = (request for request in found if request is not None and not request.finished)
        return [request for request in live if output is None or request.group == name]

    @property
    def running(self) -> int:
        """Requests that run or are being loaded."""
        queues = self.scheduler.queues.counts()
        return queues.running + queues.loading

    def live(self) -> list[Request]:
        """Return the requests that have not ended, in order of arrival."""
        return [request for request in self.scheduler.queues.requests.values() if not request.finished]

    def gone_text(self, name: str) -> str:
        """Say of a request id that is not live what is known of it."""
        output = self.outputs.get(name)
        if output is None:
            return f"no request {name}"
        reason = output.samples[0].finish_reason or "aborted"
        return f"request {name} has finished ({reason}, {len(output.samples[0].tokens)} tokens)"

    def inspect(self, client: bytes, question: Inspect) -> None:
        """Answer a question about a request, the blocks or the ledger."""
        from ppengine.core.details import answer

        self.reply(client, answer(self, question))

    # --- one turn -------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Retire what all stages have retired, end what has settled, schedule what can be scheduled."""
        for flight in self.board.take_retired():
            self._retire(flight)
        if (change := self.board.take_change()) is not None:
            self.resizer.mapped(change)
        self.recovery.advance()
        if not self.serving:
            return
        self.checks.shadow.watch()
        for note in self.scheduler.fences.notes():
            self.event(f"request.{note.kind}", f"{note.request} {note.text}", request=note.request)
        self.commands.settle()
        self.resizer.advance()
        if self.recovery.holds or self.leaving or self.resizer.begins:
            return
        while (step := self.scheduler.schedule()) is not None:
            self.send(step)

    def _retire(self, flight: Flight) -> None:
        retirement: Retirement = self.scheduler.retire(flight.number, flight.sampled)
        self.checks.retired(flight.number)
        if self.checks.shadow.share:
            self.checks.shadow.retired(flight.number, [request for request, *_ in retirement.tokens])
        self.prompt_tokens_total += retirement.prompt_tokens
        for request, token, logprob, top in retirement.tokens:
            self.output_tokens_total += 1
            entry = None if request.sampling.logprobs is None else Logprob(logprob, top)
            ended = request.finish_reason == "stop"
            if self.outputs.push(request.group, request.sample, token, entry, ended) and not request.finished:
                self.scheduler.retirement.finish(request.id, "stop")
                self.ended(request)
        for request in retirement.finished:
            self.ended(request)
