"""The struck side: stand-ins at the points of a stage, and a thread that begins and ends faults for the gateway."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from ppengine.common.config import EngineConfig
from ppengine.common.ring import RingWriter
from ppengine.drills import fault_points as at
from ppengine.drills.fault_messages import Done, Inject, Lift, ToFaults, identity
from ppengine.drills.registry import FaultError, Kind, find
from ppengine.protocol.frames import Codec, ProtocolError, encode
from ppengine.protocol.place import Place

_POLL_MS = 100
_ANSWER_S = 0.05


class StageFaults:
    """Puts the stage's parts behind stand-ins: the socket once, runner and edges in each generation."""

    def __init__(
        self, config: EngineConfig, place: Place, context: zmq.Context[Any], control: threading.Thread, ring: RingWriter
    ) -> None:
        self._points = at.Points()
        self._parts = at.StageParts(place.stage, config.stages, ring, control, Path(config.run_dir), rank=place.rank)
        self._thread = FaultThread(context, config, self._points, self._parts)

    def socket(self, socket: Any) -> Any:
        """Return the step loop's socket behind a stand-in; closing it ends the fault thread."""
        return at.SocketPoint(socket, self._points, self._thread.close)

    def runner(self, runner: Any) -> Any:
        """Return `runner` behind a stand-in. The first call starts the fault thread."""
        points, parts = self._points, self._parts
        parts.runner, parts.receiver, parts.sender = runner, runner._receiver, runner.outgoing
        parts.buffers = buffers = getattr(runner, "buffers", None)
        if runner._receiver is not None:
            runner._receiver = at.StandIn(runner._receiver, points, take="receive", expect="expect")
        if parts.sender is not None:
            parts.sender.put = partial(points.through, "send", parts.sender.put)
        group = runner._group
        if group.size > 1 and "all_reduce" not in vars(group):
            # For life, as the group is.
            group.all_reduce = partial(points.through, "reduce", group.all_reduce)
        runner._model = at.StandIn(runner._model, points, run="forward")
        if buffers is not None and not any(isinstance(graphs, at.GraphsPoint) for graphs in buffers.graphs):
            # For life, as the buffers are.
            buffers.graphs = [at.GraphsPoint(graphs, points) for graphs in buffers.graphs]
        segments = getattr(runner.cache, "_segments", None)
        if segments is None:
            runner.cache = at.StandIn(runner.cache, points, map_blocks="map")
        elif not isinstance(segments, at.StandIn):
            # For life, as the cache is. Every change of the mapping begins with `shrink`.
            runner.cache._segments = at.StandIn(segments, points, shrink="map")
        runner._swap = at.SwapPoint(runner._swap, points)
        if not self._thread.ident:
            self._thread.start()
        return at.StandIn(runner, points, execute="step")


class _Begun(NamedTuple):
    """A fault that is on, by the id of its `Inject`. `undo` ends one that has no point."""

    id: str
    kind: Kind
    fault: at.Fault | None
    undo: Callable[[], None] | None


class FaultThread(threading.Thread):
    """Takes `Inject` and `Lift` from the gateway. It works while the step loop is stuck, except without the GIL."""

    def __init__(
        self,
        context: zmq.Context[Any],
        config: EngineConfig,
        points: at.Points,
        parts: at.StageParts | at.CoreParts,
    ) -> None:
        super().__init__(name="faults", daemon=True)
        self._points, self._parts = points, parts
        self._closed = threading.Event()
        self._on: list[_Begun] = []
        self._deadly: list[tuple[at.Fault, str]] = []
        self._context, self._config = context, config

    def run(self) -> None:
        """Serve until closed."""
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity(Place(self._parts.stage, self._parts.rank)))
        socket.setsockopt(zmq.LINGER, 0)
        self._config.connect(socket, "faults")
        codec = Codec(ToFaults)
        try:
            while not self._closed.is_set():
                if socket.poll(_POLL_MS):
                    for done in self._serve(codec, _received(socket)):
                        socket.send(encode(done))
                    self._kill()
        finally:
            socket.close()

    def close(self) -> None:
        """End the thread; returns within a poll."""
        self._closed.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def _serve(self, codec: Codec, bodies: list[bytes]) -> Iterator[Done]:
        """Follow messages, and yield an answer to each. An `Inject` that a later one takes back does not begin."""
        stage, rank, messages = self._parts.stage, self._parts.rank, list[Any]()
        for body in bodies:
            try:
                messages.append(codec.decode(body))
            except ProtocolError as error:
                yield Done("", stage, error=str(error), rank=rank)
        taken_back = {message.of for message in messages if isinstance(message, Lift)}
        for message in messages:
            if isinstance(message, Lift):
                self._lift(message.of)
                yield Done(message.id, stage, rank=rank)
            elif isinstance(message, Inject) and message.id not in taken_back:
                try:
                    text = self._inject(message.id, find(message.kind), message.stage)
                    yield Done(message.id, stage, text=text, rank=rank)
                except FaultError as error:
                    yield Done(message.id, stage, error=str(error), rank=rank)

    def _inject(self, number: str, kind: Kind, aim: int) -> str:
        if kind.gpu and self._parts.buffers is None:
            raise FaultError(f"{kind.name} strikes a GPU, and {self._parts.name} has none")
        if kind.how == "arm":
            self._on.append(_Begun(number, kind, None, kind.act(self._parts)))
            return f"{kind.name} at {self._parts.name} is on"
        assert isinstance(self._parts, at.StageParts)  # the core has no points
        fault, point = at.Fault(kind, self._parts, aim), self._point(kind, self._parts)
        if kind.prepare is not None:
            fault.tool = kind.prepare(self._parts)
        self._on.append(_Begun(number, kind, fault, None))
        if kind.effect == "death":
            self._deadly.append((fault, point))
        else:
            self._points.add(fault, point)
        return f"{kind.name} strikes {self._parts.name} at its next {point}"

    def _kill(self) -> None:
        """Let deadly faults strike, after the answer has had time to leave."""
        while self._deadly:
            self._closed.wait(_ANSWER_S)
            self._points.add(*self._deadly.pop())

    @staticmethod
    def _point(kind: Kind, parts: at.StageParts) -> str:
        """Return the kind's point in this stage: the first stage receives only steps, a last one may send nothing."""
        if kind.point == "receive" and parts.receiver is None:
            return "step"
        if kind.point == "send" and parts.sender is None:
            raise FaultError(f"{kind.name} strikes a send, and {parts.name} sends to no other stage")
        return kind.point

    def _lift(self, number: str) -> None:
        """End the fault of one `Inject`, or all if there is no number, as far as they can be ended."""
        lifted = [entry for entry in self._on if entry.kind.clears and number in ("", entry.id)]
        self._on = [entry for entry in self._on if entry not in lifted]
        for entry in lifted:
            if entry.fault is not None:
                self._points.lift(entry.fault)
            if entry.undo is not None:
                entry.undo()


def _received(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Return the messages that are here: several, if the process was stopped."""
    bodies = [socket.recv()]
    while socket.poll(0):
        bodies.append(socket.recv())
    return bodies
