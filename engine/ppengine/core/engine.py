"""The engine's state without its sockets: requests in, steps out, retirements in, outputs out."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from ppengine.checkpoint import ModelSpec
from ppengine.config import EngineConfig
from ppengine.core.capacity import Capacity
from ppengine.core.commands import Commands
from ppengine.core.operations import Operations
from ppengine.core.outputs import OutputHub
from ppengine.core.resize import Resizer
from ppengine.core.stages import Flight, StageBoard
from ppengine.protocol.control import Inspect, Logprob, Submit
from ppengine.protocol.frames import encode
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.reports import ProcessReport
from ppengine.protocol.snapshot import Event
from ppengine.protocol.steps import Retired, StageFailed, StageProgress, StageReady, Step
from ppengine.request import Request
from ppengine.scheduler import DoesNotFit, Effect, Retirement, Scheduler
from ppengine.tokenizer import Tokenizer

GENERATION = 1


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
    ) -> None:
        self.config = config
        self.spec = spec
        self.tokenizer = tokenizer
        self.board = StageBoard(config.stages, config.layers)
        self.outputs = OutputHub(tokenizer, reply)
        self.operations = Operations(reply, happened)
        self.commands = Commands(self)
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
        self.clock = time.monotonic
        self._begun = self.clock()
        self._count = 0
        self._first_name = secrets.randbits(16)

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
        if self.board.lost or self.unfit:
            return "degraded"
        if not self.serving:
            return "loading"
        if self.resizer.busy:
            return "resizing"
        if self.draining:
            return "draining"
        return "paused" if self.scheduler.paused or not self.scheduler.admissions else "serving"

    def leave(self, why: str) -> None:
        """Leave the loop at its next turn."""
        self.leaving = self.leaving or why
        self.outputs.failure = self.outputs.failure or f"the engine stopped: {why}"

    def event(self, kind: str, text: str, *, stage: int | None = None, request: str | None = None) -> None:
        """Publish something that happened."""
        self.happened(Event(seq=0, wall=time.time(), kind=kind, text=text, stage=stage, request=request))

    # --- stages ---------------------------------------------------------------------------------------------

    def on_stage(self, message: object) -> None:
        """Take one message of a stage."""
        if isinstance(message, Retired):
            if message.fatal:
                self._lose(message.stage, message.error)
            elif message.generation == GENERATION:
                self.board.acknowledge(message)
        elif isinstance(message, StageReady):
            self.board.ready[message.stage, message.rank] = message
            self.event("stage.ready", f"stage {message.stage} is ready", stage=message.stage)
            if self.board.all_ready and not self.serving:
                self._begin_serving()
        elif isinstance(message, StageProgress):
            self.board.progress[message.stage, message.rank] = message.text
            self.message = message.text
        elif isinstance(message, StageFailed):
            self._lose(message.stage, message.text)

    def on_processes(self, report: ProcessReport) -> None:
        """The supervisor says who is alive."""
        for process in report.processes:
            if process.role == "stage" and process.exit_code is not None and process.stage is not None:
                self._lose(process.stage, process.detail or f"exit code {process.exit_code}")

    def _lose(self, stage: int, why: str) -> None:
        if stage in self.board.lost:
            return
        self.board.lost[stage] = why
        first = next(iter(self.board.lost))
        self.message = f"stage {first} is lost: {self.board.lost[first]}"
        self.outputs.failure = self.message
        self.event("stage.lost", f"stage {stage}: {why}", stage=stage)
        for operation in self.operations.live:
            self.operations.end(operation, "failed", f"{self.message}; how far it came is not known")

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
        self.scheduler.generation = GENERATION
        self.resizer = Resizer(self, capacity, utilization)
        self.send(self.scheduler.map_step(plan.mapped))
        self.serving = True
        self.message = ""
        self.event("engine.serving", f"serving with {plan.mapped} blocks, stage {plan.binding} is binding")

    def send(self, step: Step) -> None:
        """Send one step to every stage."""
        self.board.sent(step)
        self._send_step(encode(step))

    # --- requests -------------------------------------------------------------------------------------------

    def make_requests(self, verb: Submit, owner: str) -> list[Request]:
        """Return the requests (one a sample) of a submission. Raises ValueError for one that makes no sense."""
        if (verb.prompt is None) == (verb.prompt_token_ids is None):
            raise ValueError("give either a prompt text or prompt_token_ids")
        prompt: str | list[int] = verb.prompt if verb.prompt is not None else list(verb.prompt_token_ids or [])
        if verb.chat and isinstance(prompt, str):
            prompt = self._need_tokenizer().encode_chat([{"role": "user", "content": prompt}])
        sampling = verb.sampling
        ids = self._need_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise ValueError("the prompt is empty; give at least one token")
        for token in ids:
            if not 0 <= token < self.spec.vocab_size:
                raise ValueError(f"token id {token} is not in the vocabulary (0 to {self.spec.vocab_size - 1})")
        if self.tokenizer is None and sampling.stop:
            raise ValueError("stop texts need a tokenizer; this engine was started without one: use stop_token_ids")
        name = verb.request or self._new_name()
        if name in self.outputs:
            raise ValueError(f"request id {name} is already in use")
        seed = sampling.seed if sampling.seed is not None else secrets.randbits(62)
        leader = Request(id=name, prompt_ids=ids, sampling=sampling, seed=seed, owner=owner)
        followers = [
            Request(
                id=f"{name}.{index}", prompt_ids=ids, sampling=sampling, seed=seed, owner=owner, sample=index,
                leader=leader,
            )
            for index in range(1, sampling.n)
        ]  # fmt: skip
        return [leader, *followers]

    def admit(self, requests: list[Request], session: str, detach_client: bytes = b"") -> None:
        """Queue the samples of one prompt and open their output. Raises DoesNotFit."""
        leader = requests[0]
        self.scheduler.add(requests)
        self.outputs.open(leader.group, session, leader.prompt_ids, leader.sampling)
        self.prompt_tokens_total += len(leader.prompt_ids)

    def add_many(self, client: bytes, message: AddMany) -> None:
        """Queue the requests of an offline session: all of them or none."""
        if not self.serving or self.board.lost:
            text = f"the engine is {self.state}: {self.message}"
            self.reply(client, Added(nonce=message.nonce, requests=[], error=text, lost=bool(self.board.lost)))
            return
        groups: list[list[Request]] = []
        error = ""
        names: list[str | None] = [*message.requests] or [None] * len(message.prompts)
        try:
            for prompt, sampling, name in zip(message.prompts, message.sampling, names, strict=True):
                words, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
                verb = Submit(prompt=words, prompt_token_ids=ids, sampling=sampling, request=name)
                groups.append(self.make_requests(verb, owner=message.session))
            for group in groups:
                self.scheduler.check_fits(group)
            times = Counter(request.id for group in groups for request in group)
            if repeated := [name for name, count in times.items() if count > 1]:
                error = f"request id {repeated[0]} is given twice; ids are used once"
        except (DoesNotFit, ValueError) as problem:
            error = f"prompt {len(groups)}: {problem}"
        if not error:
            for group in groups:
                self.admit(group, session=message.session)
        names_given = [] if error else [group[0].group for group in groups]
        self.reply(client, Added(nonce=message.nonce, requests=names_given, error=error))

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

    def abort(self, request: Request, by: str = "") -> Effect:
        """End a request; its output ends here when the effect is immediate, else when it retires."""
        effect = self.scheduler.abort(request.id, by=by)
        if effect.state == "applied":
            self.ended(request)
        return effect

    def ended(self, request: Request) -> None:
        """Close the output of a request that has ended."""
        reason = request.finish_reason or "abort"
        self.outputs.finish(request.group, request.sample, reason)
        text = f"{request.id} {reason}, {len(request.output_ids)} tokens"
        self.event("request.finished", text, request=request.id)

    def members(self, name: str) -> list[Request]:
        """Return the live samples of a request, or the one sample that is named."""
        if not self.serving:
            return []
        output = self.outputs.get(name)
        names = [name, *(f"{name}.{index}" for index in range(1, output.sampling.n))] if output else [name]
        found = (self.scheduler.requests.get(one) for one in names)
        return [request for request in found if request is not None and not request.finished]

    @property
    def running(self) -> int:
        """Requests that run or are being loaded."""
        queues = self.scheduler.queues()
        return queues.running + queues.loading

    def live(self) -> list[Request]:
        """Return the requests that have not ended, in order of arrival."""
        return [request for request in self.scheduler.requests.values() if not request.finished]

    def gone_text(self, name: str) -> str:
        """Say of a request id that is not live what is known of it."""
        output = self.outputs.get(name)
        if output is None:
            return f"no request {name}"
        reason = output.samples[0].finish_reason or "aborted"
        return f"request {name} has finished ({reason}, {len(output.samples[0].tokens)} tokens)"

    def inspect(self, client: bytes, question: Inspect) -> None:
        """Answer a question about a request or the block map."""
        from ppengine.core.details import answer

        self.reply(client, answer(self, question))

    # --- one turn -------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Retire what all stages have retired, end what has settled, schedule what can be scheduled."""
        if not self.serving:
            return
        for flight in self.board.take_retired():
            self._retire(flight)
        for note in self.scheduler.notes():
            self.event(f"request.{note.kind}", f"{note.request} {note.text}", request=note.request)
        self.commands.settle()
        self.resizer.advance()
        if self.board.lost or self.leaving:
            return
        while (step := self.scheduler.schedule()) is not None:
            self.send(step)

    def _retire(self, flight: Flight) -> None:
        if flight.is_map:
            self.resizer.mapped(flight)
        elif flight.errors:
            self.event("step.error", f"m{flight.number}: {'; '.join(flight.errors)}")
        retirement: Retirement = self.scheduler.retire(flight.number, flight.sampled)
        for request, token, logprob, top in retirement.tokens:
            self.output_tokens_total += 1
            entry = None if request.sampling.logprobs is None else Logprob(logprob, top)
            ended = request.finish_reason == "stop"
            if self.outputs.push(request.group, request.sample, token, entry, ended) and not request.finished:
                self.scheduler.finish(request.id, "stop")
                self.ended(request)
        for request in retirement.finished:
            self.ended(request)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this engine was started without a tokenizer: give prompt_token_ids")
        return self.tokenizer

    def _new_name(self) -> str:
        """Return a short id that was not given out before: four digits, spread so that neighbours look different."""
        while True:
            turn, number = divmod(self._count, 0x10000)
            self._count += 1
            name = f"r-{turn * 0x10000 + (self._first_name + number * 0x9E37) % 0x10000:04x}"
            if name not in self.outputs:
                return name
