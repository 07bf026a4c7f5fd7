"""Sessions beside consoles, while stages and cores end: each sample has its tokens, and each command one end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import scheduler_invariants
from core_world import CoreWorld
from ppengine.protocol.control import Accepted, Outcome, Refused
from ppengine.protocol.offline import AbortMany, Added, AddMany, EndSamples, Follow, ForgetMany, News, OpenSession
from ppengine.protocol.reports import ProcessInfo, ProcessReport
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.stage_lifecycle import Drained, StageReady
from ppengine.protocol.steps import Mapped, Retired
from ppengine.protocol.verbs import (
    Abort,
    Pause,
    Preempt,
    Priority,
    Release,
    Resume,
    SetMemory,
    Submit,
    SwapIn,
    SwapOut,
    Verb,
)

STAGES = 2


@dataclass(eq=False)
class Program:
    """A session that reads its requests, and loses answers now and then."""

    session: str
    number: int = 0
    cursor: int = -1
    added: dict[str, SamplingParams] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], str] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    """Requests that it has aborted, in whole or in part."""
    cut: set[tuple[str, int]] = field(default_factory=set)
    """Samples that it has ended."""
    last: AddMany | None = None

    def nonce(self) -> int:
        self.number += 1
        return self.number

    def take(self, news: News) -> list[str]:
        """Take an answer; return the requests that have ended."""
        gap, over = False, []
        for piece in news.all_pieces():
            if piece.request not in self.added:
                over += [piece.request] if piece.finish_reason else []
                continue
            key = piece.request, piece.sample
            known = self.tokens[key]
            assert key in self.ends or piece.offset <= len(known), "no token before it is missing"
            if key in self.ends:
                continue
            more = piece.token_ids[len(known) - piece.offset :]
            assert more == list(range(len(known), len(known) + len(more)))
            known += more
            if piece.finish_reason is not None:
                self.ends[key] = piece.finish_reason
                if all((piece.request, index) in self.ends for index in range(self.added[piece.request].n)):
                    over.append(piece.request)
        self.cursor = -1 if gap else news.cursor
        return over


class Life:
    """One engine whose core and stages are replaced, with two programs and two consoles."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.options: dict[str, Any] = {
            "stages": STAGES, "max_num_seqs": self.draw.choice([3, 8]), "schedule_ahead": self.draw.random() < 0.5,
            "preemption": self.draw.choice(["swap", "recompute"]), "utilization": self.draw.choice([0.11, 0.13, 0.5]),
        }  # fmt: skip
        self.world = CoreWorld(**self.options)
        self.world.counting = True
        self.programs = [Program("s"), Program("t")]
        self.accepted: set[str] = set()
        self.memory: list[Any] = []
        """Messages of stages that come once more."""
        self.restarts = 0

    @property
    def engine(self) -> Any:
        return self.world.engine

    def names(self) -> list[str]:
        return [request.id for request in self.engine.requests.live()] + ["gone"]

    # --- programs -------------------------------------------------------------------------------------------

    def add(self) -> None:
        program = self.draw.choice(self.programs)
        sampling = SamplingParams(
            n=self.draw.choice([1, 1, 2, 3]), max_tokens=self.draw.randint(1, 40), temperature=1.0, ignore_eos=True,
            prompt_logprobs=self.draw.choice([None, None, None, 0]),
        )  # fmt: skip
        prompts = [list(range(3, 3 + self.draw.choice([1, 7, 8, 9, 20]))) for _ in range(self.draw.randint(1, 3))]
        program.last = AddMany(
            nonce=program.nonce(), session=program.session,
            submissions=[
                Submit(
                    prompt_token_ids=each, sampling=sampling, priority=self.draw.randint(-1, 1),
                    request=f"{program.session}-{program.number}-{place}",
                )
                for place, each in enumerate(prompts)
            ],
        )  # fmt: skip
        self.send(program)

    def send(self, program: Program) -> None:
        """Send its newest requests, or once more."""
        message = program.last
        if message is None:
            return
        before = len(self.world.answers)
        self.engine.offline.add_many(program.session.encode(), message)
        for _, answer in self.world.answers[before:]:
            if isinstance(answer, Added) and answer.nonce == message.nonce and not answer.error:
                for name, one in zip(answer.requests, message.submissions, strict=True):
                    if name not in program.added and name in self.engine.outputs:
                        program.added[name] = one.sampling
                        program.tokens.update(((name, index), []) for index in range(one.sampling.n))

    def repeat(self) -> None:
        self.send(self.draw.choice(self.programs))

    def read(self) -> None:
        self.read_of(self.draw.choice(self.programs), lost=0.2)

    def read_of(self, program: Program, lost: float) -> None:
        before = len(self.world.answers)
        self.engine.outputs.follow(
            program.session.encode(),
            Follow(
                nonce=program.nonce(), session=program.session, since=program.cursor, wait_ms=0,
                finished_only=self.draw.random() < 0.5,
            ),
        )  # fmt: skip
        for _, answer in self.world.answers[before:]:
            if isinstance(answer, News) and answer.nonce == program.number and self.draw.random() >= lost:
                self.engine.outputs.forget(ForgetMany(session=program.session, requests=program.take(answer)).requests)

    def stop(self) -> None:
        program = self.draw.choice(self.programs)
        if not program.added:
            return
        name = self.draw.choice(list(program.added))
        n = program.added[name].n
        act = self.draw.random()
        if act < 0.6:
            samples = [(name, self.draw.randrange(n + 1)) for _ in range(self.draw.randint(1, 3))] * 2
            program.cut.update(samples)
            self.engine.requests.end_samples(EndSamples(session=program.session, samples=samples).samples)
        elif act < 0.8:
            program.stopped.add(name)
            self.engine.offline.abort(AbortMany(session=program.session, requests=[name, "gone"]))
        else:
            program.stopped.add(name)
            one = f"{name}.{self.draw.randrange(1, n + 1)}"
            self.engine.offline.abort(AbortMany(session=program.session, requests=[one]))

    def open_again(self) -> None:
        """Let another process have the session."""
        program = self.draw.choice(self.programs)
        program.stopped.update(program.added)
        self.engine.offline.open_session(OpenSession(session=program.session).session)

    # --- consoles -------------------------------------------------------------------------------------------

    def command(self) -> None:
        name, hold = self.draw.choice(self.names()), self.draw.random() < 0.5
        verb: Verb = self.draw.choice([
            Preempt(request=name, hold=hold), Preempt(request=name, mode="recompute", hold=hold),
            SwapOut(request=name, hold=hold), SwapIn(request=name), Release(request=name), Release(request=name),
            Priority(request=name, priority=self.draw.choice([1 - 2**31, -1, 0, 2**31 - 1])),
            SetMemory(utilization=self.draw.choice([0.13, 0.3, 0.5])), Pause(mode="wait"), Pause(mode="keep"),
            Resume(), Resume(), Resume(),
        ])  # fmt: skip
        by = self.draw.choice([b"ann", b"bob"])
        self.world.say(verb, client=by, dry_run=self.draw.random() < 0.1)

    def abort(self) -> None:
        name = self.draw.choice(self.names())
        for program in self.programs:
            program.stopped.update(each for each in program.added if name.partition(".")[0] == each)
        self.world.say(Abort(request=name))

    # --- stages and cores -----------------------------------------------------------------------------------

    def retire(self) -> None:
        if not self.world.steps:
            return
        step = self.world.steps[0]
        for stage in range(STAGES):
            self.memory.append(Retired(step.generation, step.number, stage, 0, sampled=[]))
            self.memory.append(Mapped(step.generation, step.number, stage, 0, 7, ""))
        self.world.retire()

    def late(self) -> None:
        """Let a message come again, or one of an older generation."""
        if not self.memory:
            return
        message = self.draw.choice(self.memory[-40:])
        if message.generation == self.world.generation and any(
            message.number == step.number for step in self.world.steps
        ):
            return
        self.engine.stage_messages.take(message)
        old = max(1, self.world.generation - 1)
        if old < self.world.generation:
            self.engine.stage_messages.take(Drained(old, 0, 0))
            self.engine.stage_messages.take(
                StageReady(
                    stage=0, rank=0, generation=old, pid=9, host="h", layers=[0, 1], device_kind="cpu", device_name="",
                    device_uuid=None, total_bytes=1, weights_bytes=1, peak_bytes=1, block_bytes=10, quantum_blocks=1,
                    reserved_blocks=1, swap_blocks=1, slots_fd=-1, slot_bytes=0, slot_layout="",
                )
            )  # fmt: skip

    def lose(self) -> None:
        """Lose a stage; sooner or later all meet."""
        world = self.world
        stage = self.draw.randrange(STAGES)
        record = self.engine.stages.leader(stage)
        world.now += 700.0  # Deaths are counted in ten minutes.
        info = ProcessInfo(
            role="stage", stage=stage, rank=0, pid=1, exit_code=-9, detail="killed", generation=record.started
        )
        self.engine.on_processes(ProcessReport(mono_ns=0, processes=[info]))
        self.engine.advance()
        for _ in range(self.draw.randint(0, 4)):
            self.draw.choice([self.add, self.read, self.stop, self.command, self.abort, self.late])()
        self.meet()

    def meet(self) -> None:
        world = self.world
        world.steps.clear()
        world.changing = None
        world.drained(*range(STAGES))
        world.ready()
        self.engine.advance()
        assert self.engine.health.serving is not None and not self.engine.health.blocked
        world.run(2)

    def restart(self) -> None:
        """Kill the core, perhaps before it has committed its turn."""
        self.engine.commit()
        old, self.restarts = self.world, self.restarts + 1
        self.world = CoreWorld(before=old, serve=False, **self.options)
        self.world.counting, self.world.now, self.world._count = (
            True,
            old.now + self.draw.choice([0.1, 50.0]),
            old._count,
        )
        self.world.answers += [(client, one) for client, one in old.answers if not isinstance(one, News)]
        self.engine.on_processes(
            ProcessReport(
                mono_ns=0,
                processes=[ProcessInfo(role="stage", stage=stage, rank=0, pid=1, generation=record.started)
                           for stage, record in enumerate(old.engine.stages)],
            )
        )  # fmt: skip
        for _ in range(self.draw.randint(0, 3)):
            self.draw.choice([self.read, self.late])()
        self.meet()

    # --- all of it ------------------------------------------------------------------------------------------

    def turn(self) -> None:
        acts = [self.retire] * 12 + [self.add] * 3 + [self.read] * 4 + [self.stop] + [self.command] * 6
        acts += [self.abort, self.repeat, self.late]
        if self.draw.random() < 0.02:
            acts = [self.lose] * 4 + [self.restart] * 4 + [self.open_again]
        self.draw.choice(acts)()
        self.world.now += self.draw.choice([0.0, 0.01, 0.3])
        self.engine.advance()
        self.engine.outputs.serve_waiters()
        self.engine.commit()
        scheduler_invariants.check(self.world.scheduler)

    def end(self) -> None:
        world = self.world
        world.say(Resume())
        world.run()
        while held := [request.id for request in self.engine.requests.live() if request.state == "held"]:
            for name in held:
                world.say(Release(request=name))
            world.run()
        assert not self.engine.requests.live()
        for program in self.programs * 2:
            self.read_of(program, lost=0.0)
        self.check_samples()
        ids = {answer.id for _, answer in world.answers if isinstance(answer, Accepted)}
        for one in ids:
            ends = [answer for _, answer in world.answers if isinstance(answer, Outcome | Refused) and answer.id == one]
            assert len({msgspec.json.encode(each) for each in ends}) == 1, (one, ends)
        assert not self.engine.operations.live
        assert (
            not list(self.engine.outputs) and not self.engine.outputs._sessions and not self.engine.outputs.scores.held
        )
        world.check()

    def check_samples(self) -> None:
        for program in self.programs:
            for (name, index), tokens in program.tokens.items():
                reason, most = program.ends.get((name, index)), program.added[name].max_tokens
                assert reason is not None, f"{name}.{index} of {program.session} has no end"
                if name in program.stopped:
                    continue
                if (name, index) in program.cut:
                    assert reason in ("stop", "length")
                else:
                    assert (reason, len(tokens)) == ("length", most), (name, index)


@pytest.mark.parametrize("seed", range(24))
def test_sessions_consoles_and_ends_in_any_order(seed: int) -> None:
    life = Life(seed)
    for _ in range(300):
        life.turn()
    life.end()
