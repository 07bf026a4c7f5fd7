"""The gateway's side: executes a fault command, from outside or by a message to the stage, and answers it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from ppengine.common.config import EngineConfig
from ppengine.drills.fault_messages import CORE, Done, FromFaults, Inject, Lift, identity
from ppengine.drills.registry import FaultError, Kind, find, kinds
from ppengine.drills.target import Pids, Target
from ppengine.protocol.control import Accepted, Command, Outcome, Refused
from ppengine.protocol.frames import Codec, ProtocolError, encode
from ppengine.protocol.inspection import FaultsDetail
from ppengine.protocol.place import Place
from ppengine.protocol.verbs import ClearFaults, Fault

ANSWER_S = 3.0
"""Time limit in seconds for a stage's fault thread; without the GIL it never answers."""
Reply = Accepted | Outcome | Refused


@dataclass
class _On:
    """A fault in process `pid`. `undo` reverts its part from outside."""

    kind: Kind
    stage: int | None
    rank: int
    pid: int | None
    name: str
    """Name of the struck process."""
    undo: Callable[[], None] | None = None

    def take_back(self) -> None:
        """Revert the part from outside, as far as the process still exists."""
        if self.undo is not None:
            with contextlib.suppress(OSError, FaultError):
                self.undo()

    @property
    def text(self) -> str:
        return f"{self.kind.name} at {self.name}"

    def places(self, stages: int) -> list[Place]:
        """Return the places whose fault threads it needs: an edge connects equal ranks."""
        if self.kind.on == "core":
            return [CORE]
        return [Place(stage, self.rank) for stage in self.kind.stages(self.stage or 0, stages)]


@dataclass
class _Open:
    """A command that waits for the answers of stages."""

    command: Command
    missing: set[Place]
    deadline: float
    texts: list[str] = field(default_factory=list)
    failed: bool = False
    begins: _On | None = None
    """The fault of the command; it is on unless the command fails."""


class FaultDesk:
    """The faults of one engine. Poll `socket`; `answers` and `expire` return the ends of commands."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], pids: Pids) -> None:
        self._config, self._pids = config, pids
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A killed stage's successor takes its name, maybe before the old socket is known to be gone.
        self.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.socket.bind(config.endpoint("faults"))
        config.listen_for_nodes(self.socket, "faults")
        self._codec = Codec(FromFaults)
        self._open: dict[str, _Open] = {}
        self._on: list[_On] = []

    def listing(self) -> FaultsDetail:
        """Return the kinds that can be injected, and the faults that are on."""
        on = [fault.text for fault in self._on if self._lives(fault)]
        return FaultsDetail(faults=[kind.info() for kind in kinds().values()], on=on)

    def close(self) -> None:
        """Revert all parts from outside, so that nothing stays frozen or limited, and close the socket."""
        for fault in self._on:
            fault.take_back()
        self.socket.close()

    def begin(self, command: Command) -> list[Reply]:
        """Execute a `Fault` or `ClearFaults`; return the answers so far. The end may come by `answers`."""
        try:
            if isinstance(command.verb, Fault):
                return self._inject(command, command.verb)
            return self._clear(command)
        except FaultError as error:
            return [Refused(id=command.id, code="INVALID", text=str(error))]
        except OSError as error:
            return [Refused(id=command.id, code="FAILED", text=f"{_name(command)}: {error.strerror or error}")]

    def answers(self) -> list[Reply]:
        """Take the answers of stages; return the ends of the commands that they complete."""
        ends: list[Reply] = []
        while self.socket.poll(0):
            try:
                done = self._codec.decode(self.socket.recv_multipart()[-1])
            except ProtocolError:
                continue
            waiting = self._open.get(done.id) if isinstance(done, Done) else None
            if waiting is None or not isinstance(done, Done):
                continue
            waiting.missing.discard(Place(done.stage, done.rank))
            waiting.texts += [text for text in (done.text, done.error) if text]
            waiting.failed |= bool(done.error)
            if not waiting.missing:
                ends.append(self._end(waiting))
        return ends

    def expire(self, now: float) -> list[Reply]:
        """Return the ends of commands whose stage is gone, or has not answered in time."""
        struck = []
        for waiting in self._open.values():
            fault = waiting.begins
            gone = fault is not None and fault.pid is not None and not self._lives(fault)
            if fault is None or fault.stage is None or not gone:
                continue
            place = Place(fault.stage, fault.rank)
            if place not in waiting.missing:
                continue
            # It killed the stage before the fault thread had answered, as such a fault should.
            waiting.texts.append(f"{fault.text}: its process ended before it answered")
            waiting.missing.discard(place)
            if not waiting.missing:
                struck.append(waiting)
        late = [one for one in self._open.values() if one.missing and one.deadline < now]
        for waiting in late:
            names = ", ".join(map(self._text, sorted(waiting.missing)))
            waiting.texts.append(f"the fault thread of {names} gave no answer")
            waiting.failed = True
        return [self._end(waiting) for waiting in struck + late]

    # --- one command ----------------------------------------------------------------------------------------

    def _inject(self, command: Command, verb: Fault) -> list[Reply]:
        kind = find(verb.kind)
        groups = self._config.groups
        kind.check(verb.stage, groups, verb.rank)
        place = None if verb.stage is None else Place(verb.stage, verb.rank)
        name = kind.on if place is None else place.store_role if kind.on == "store" else groups.text(place)
        on = _On(kind, verb.stage, verb.rank, self._pids(*kind.process(place)), name)
        if command.dry_run:
            text = f"{on.text}: {kind.does}"
            return [Outcome(id=command.id, op="", state="planned", text=text, plan=[text])]
        target = Target(self._config, verb.stage, self._pids, verb.rank)
        if kind.how == "outside":
            on.undo = kind.act(target)
        elif kind.before is not None:
            on.undo = kind.before(target)
        self._on.append(on)
        if kind.how == "outside":
            text = f"{on.text} is done, from outside"
            return [Outcome(id=command.id, op=_op(command), state="applied", text=text)]
        waiting = _Open(command, set(), time.monotonic() + ANSWER_S, begins=on)
        aim = CORE.stage if verb.stage is None else verb.stage
        return self._send(waiting, on.places(self._config.stages), Inject(command.id, kind.name, aim))

    def _clear(self, command: Command) -> list[Reply]:
        on = self._on
        if command.dry_run:
            text = "clear " + (", ".join(fault.text for fault in on) or "nothing: no fault is on")
            return [Outcome(id=command.id, op="", state="planned", text=text, plan=[text])]
        ended = [fault for fault in on if not self._lives(fault)]
        cleared = [fault for fault in on if fault.kind.clears and fault not in ended]
        self._on = [fault for fault in on if not fault.kind.clears and fault not in ended]
        for fault in ended + cleared:
            fault.take_back()
        waiting = _Open(command, set(), time.monotonic() + ANSWER_S, failed=bool(self._on))
        waiting.texts += [f"{fault.text} has ended its process" for fault in ended]
        waiting.texts += [f"{fault.text} cannot be cleared" for fault in self._on]
        waiting.texts += ["cleared " + ", ".join(fault.text for fault in cleared)] if cleared else []
        inside = [fault for fault in cleared if fault.kind.how != "outside"]
        places = {place for fault in inside for place in fault.places(self._config.stages)}
        return self._send(waiting, sorted(places), Lift(command.id))

    def _lives(self, fault: _On) -> bool:
        place = None if fault.stage is None else Place(fault.stage, fault.rank)
        return fault.pid is not None and self._pids(*fault.kind.process(place)) == fault.pid

    def _send(self, waiting: _Open, places: Sequence[Place], message: Inject | Lift) -> list[Reply]:
        waiting.missing.update(places)
        self._open[waiting.command.id] = waiting
        for place in places:
            try:
                self.socket.send_multipart([identity(place), encode(message)], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                waiting.missing.discard(place)
                waiting.failed = True
                name = self._text(place)
                waiting.texts.append(f"the fault thread of {name} cannot be reached: {error.strerror}")
        accepted = Accepted(id=waiting.command.id, op=_op(waiting.command))
        return [accepted] if waiting.missing else [self._end(waiting)]

    def _text(self, place: Place) -> str:
        return "the core" if place == CORE else self._config.groups.text(place)

    def _end(self, waiting: _Open) -> Outcome:
        command = waiting.command
        self._open.pop(command.id, None)
        if waiting.failed and waiting.begins in self._on:
            self._on.remove(waiting.begins)
            waiting.begins.take_back()
            # One of several stages may have begun it, and a stopped one would do so later.
            for place in waiting.begins.places(self._config.stages):
                with contextlib.suppress(zmq.ZMQError):
                    message = Lift(command.id, of=command.id)
                    self.socket.send_multipart([identity(place), encode(message)], zmq.NOBLOCK)
        text = "; ".join(waiting.texts) or "no fault is on"
        return Outcome(id=command.id, op=_op(command), state="failed" if waiting.failed else "applied", text=text)


def _name(command: Command) -> str:
    return "clear" if isinstance(command.verb, ClearFaults) else getattr(command.verb, "kind", "fault")


def _op(command: Command) -> str:
    return f"g-{command.id[-8:]}"
