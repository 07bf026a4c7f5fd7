"""`python -m ppengine.core --engine RUN_DIR/engine.json`: sockets and turns of the event loop."""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from ppengine.checkpoint.model_spec import read_spec
from ppengine.common import garbage
from ppengine.common.begin_process import begin
from ppengine.common.child_process import CRASHED
from ppengine.common.cluster import node_accepts
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.curve import NODES
from ppengine.common.debug_attach import observed, stack_file
from ppengine.common.one_line import one_line
from ppengine.common.refusal_log import RefusalLog
from ppengine.common.sockets import NOBLOCK, Bindings, readable
from ppengine.common.zap import ZapHandler
from ppengine.core.child_sockets import ChildSockets
from ppengine.core.engine import Engine
from ppengine.core.front import Front, FrontDesk
from ppengine.core.journal import Journal
from ppengine.core.journal_state import restore
from ppengine.core.shadow_check import IDENTITY
from ppengine.core.turn_watch import TurnWatch
from ppengine.protocol.facts import Fact
from ppengine.protocol.frames import Codec, ProtocolError, encode
from ppengine.protocol.kept_files import read_end
from ppengine.protocol.place import Place
from ppengine.protocol.reports import Recall
from ppengine.protocol.severity import log_level
from ppengine.protocol.snapshot import Event
from ppengine.protocol.stage_lifecycle import EdgeAddress, NewGeneration, Shutdown
from ppengine.protocol.steps import FromStage
from ppengine.protocol.store_messages import ToStore

if TYPE_CHECKING:
    from ppengine.drills.stage_faults import FaultThread  # imported with --allow-faults alone

log = logging.getLogger("ppengine.core")

LONGEST_WAIT_S = 0.2
"""Seconds between two turns at most: signals and state queries are served then, however rare reports are."""
_UNHURRIED = "request."
"""Prefix of the events that go with the next report: requests may end hundreds of times a second."""


class Loop:
    """The one thread of the core: polls, lets the engine take a turn, reports."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._config = config
        self._steps = self._socket(context, zmq.ROUTER)
        self._front = Front(self._socket(context, zmq.ROUTER))
        # A fact is sent once, so the queue has no limit. Reports go there only with a lost stage.
        self._collect = self._socket(context, zmq.PUSH, most=0)
        self._report = self._socket(context, zmq.PUSH)
        # A restarted stage or gateway connects under the name of its predecessor.
        self._steps.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._front.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._children = ChildSockets(partial(self._socket, context))
        self._bindings = Bindings()
        bound = {**self._children.routers, "steps": self._steps, "front": self._front.socket}
        for name, socket in bound.items():
            self._bindings.bind(socket, config.endpoint(name))
        if config.cluster is not None:
            accepts = {NODES: node_accepts(Path(config.run_dir))}
            self._zap = ZapHandler(context, accepts, RefusalLog(log))
            config.listen_for_nodes(self._steps, "steps")
            if config.store_roles:
                config.listen_for_nodes(self._children.routers["stores"], "stores")
        self._collect.connect(config.endpoint("collect"))
        self._report.connect(config.endpoint("report"))
        self._clock = time.monotonic
        self._dropped = 0
        self._hurried = False
        """Whether the turn has events that do not wait for the next report."""
        self._lost_stage = False
        """Whether a report goes before them."""
        self._from_stage = Codec(FromStage)
        spec = read_spec(Path(config.model_path))
        folder = Path(config.run_dir)
        self.engine = Engine(
            config, spec, send_step=self._send_step, reply=self._front.reply, happened=self._happened,
            send_shadow=self._send_shadow, send_grammar=partial(self._children.send, "grammar"),
            send_store=self._send_store,
            start_stage=self._front.start_stage,
            notify_stage=self._notify_stage, note=self._note, store=Journal(folder),
            restored=restore(folder), clock=self._clock,
        )  # fmt: skip
        places = self.engine.stages.places
        self._identities = [(_identity("s", place), place.stage == places[-1].stage) for place in places]
        """Step loops of the places, and whether each is of the last stage."""
        self._desk = FrontDesk(self._front, self.engine, config.max_model_len, self._recall)
        self._watch = TurnWatch()
        self._faults = self._begin_faults(context)

    def _begin_faults(self, context: zmq.Context[Any]) -> FaultThread | None:
        """Return the thread of faults on demand, started. Without the option, its module is not even imported."""
        if not self._config.allow_faults:
            return None
        from ppengine.drills.fault_points import CoreParts, Points
        from ppengine.drills.stage_faults import FaultThread

        parts = CoreParts(self.engine, self._children.routers["stores"])
        thread = FaultThread(context, self._config, Points(), parts)
        thread.start()
        return thread

    def run(self) -> None:
        """Take turns until the engine leaves."""
        garbage.settle()
        poller = zmq.Poller()
        poller.register(self._steps, zmq.POLLIN)
        poller.register(self._front.socket, zmq.POLLIN)
        for router in self._children.routers.values():
            poller.register(router, zmq.POLLIN)
        interval = 1.0 / self._config.profile.console.publish_hz
        report_at = self._clock()
        self._watch.start()
        while not self.engine.health.leaving:
            deadline = min(report_at, self._clock() + LONGEST_WAIT_S)
            deadline = min(deadline, self.engine.outputs.next_deadline() or deadline)
            deadline = min(deadline, self.engine.tiers.next_deadline or deadline)
            deadline = min(deadline, self.engine.constraints.next_deadline or deadline)
            wait_s = 0.0 if self.engine.unfinished else deadline - self._clock()
            self._watch.end()
            woken = poller.poll(max(0, math.ceil(wait_s * 1e3)))
            self._watch.begin()
            news = self._children.drain(self.engine)
            call = self._drain_stages() or readable(self._front.socket) or news or self.engine.unfinished
            if woken and not call:
                continue  # Other stages are still busy with these steps.
            self.engine.constraints.deliver()
            if self._desk.drain():
                # That may have taken long; messages of the stages from meanwhile must not look late.
                self._drain_stages()
            self._turn()
            now = self._clock()
            if now >= report_at:
                report_at = max(report_at + interval, now)
                self._send_events(self._report)
                self._send_report(self._report)
            if made := self._bindings.look():
                self.engine.event("folder.remade", f"the core has bound its sockets again: {', '.join(made)}")
        self._close()

    def _turn(self) -> None:
        """Let the engine take a turn, write it to the journal, and only then let it be seen outside."""
        engine = self.engine
        self._desk.serve_later()
        engine.advance()
        engine.outputs.serve_waiters()
        self._desk.answer_waiters()
        engine.commit()
        self._front.flush()
        if self._lost_stage:
            # The stage may be back before the next report: its findings go first, over the same socket.
            self._send_report(self._collect)
        if self._hurried:
            self._send_events(self._collect)
        self._lost_stage = self._hurried = False

    # --- sockets --------------------------------------------------------------------------------------------

    @staticmethod
    def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, most: int = 100) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0 if kind == zmq.ROUTER else most)
        return socket

    def _drain_stages(self) -> bool:
        """Route the messages of the stages; return whether one calls for a turn."""
        news = False
        while readable(self._steps):
            frames = self._steps.recv_multipart(NOBLOCK)
            try:
                news = self.engine.stage_messages.take(self._from_stage.decode(frames[-1])) or news
            except ProtocolError as error:
                self.engine.event("protocol.error", f"from a stage: {error}")
        return news

    def _send_step(self, others: bytes, last: bytes) -> None:
        for identity, is_last in self._identities:
            if payload := last if is_last else others:
                self._steps.send_multipart([identity, payload], NOBLOCK)

    def _send_shadow(self, payload: bytes) -> None:
        self._steps.send_multipart([IDENTITY, payload], NOBLOCK)

    def _send_store(self, place: Place, message: ToStore) -> None:
        self._children.send("stores", place.store_role.encode(), encode(message))

    def _notify_stage(self, place: Place, message: NewGeneration | EdgeAddress | Shutdown) -> None:
        """Send `message` to the step loop, and to the control thread in case the step loop is stuck."""
        for thread in ("s", "c"):
            self._steps.send_multipart([_identity(thread, place), encode(message)], NOBLOCK)

    def _happened(self, event: Event) -> None:
        if not event.kind.startswith("request.") and not event.text.startswith("submit "):
            log.log(log_level(event), "%s%s", event.text, f", by {event.by}" if event.by else "")
        self._hurried = self._hurried or not event.kind.startswith(_UNHURRIED)
        self._lost_stage = self._lost_stage or event.kind == "stage.lost"

    def _send_report(self, socket: zmq.Socket[bytes]) -> None:
        report = self.engine.reporter.build(self._dropped)
        report.held = self._watch.figures()
        self.engine.metrics.take_tiers(report.tiers)
        self._push(socket, report)

    def _send_events(self, socket: zmq.Socket[bytes]) -> None:
        for happened in self.engine.feed.pending():
            self._push(socket, happened)

    def _note(self, fact: Fact) -> None:
        self._push(self._collect, fact)

    def _recall(self, question: Recall) -> None:
        """Push everything again that a new gateway cannot know."""
        self.engine.commit()
        for message in (*self.engine.feed.facts(), *self.engine.feed.after(question.after)):
            self._push(self._collect, message)
        self._send_report(self._collect)
        self._push(self._collect, self.engine.recalled(question, self.engine.feed.newest))

    def _push(self, socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
        try:
            socket.send(encode(message), NOBLOCK)
        except zmq.Again:
            self._dropped += 1

    def _close(self) -> None:
        self._watch.close()
        if self._faults is not None:
            self._faults.close()
        self.engine.constraints.close()
        self._turn()
        self._send_events(self._report)
        self._send_report(self._report)
        self.engine.checks.shadow.stop()
        for place in self.engine.stages.places:
            self._notify_stage(place, Shutdown(self.engine.recovery.generation))
        children = self._children.routers.values()
        for socket in (self._steps, self._front.socket, *children, self._collect, self._report):
            socket.close(linger=500)


def _identity(thread: str, place: Place) -> bytes:
    """Return the routing id of a stage's step loop (`s`) or of its control thread (`c`)."""
    return f"{thread}{place.stage}.{place.rank}".encode()


def main() -> int:
    """Run the core until it must stop. Exit code 0: stopped; 1: could not start or go on; 70: unexpected error."""
    parser = argparse.ArgumentParser(prog="ppengine.core")
    _, config = begin(parser)
    with observed(stack_file(config.run_dir, None)):
        return _run(config)


def _why_signalled(engine_id: str) -> str:
    """Return the reason that the supervisor has noted before it signals its processes, if the engine has failed."""
    end = read_end(engine_id)
    return "signal" if end is None or end.clean else end.reason


def _run(config: EngineConfig) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        loop = Loop(config, context)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.engine.health.leave(_why_signalled(config.id)))
    log.info("core of %s (%s) started, waiting for %d stages", config.name, config.id, config.stages)
    try:
        loop.run()
    except Exception as error:
        log.exception("the core ends by an unexpected error")
        print(f"error: {type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        # Its sockets would wait for peers; another core is about to bind their names.
        os._exit(CRASHED)
    log.info("leaving: %s", loop.engine.health.leaving)
    context.term()
    if loop.engine.health.failed:
        print(f"error: {loop.engine.health.failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
