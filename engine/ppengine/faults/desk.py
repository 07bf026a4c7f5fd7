"""The gateway's side: carries a fault command out, from outside or by a word to the stage, and answers it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from ppengine.config import EngineConfig
from ppengine.faults.registry import FaultError, Kind, find, kinds
from ppengine.faults.target import Pids, Target
from ppengine.faults.wire import Done, FromFaults, Inject, Lift
from ppengine.protocol.control import Accepted, ClearFaults, Command, Fault, FaultsDetail, Outcome, Refused
from ppengine.protocol.frames import Codec, ProtocolError, encode

ANSWER_S = 3.0
"""For the fault thread of a stage; one that holds the GIL has none."""
Reply = Accepted | Outcome | Refused


@dataclass
class _Open:
    """A command that stages are to answer."""

    command: Command
    missing: set[int]
    deadline: float
    texts: list[str] = field(default_factory=list)
    failed: bool = False


@dataclass
class _On:
    """A fault that was begun. `undo`: of what was done from outside."""

    kind: Kind
    stage: int | None
    undo: Callable[[], None] | None

    @property
    def text(self) -> str:
        where = self.kind.on if self.stage is None else f"stage {self.stage}"
        return f"{self.kind.name} at {where}"


class FaultDesk:
    """One engine's faults. `socket` is to be polled; `answers` and `expire` give what has become of commands."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], pids: Pids) -> None:
        self._config, self._pids = config, pids
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.bind(config.endpoint("faults"))
        self._codec = Codec(FromFaults)
        self._open: dict[str, _Open] = {}
        self._on: list[_On] = []

    def listing(self) -> FaultsDetail:
        """Return what can be injected, and what is on."""
        return FaultsDetail(faults=[kind.info() for kind in kinds().values()], on=[fault.text for fault in self._on])

    def close(self) -> None:
        """Undo what was done from outside, so that nothing stays frozen or limited, and close the socket."""
        for fault in self._on:
            if fault.undo is not None:
                with contextlib.suppress(OSError, FaultError):
                    fault.undo()
        self.socket.close()

    def begin(self, command: Command) -> list[Reply]:
        """Carry out a `Fault` or `ClearFaults`; return the answers so far. The end may come by `answers`."""
        try:
            if isinstance(command.verb, Fault):
                return self._inject(command, command.verb)
            return self._clear(command)
        except FaultError as error:
            return [Refused(id=command.id, code="INVALID", text=str(error))]
        except OSError as error:
            return [Refused(id=command.id, code="FAILED", text=f"{_name(command)}: {error.strerror or error}")]

    def answers(self) -> list[Reply]:
        """Take what stages have answered; return the commands that have come to their end by it."""
        ends: list[Reply] = []
        while self.socket.poll(0):
            try:
                done = self._codec.decode(self.socket.recv_multipart()[-1])
            except ProtocolError:
                continue
            waiting = self._open.get(done.id) if isinstance(done, Done) else None
            if waiting is None or not isinstance(done, Done):
                continue
            waiting.missing.discard(done.stage)
            waiting.texts += [text for text in (done.text, done.error) if text]
            waiting.failed |= bool(done.error)
            if not waiting.missing:
                ends.append(self._end(waiting))
        return ends

    def expire(self, now: float) -> list[Reply]:
        """Return the ends of commands that some stage has not answered in time."""
        late = [waiting for waiting in self._open.values() if waiting.deadline < now]
        for waiting in late:
            names = ", ".join(str(stage) for stage in sorted(waiting.missing))
            waiting.texts.append(f"the fault thread of stage {names} gave no answer")
            waiting.failed = True
        return [self._end(waiting) for waiting in late]

    # --- one command ----------------------------------------------------------------------------------------

    def _inject(self, command: Command, verb: Fault) -> list[Reply]:
        kind = find(verb.kind)
        kind.check(verb.stage, self._config.stages)
        on = _On(kind, verb.stage, None)
        if command.dry_run:
            text = f"{on.text}: {kind.does}"
            return [Outcome(id=command.id, op="", state="planned", text=text, plan=[text])]
        target = Target(self._config, verb.stage, self._pids)
        if kind.how == "outside":
            on.undo = kind.act(target)
        elif kind.before is not None:
            on.undo = kind.before(target)
        self._on.append(on)
        if kind.how == "outside":
            text = f"{on.text} is done, from outside"
            return [Outcome(id=command.id, op=_op(command), state="applied", text=text)]
        assert verb.stage is not None  # only stages have points
        stages = kind.stages(verb.stage, self._config.stages)
        return self._tell(command, stages, Inject(command.id, kind.name, verb.stage), [])

    def _clear(self, command: Command) -> list[Reply]:
        if command.dry_run:
            text = "clear " + (", ".join(fault.text for fault in self._on) or "nothing: no fault is on")
            return [Outcome(id=command.id, op="", state="planned", text=text, plan=[text])]
        cleared, left = [], []
        for fault in self._on:
            if not fault.kind.clears:
                left.append(fault)
                continue
            if fault.undo is not None:
                fault.undo()
            if fault.kind.how == "outside":
                cleared.append(fault)
        inside = [fault for fault in self._on if fault.kind.how != "outside" and fault.stage is not None]
        texts = ["cleared " + ", ".join(fault.text for fault in cleared)] if cleared else []
        texts += [f"{fault.text} cannot be cleared" for fault in left if fault.kind.how == "outside"]
        self._on = left
        stages = {at for fault in inside for at in fault.kind.stages(fault.stage or 0, self._config.stages)}
        alive = [stage for stage in sorted(stages) if self._pids("stage", stage) is not None]
        if not alive:
            text = "; ".join(texts) or "no fault is on"
            return [Outcome(id=command.id, op=_op(command), state="applied", text=text)]
        return self._tell(command, alive, Lift(command.id), texts)

    def _tell(self, command: Command, stages: Sequence[int], message: Inject | Lift, texts: list[str]) -> list[Reply]:
        waiting = _Open(command, set(stages), time.monotonic() + ANSWER_S, texts)
        self._open[command.id] = waiting
        for stage in stages:
            try:
                self.socket.send_multipart([f"f{stage}".encode(), encode(message)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                waiting.missing.discard(stage)
                waiting.failed = True
                waiting.texts.append(f"the fault thread of stage {stage} cannot be reached: {error.strerror}")
        op = Accepted(id=command.id, op=_op(command))
        return [op] if waiting.missing else [op, self._end(waiting)]

    def _end(self, waiting: _Open) -> Outcome:
        command = waiting.command
        self._open.pop(command.id, None)
        text = "; ".join(waiting.texts) or "done"
        return Outcome(id=command.id, op=_op(command), state="failed" if waiting.failed else "applied", text=text)


def _name(command: Command) -> str:
    return "clear" if isinstance(command.verb, ClearFaults) else getattr(command.verb, "kind", "fault")


def _op(command: Command) -> str:
    return f"g-{command.id[-8:]}"
