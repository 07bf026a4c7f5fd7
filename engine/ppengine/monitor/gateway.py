"""The gateway: one process an engine, one loop. Owns the public sockets, the events, the audit log and the verdicts.

`python -m ppengine.monitor.gateway --engine RUN_DIR/engine.json --lifeline FD`. Consoles reach the engine through it
alone; nothing that they do, or leave undone, makes it wait. When the supervisor is gone it clears away what is left.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from ppengine import lifeline, logs
from ppengine.config import EngineConfig
from ppengine.monitor import blackbox, departure, envelope
from ppengine.monitor.audit import AuditError, AuditLog
from ppengine.monitor.bulk import NO_FAULTS, BulkDesk
from ppengine.monitor.collector import Collector
from ppengine.monitor.commands import CommandDesk
from ppengine.monitor.events import EventLog
from ppengine.monitor.probe import NONCE, StackProbe
from ppengine.monitor.publisher import Answerer, Publisher
from ppengine.monitor.questions import LocalAnswers
from ppengine.monitor.sessions import Session, Sessions
from ppengine.monitor.sockets import Sockets, drain, send
from ppengine.protocol import frames
from ppengine.protocol.control import (
    Accepted,
    Command,
    Deferred,
    Failed,
    Fetch,
    Fetched,
    FromBulk,
    Hello,
    Inspect,
    Inspected,
    Outcome,
    Ping,
    Pong,
    Refused,
    Replay,
    ToBulk,
    ToGateway,
    Welcome,
)
from ppengine.protocol.inspection import FaultsDetail
from ppengine.protocol.offline import AbortMany, FromFront
from ppengine.protocol.reports import ToCollector
from ppengine.protocol.snapshot import Event

if TYPE_CHECKING:
    from ppengine.faults.desk import FaultDesk

log = logging.getLogger("ppengine.gateway")

JUDGE_S = 0.25
"""The verdict is made anew with every report of an agent, and by the clock when none comes for so long."""
_JUDGE_LEAST_S = 0.05
SLOW_S, _SLACK_S = 1.0, 0.1
"""Once a second, but in step with the judgements: one turn of the loop for both, and a picture that was just judged."""
_LOGGED = ("audit.", "console.", "op.refused", "verdict.")
"""Events that the gateway's log tells of; the core's has those of the core."""
_REFRESH_S = 0.05
"""A new subscriber gets a snapshot at once, but no more often than this."""


class Gateway:
    """Everything between the engine and its consoles."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open sockets and the audit log. Raises OSError, zmq.ZMQError, AuditError."""
        self._config = config
        run_dir = Path(config.run_dir)
        audit = AuditLog(run_dir, config.name, config.id)
        self._sockets = Sockets(context, config)
        self._publisher = Publisher(self._sockets.state, config.id, config.epoch)
        self._answer_control = Answerer(self._sockets.control, config.id, config.epoch)
        answer_bulk = Answerer(self._sockets.bulk, config.id, config.epoch)
        self._events = EventLog(self._publish_event)
        self._sessions = Sessions(self._on_session)
        self._collector = Collector(config, self._events)
        self._commands = CommandDesk(
            config.epoch, audit, self._events, self._sessions, self._answer_control, self
        )  # fmt: skip
        self._box = blackbox.BlackBox(self._ask_agent)
        local = LocalAnswers(config, lambda: self._box.kept, self._collector.findings)
        self._bulk = BulkDesk(
            self._events, local.answer, answer_bulk, self._ask_core, self._ask_agent, self._list_faults
        )  # fmt: skip
        self._answer_bulk = answer_bulk
        self._probe = StackProbe(self._ask_agent)
        self._to_gateway, self._to_bulk = frames.Codec(ToGateway), frames.Codec(ToBulk)
        self._to_collector = frames.Codec(ToCollector)
        self._from_front, self._from_agent = frames.Codec(FromFront), frames.Codec(FromBulk)
        self._faults = self._fault_desk(context)
        self._refresh: set[bytes] = set()
        self._published = 0.0
        self._spacing = min(_REFRESH_S, 0.5 / config.profile.console.publish_hz)
        self._core_was_there = False

    def _fault_desk(self, context: zmq.Context[zmq.Socket[bytes]]) -> FaultDesk | None:
        """Return who breaks things on demand; without `--allow-faults`, nothing of it is so much as imported."""
        if not self._config.allow_faults:
            return None
        from ppengine.faults.desk import FaultDesk

        return FaultDesk(self._config, context, self._collector.pid_of)

    # --- the loop -------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set."""
        poller = zmq.Poller()
        handlers = {
            self._sockets.state: self._on_state,
            self._sockets.control: self._on_control,
            self._sockets.bulk: self._on_bulk,
            self._sockets.front: self._on_front,
            self._sockets.collect: self._on_collect,
            self._sockets.agent: self._on_agent,
        }
        if self._faults is not None:
            handlers[self._faults.socket] = self._on_faults
        for socket in handlers:
            poller.register(socket, zmq.POLLIN)
        period = 1.0 / self._config.profile.console.publish_hz
        now = time.monotonic()
        judge_due, fast_due, slow_due = now, now, now
        while not stop.is_set():
            wait = min(judge_due, slow_due + _SLACK_S) - time.monotonic()
            if self._publisher.wanted(frames.TOPIC_SNAPSHOT):
                wait = min(wait, fast_due - time.monotonic())
            if self._refresh:
                wait = min(wait, self._published + self._spacing - time.monotonic())
            for socket, _ in poller.poll(max(0, math.ceil(wait * 1e3))):
                handlers[socket]()
            now = time.monotonic()
            judging = now >= judge_due or (self._collector.agent_news and now >= judge_due - JUDGE_S + _JUDGE_LEAST_S)
            if judging:
                judge_due = now + JUDGE_S
                self._judge()
            if now >= fast_due and self._publisher.wanted(frames.TOPIC_SNAPSHOT):
                fast_due = max(fast_due + period, now)
                self._refresh.add(frames.TOPIC_SNAPSHOT)
            if now >= slow_due + _SLACK_S or (judging and now >= slow_due - _SLACK_S):
                slow_due = now + SLOW_S
                self._refresh.add(frames.TOPIC_SNAPSHOT_SLOW)
                self._publisher.hugz(self._collector.step(), self._collector.core_age_ms())
                self._bulk.expire(now)
                self._on_faults()
            self._publish(now)

    def _judge(self) -> None:
        self._take_report()
        changed = self._collector.judge(self._commands.stopping, self._probe.stacks)
        # The rings before the stacks: taking those stops a stage for a moment.
        waits = self._collector.waits() if self._collector.verdicts else []
        self._box.look(self._collector.verdicts, waits, self._collector.retired())
        self._probe.look(self._collector.verdicts, self._collector.pids())
        if changed:
            # What an operator must see at once does not wait for the second to be full.
            self._refresh |= {frames.TOPIC_SNAPSHOT, frames.TOPIC_SNAPSHOT_SLOW}
        missing = self._collector.core_process_ended()
        if missing and self._core_was_there:
            self._commands.core_lost(missing)
        self._core_was_there = not missing

    def _publish(self, now: float) -> None:
        """Send snapshots to whoever listens; nobody listens, nothing is built."""
        if not self._refresh or now < self._published + self._spacing:
            return
        self._published = now
        topics = [topic for topic in sorted(self._refresh) if self._publisher.wanted(topic)]
        self._refresh.clear()
        consoles = self._sessions.count(now)
        if topics:
            self._take_report()
            self._publisher.snapshot(self._collector.snapshot(consoles), topics)

    def _publish_event(self, event: Event) -> None:
        if event.kind.startswith(_LOGGED):
            log.info("%s%s", f"{event.by} " if event.by else "", event.text)
        self._publisher.event(event)

    # --- consoles -------------------------------------------------------------------------------------------

    def _on_state(self) -> None:
        fresh = self._publisher.read_subscriptions()
        self._refresh |= fresh & {frames.TOPIC_SNAPSHOT, frames.TOPIC_SNAPSHOT_SLOW}

    def _on_control(self) -> None:
        for client, *parts in drain(self._sockets.control):
            try:
                head, body = envelope.open_message(parts)
                message = self._to_gateway.decode(body)
            except frames.ProtocolError as error:
                self._collector.unreadable += 1
                refusal = envelope.refusal(parts, error)
                if refusal is not None:
                    self._answer_control(client, refusal)
                continue
            now = time.monotonic()
            if isinstance(message, Hello):
                self._on_hello(client, message, now)
            elif isinstance(message, Ping):
                self._sessions.ping(client, now)
                self._take_report()
                step, age = self._collector.step(), self._collector.core_age_ms()
                self._answer_control(client, Pong(nonce=message.nonce, step=step, core_age_ms=age))
            elif isinstance(message, Command):
                self._commands.handle(client, head, message, self._sessions.get(client))

    def _on_hello(self, client: bytes, hello: Hello, now: float) -> None:
        if hello.proto_min > frames.PROTOCOL or hello.proto_max < frames.PROTOCOL_MIN:
            spoken = f"{frames.PROTOCOL_MIN} to {frames.PROTOCOL}"
            text = f"protocol {hello.proto_min} to {hello.proto_max} is not spoken here: {spoken} are"
            self._answer_control(client, Refused(id="", code="UNSUPPORTED", text=text))
            return
        session = self._sessions.hello(client, hello, now)
        welcome = Welcome(
            proto=min(frames.PROTOCOL, hello.proto_max),
            role=session.role,
            engine=self._config.id,
            name=self._config.name,
            epoch=self._config.epoch,
            event_seq=self._events.newest,
            event_oldest=self._events.oldest,
            max_frame_bytes=frames.MAX_FRAME_BYTES,
            capabilities=["snap", "snap1", "event", "replay", "fetch", "inspect"],
        )
        self._answer_control(client, welcome)

    def _on_session(self, what: str, session: Session) -> None:
        mode = " read-only" if session.role == "viewer" else ""
        self._events.say(f"console.{what}", f"{what}{mode} ({session.program})", by=session.user)
        if what == "detached" and session.requests:
            self._send_core(AbortMany(session="", requests=session.requests))
            text = f"aborted with the console of {session.user}: {', '.join(session.requests)}"
            self._events.say("request.abort_on_detach", text, by=session.user)

    def _on_bulk(self) -> None:
        for client, *parts in drain(self._sockets.bulk):
            try:
                _, body = envelope.open_message(parts)
                question = self._to_bulk.decode(body)
            except frames.ProtocolError as error:
                self._collector.unreadable += 1
                if envelope.readable(parts):
                    self._answer_bulk(client, Failed(nonce=envelope.nonce(parts), code="PROTOCOL", text=str(error)))
                continue
            if isinstance(question, Replay | Fetch | Inspect):
                self._bulk.handle(client, question)

    # --- the engine -----------------------------------------------------------------------------------------

    def _on_collect(self) -> None:
        # The core answers a command before it tells of its end: the log should say `accepted` first.
        self._on_front()
        self._take_report()
        for parts in drain(self._sockets.collect):
            self._collect(parts)

    def _take_report(self) -> None:
        """Take what the core reports. Nothing polls for it: ten times a second it would wake the loop for nothing."""
        for parts in drain(self._sockets.report):
            self._collect(parts)

    def _collect(self, parts: list[bytes]) -> None:
        try:
            self._collector.take(self._to_collector.decode(frames.split(parts, 1)[0]))
        except frames.ProtocolError:
            self._collector.unreadable += 1

    def _on_front(self) -> None:
        for parts in drain(self._sockets.front):
            self._on_answer(parts, self._from_front)

    def _on_agent(self) -> None:
        for parts in drain(self._sockets.agent):
            self._on_answer(parts, self._from_agent)

    def _on_answer(self, parts: list[bytes], codec: frames.Codec) -> None:
        try:
            message = codec.decode(frames.split(parts, 1)[0])
        except frames.ProtocolError:
            self._collector.unreadable += 1
            return
        if isinstance(message, Accepted | Deferred | Outcome | Refused):
            self._commands.on_reply(message)
        elif isinstance(message, Inspected | Failed) and message.nonce == NONCE:
            if (stacks := self._probe.take(message)) is not None:
                self._box.take_stacks(stacks)
        elif isinstance(message, Inspected | Failed) and message.nonce == blackbox.NONCE:
            self._box.take(message)
        elif isinstance(message, Fetched | Inspected | Failed):
            self._bulk.on_answer(message)

    def _send_core(self, message: msgspec.Struct) -> bool:
        return send(self._sockets.front, [frames.encode(message)])

    def _ask_core(self, question: Fetch | Inspect) -> str:
        missing = self._collector.core_missing()
        return missing or ("" if self._send_core(question) else "the engine core takes no more questions now")

    def _ask_agent(self, question: Inspect) -> str:
        if missing := self._collector.agent_missing():
            return missing
        taken = send(self._sockets.agent, [frames.encode(question)])
        return "" if taken else "the agent takes no more questions now"

    def _list_faults(self) -> FaultsDetail | None:
        return None if self._faults is None else self._faults.listing()

    def _on_faults(self) -> None:
        if self._faults is not None:
            for end in self._faults.answers() + self._faults.expire(time.monotonic()):
                self._commands.on_reply(end, core=False)

    # --- what the command desk asks of the engine (`EngineAccess`) ------------------------------------------

    def core_missing(self) -> str:
        """Return why the core cannot take a command; empty: it can."""
        return self._collector.core_missing()

    def forward(self, command: Command) -> bool:
        """Send to the core; return whether it was taken."""
        return self._send_core(command)

    def fault(self, command: Command) -> list[Accepted | Outcome | Refused]:
        """Break something on demand, or refuse to."""
        if self._faults is None:
            return [Refused(id=command.id, code="DENIED", text=NO_FAULTS)]
        return self._faults.begin(command)

    def stage_process(self, stage: int) -> tuple[int, int] | None:
        """Return (pid, start time) of a stage."""
        return self._collector.stage_process(stage)

    def supervisor_pid(self) -> int | None:
        """Return the pid of the supervisor, which is this process's parent; None if that is not so."""
        listed = self._collector.supervisor_pid()
        return listed if listed == os.getppid() else None

    # --- the end --------------------------------------------------------------------------------------------

    def leave(self, orphaned: bool) -> None:
        """Publish the end. `orphaned`: the supervisor is gone; clear away processes and files."""
        # The last answers of the core may wait here, and who has none should not have to guess.
        self._on_collect()
        self._take_report()
        self._collector.judge(self._commands.stopping)
        self._commands.core_lost("the engine stops")
        self._events.say("engine.stopped", "the supervisor is gone" if orphaned else "the gateway was told to end")
        topics = [frames.TOPIC_SNAPSHOT, frames.TOPIC_SNAPSHOT_SLOW]
        self._publisher.snapshot(self._collector.snapshot(self._sessions.count(time.monotonic()), stopped=True), topics)
        if self._faults is not None:
            self._faults.close()
        self._sockets.close(linger_ms=500)
        if orphaned:
            for pid in departure.clear_away(self._config.id, self._collector.others()):
                log.warning("killed pid %d, which had not left with its supervisor", pid)


def main() -> int:
    """Serve until SIGTERM (exit 0) or until the parent is gone (clears away, exit 0). Exit 1: cannot start."""
    parser = argparse.ArgumentParser(prog="ppengine.monitor.gateway", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", type=Path, required=True, help="engine.json in the engine's run folder")
    lifeline.add_argument(parser)
    args = parser.parse_args()
    stop, orphaned = threading.Event(), threading.Event()

    def on_parent_gone() -> None:
        orphaned.set()
        stop.set()

    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # Ctrl-C in a terminal is for the supervisor, which ends us in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline.adopt(args.lifeline, on_parent_gone)
    logs.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        config = EngineConfig.load(args.engine)
        gateway = Gateway(config, context)
    except (OSError, zmq.ZMQError, AuditError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    log.info("gateway of %s (%s) started, epoch %s", config.name, config.id, config.epoch)
    gateway.run(stop)
    log.info("leaving: %s", "the supervisor is gone" if orphaned.is_set() else "told to")
    gateway.leave(orphaned.is_set())
    context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
