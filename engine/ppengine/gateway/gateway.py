"""The gateway: one process an engine, one loop. It owns the public sockets, events, audit log and verdicts.

Consoles reach the engine only through it, and it waits for none of them. After the supervisor's death it removes all
processes and files.
`consoles` is its public side, `engine_access` sends to the engine, `collector` takes the engine's reports.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ppengine.common.cluster import node_accepts
from ppengine.common.config import EngineConfig
from ppengine.common.curve import make_keypair
from ppengine.common.oom_kills import OomWatch
from ppengine.common.refusal_log import RefusalLog
from ppengine.gateway import departure, fault_record
from ppengine.gateway.access import AccessControl
from ppengine.gateway.all_incidents import Incidents
from ppengine.gateway.audit import AuditLog
from ppengine.gateway.backend_guard import BackendGuard
from ppengine.gateway.collector import Collector
from ppengine.gateway.connections import Connections
from ppengine.gateway.consoles import Consoles
from ppengine.gateway.due_times import AWAY_S, SETTLE_S, DueTimes
from ppengine.gateway.engine_access import EngineLink
from ppengine.gateway.event_journal import EventJournal
from ppengine.gateway.event_log import KEPT, EventLog
from ppengine.gateway.gateway_sockets import Sockets, drain
from ppengine.gateway.history import History
from ppengine.gateway.publisher import Publisher
from ppengine.gateway.questions import LocalAnswers
from ppengine.gateway.stack_probe import NONCE, StackProbe
from ppengine.gateway.succession import Succession
from ppengine.gateway.text_messages_reader import TextMessagesReader
from ppengine.protocol import frames, kept_files
from ppengine.protocol.control import (
    Failed,
    Fetched,
    Inspected,
    Reply,
)
from ppengine.protocol.discovery import runs
from ppengine.protocol.facts import Exited
from ppengine.protocol.kept_files import EngineEnd
from ppengine.protocol.keys import adopt_server_key, keys_dir
from ppengine.protocol.offline import FromFront
from ppengine.protocol.reports import Recalled, ToCollector
from ppengine.protocol.severity import log_level
from ppengine.protocol.snapshot import Event

log = logging.getLogger("ppengine.gateway")

_LOGGED = ("audit.", "console.", "keys.", "lease.", "op.refused", "verdict.")
"""Events in the gateway's log; those of the core are in the core's."""
_SNAPSHOTS = (frames.TOPIC_SNAPSHOT, frames.TOPIC_SNAPSHOT_SLOW, frames.TOPIC_SNAPSHOT_PACKED)
_REFRESH_S = 0.05
"""Least seconds between two snapshots; a new subscriber gets one at once."""


class Gateway:
    """Everything between the engine and its consoles."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Open sockets and the audit log. Raises OSError, zmq.ZMQError, AuditError, KeyFileError."""
        self._config = config
        audit = AuditLog(Path(config.run_dir), config.name, config.id)
        self._refusals = refusals = RefusalLog(log)
        nodes = node_accepts(Path(config.run_dir)) if config.cluster is not None else None
        self._access = AccessControl(context, keys_dir(), refusals, nodes)
        self._connections = Connections(context, refusals)
        server = adopt_server_key(Path(config.run_dir), make_keypair)
        self._sockets = Sockets(context, config, server, self._connections)
        self._publisher = Publisher(self._sockets.state, config.id, config.epoch)
        self._journal = EventJournal(Path(config.run_dir), KEPT)
        self._events = EventLog(self._publish_event, journal=self._journal)
        self._collector = Collector(config, self._events)
        self._engine = EngineLink(config, context, self._sockets, self._collector)
        self._recorder = fault_record.FaultRecorder(self._engine.ask_agent)
        folder, console = kept_files.engine_folder(config.id), config.profile.console
        quota = console.history_mib * 1024**2
        self._history = History(folder / "history", config.id, config.name, console.history_minutes, quota)
        self._incidents = Incidents(folder, self._history)
        self._recorder.resume(self._incidents.resumed)
        self._probe = StackProbe(self._engine.ask_agent)
        local = LocalAnswers(config, lambda: self._recorder.kept, self._collector.findings)
        self._consoles = Consoles(
            config, audit, self._sockets, self._access, self._events, self._engine, local, self._pulse
        )  # fmt: skip
        self._guard = BackendGuard(self._consoles.commands.issue)
        self._texts = TextMessagesReader(
            self._sockets.texts, self._consoles.commands.texts, self._consoles.bulk, self._events.say,
            self._collector.texts_alive, refusals,
        )  # fmt: skip
        self._succession = Succession(
            self._journal.follows, self._events, self._consoles.commands, self._consoles.sessions, self._engine.recall,
            self._core_back,
        )  # fmt: skip
        self._to_collector = frames.Codec(ToCollector)
        self._from_front = frames.Codec(FromFront)
        self._refresh: set[bytes] = set()
        self._judge_by_ns: int | None = None
        """Time until which the present turn may judge."""
        self._published = 0.0
        self._spacing = min(_REFRESH_S, 0.5 / config.profile.console.publish_hz)
        self._core_was_there = False
        self._parent = os.getppid()
        self._parent_memory = OomWatch(self._parent)

    # --- the loop -------------------------------------------------------------------------------------------

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. Raises HandlerHung: no console can attach any more."""
        settle_s = self._await_core(stop)
        poller, handlers = self._handlers()
        times = DueTimes(time.monotonic(), 1.0 / self._config.profile.console.publish_hz, settle_s)
        while not stop.is_set():
            for socket, _ in poller.poll(self._wait_ms(times)):
                handlers[socket]()
            now = time.monotonic()
            due = times.take(now, news=self._collector.news, fast=self._publisher.wanted(frames.TOPIC_SNAPSHOT))
            if due.away:
                self._collector.restart_clock()
            if due.judge:
                self._judge(now)
            if due.fast:
                self._refresh.add(frames.TOPIC_SNAPSHOT)
            if due.slow:
                self._each_second(now)
            if self._access.revoked():
                self._cut_off()
                poller, handlers = self._handlers()
            self._succession.turn(now)
            self._consoles.commands.texts.turn()
            self._publish(now)
            self._publisher.flush()

    def _wait_ms(self, times: DueTimes) -> int:
        """Return the milliseconds for which a turn waits for a message."""
        now = time.monotonic()
        wait = times.next(fast=self._publisher.wanted(frames.TOPIC_SNAPSHOT)) - now
        if self._succession.core_away:
            wait = min(wait, _REFRESH_S)
        if (due := self._consoles.commands.texts.next_due) is not None:
            wait = min(wait, due - now)
        if self._refresh:
            wait = min(wait, self._published + self._spacing - now)
        return max(0, math.ceil(wait * 1e3))

    def _each_second(self, now: float) -> None:
        """Publish slowly, end commands and leases that are over their time, and look at keys and sockets."""
        self._refresh.add(frames.TOPIC_SNAPSHOT_SLOW)
        self._publisher.heartbeat(self._collector.step(), self._collector.core_age_ms())
        self._consoles.bulk.expire(now)
        self._consoles.commands.expire(now)
        self._consoles.lease.expire()
        self._on_faults()
        self._engine.agents.turn()
        self._on_agent()
        self._access.turn(self._events.say)
        if made := self._sockets.look():
            self._events.say("folder.remade", f"the gateway has bound its sockets again: {', '.join(made)}")

    def _handlers(self) -> tuple[zmq.Poller, dict[zmq.Socket[bytes], Callable[[], None]]]:
        """Return the sockets to wait for, and what takes their messages."""
        handlers = {
            self._sockets.state: self._on_state,
            self._sockets.control: self._consoles.on_control,
            self._sockets.bulk: self._consoles.on_bulk,
            self._sockets.front: self._on_front,
            self._sockets.collect: self._on_collect,
            self._sockets.agent: self._on_agent,
            self._sockets.texts: self._texts.read,
            **self._connections.monitors,
        }
        if self._engine.faults is not None:
            handlers[self._engine.faults.socket] = self._on_faults
        poller = zmq.Poller()
        for socket in handlers:
            poller.register(socket, zmq.POLLIN)
        return poller, handlers

    def _await_core(self, stop: threading.Event) -> float:
        """Wait until consoles can be served; return the seconds until the first judgement.

        The evidence of a gateway that replaces another one fills meanwhile.
        """
        while not self._succession.turn(time.monotonic()) and not stop.is_set():
            self._sockets.collect.poll(20)
            self._on_collect()
        return SETTLE_S if self._journal.follows else 0.0

    def _judge(self, now: float) -> None:
        self._judge_by_ns = int((now + AWAY_S) * 1e9)
        self._take_report()
        self._parent_memory.look()
        if self._guarded(self._diagnose):
            # Changed verdicts do not wait for the end of the second.
            self._refresh |= {frames.TOPIC_SNAPSHOT, frames.TOPIC_SNAPSHOT_SLOW}
        missing = "" if self._succession.core_away else self._collector.processes.core_end()
        if missing and self._core_was_there:
            self._consoles.commands.core_lost(missing)
        self._core_was_there = not missing

    def _watch_core(self) -> None:
        """Have a core that ended uncleanly followed by its successor."""
        gone = self._collector.processes.gone_core
        if gone is not None and not self._succession.core_away:
            self._succession.core_ended(gone.pid)
            self._refresh |= {frames.TOPIC_SNAPSHOT, frames.TOPIC_SNAPSHOT_SLOW}

    def _core_back(self) -> None:
        self._collector.processes.gone_core = None
        self._consoles.commands.core_back()
        self._consoles.bulk.core_back()
        self._engine.core_back()

    def _guarded(self, diagnose: Callable[[], bool]) -> bool:
        """Return whether the verdicts changed. A diagnosis that raises must not end the engine: it is a verdict."""
        try:
            return diagnose()
        except Exception as error:
            changed = self._collector.note_failure(error)
            if changed:
                log.exception("the diagnosis failed")
            return changed

    def _diagnose(self) -> bool:
        changed = self._collector.judge(self._consoles.commands.stopping, self._probe.stacks, self._judge_by_ns)
        # The rings before the stacks: taking those stops a stage for a moment.
        waits = self._collector.waits() if self._collector.verdicts else []
        self._recorder.look(self._collector.verdicts, waits, self._collector.retired())
        self._incidents.look(self._recorder.kept, self._collector.verdicts, self._collector.served)
        self._probe.look(self._collector.verdicts, self._collector.pids(), self._collector.gil_sharers())
        return changed

    def _publish(self, now: float) -> None:
        """Send snapshots to subscribers; without one, a slow one is built for the history."""
        if not self._refresh or now < self._published + self._spacing:
            return
        self._published = now
        kept = frames.TOPIC_SNAPSHOT_SLOW in self._refresh
        due = self._refresh | ({frames.TOPIC_SNAPSHOT_PACKED} if kept else set())
        topics = [topic for topic in sorted(due) if self._publisher.wanted(topic)]
        self._refresh.clear()
        consoles = self._consoles.sessions.count(now)
        if topics or kept:
            self._take_report()
            snapshot = self._collector.snapshot(consoles, self._incidents.newest, self._consoles.lease.info())
            self._publisher.snapshot(snapshot, topics)
            if kept:
                self._history.write(snapshot)
                self._engine.report_stages(snapshot.stages)

    def _publish_event(self, event: Event) -> None:
        if event.kind.startswith(_LOGGED):
            log.log(log_level(event), "%s%s", f"{event.by} " if event.by else "", event.text)
        self._publisher.event(event)
        self._incidents.note_event(event)
        self._history.write(event)

    # --- consoles -------------------------------------------------------------------------------------------

    def _on_state(self) -> None:
        fresh = self._publisher.read_subscriptions()
        self._refresh |= fresh & set(_SNAPSHOTS)

    def _cut_off(self) -> None:
        """End the service of revoked keys: on `state` by closing it, as a subscriber sends no message to refuse."""
        self._sockets.reopen_state()
        self._publisher.use(self._sockets.state)
        self._consoles.drop_revoked()

    def _pulse(self) -> tuple[int, float | None]:
        self._take_report()
        return self._collector.step(), self._collector.core_age_ms()

    # --- the engine -----------------------------------------------------------------------------------------

    def _on_collect(self) -> None:
        # The core answers a command before it reports the command's end: the log must say `accepted` first.
        self._on_front()
        self._take_report()
        for parts in drain(self._sockets.collect):
            self._collect(parts)

    def _take_report(self) -> None:
        """Take the reports of the core. They are not polled for: they would wake the loop ten times a second."""
        for parts in drain(self._sockets.report):
            self._collect(parts)

    def _collect(self, parts: list[bytes]) -> None:
        try:
            message = self._to_collector.decode(frames.split(parts, 1)[0])
        except frames.ProtocolError as error:
            self._refusals(f"a report is dropped: {error}")
            return
        if isinstance(message, Recalled):
            self._succession.take(message, time.monotonic())
        else:
            self._collector.take(message)
            self._watch_core()
            if isinstance(message, Exited):
                self._guard.note(message)

    def _on_front(self) -> None:
        for parts in drain(self._sockets.front):
            try:
                self._on_answer(self._from_front.decode(frames.split(parts, 1)[0]))
            except frames.ProtocolError as error:
                self._refusals(f"an answer of the core is dropped: {error}")

    def _on_agent(self) -> None:
        for answer in self._engine.agents.answers():
            self._on_answer(answer)

    def _on_answer(self, message: object) -> None:
        if isinstance(message, Reply):
            self._consoles.commands.on_reply(message)
        elif isinstance(message, Inspected | Failed) and message.nonce == NONCE:
            if (stacks := self._probe.take(message)) is not None:
                self._recorder.take_stacks(stacks)
        elif isinstance(message, Inspected | Failed) and message.nonce == fault_record.NONCE:
            self._recorder.take(message)
        elif isinstance(message, Fetched | Inspected | Failed):
            self._consoles.bulk.on_answer(message)

    def _on_faults(self) -> None:
        if self._engine.faults is not None:
            for end in self._engine.faults.answers() + self._engine.faults.expire(time.monotonic()):
                self._consoles.commands.on_reply(end, core=False)

    # --- the end --------------------------------------------------------------------------------------------

    def leave(self, orphaned: bool) -> None:
        """Publish the end. `orphaned`: the supervisor is gone; clear away processes and files.

        The files stay if another supervisor is started, and nothing is published, because the engine goes on.
        """
        kept = orphaned and runs(self._config.keeper)
        # The last answers of the core may wait here; open commands then get an end.
        self._on_collect()
        self._take_report()
        killed = self._parent_memory.words() if orphaned else ""
        how = f"killed by SIGKILL: {killed}" if killed else "gone"
        if not kept:
            self._publish_end(f"the supervisor is {how}" if orphaned else "the gateway was stopped")
        self._history.close()
        self._incidents.close()
        self._journal.close()
        if self._engine.faults is not None:
            self._engine.faults.close()
        self._access.close()
        self._connections.close()
        self._sockets.close(linger_ms=500)
        if orphaned:
            if not kept:
                how = f"was {how}" if killed else "ended and noted no reason: SIGKILL or a crash"
                why = f"its supervisor (pid {self._parent}) {how}"
                kept_files.write_end(self._config.id, EngineEnd(wall=time.time(), reason=why, clean=False))
            for pid in departure.clear_away(self._config.id, self._collector.processes.others(), keep_files=kept):
                log.warning("killed pid %d, which had not left with its supervisor", pid)

    def _publish_end(self, why: str) -> None:
        """Publish the last event and the last snapshot."""
        self._judge_by_ns = None
        self._guarded(self._diagnose)
        self._consoles.commands.core_lost("the engine stops")
        self._events.say("engine.stopped", why)
        consoles = self._consoles.sessions.count(time.monotonic())
        last = self._collector.snapshot(consoles, self._incidents.newest, stopped=True)
        self._publisher.snapshot(last, list(_SNAPSHOTS))
        self._history.write(last)
