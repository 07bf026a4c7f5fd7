"""`python -m ppengine.core --engine RUN_DIR/engine.json`: sockets and turns of the event loop."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import signal
import sys
import time
from pathlib import Path

import msgspec
import zmq

from ppengine.checkpoint.model_spec import read_spec
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common import lifeline, logs
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.debug_attach import observed, stack_file
from ppengine.common.sockets import NOBLOCK, readable
from ppengine.core.engine import Engine
from ppengine.core.report import Reporter
from ppengine.core.shadow_check import IDENTITY
from ppengine.protocol.control import Command, Fetch, Inspect, Refused
from ppengine.protocol.frames import Codec, ProtocolError, encode
from ppengine.protocol.offline import AbortMany, AddMany, Collect, ForgetMany, StateAnswer, StateQuery, ToFront
from ppengine.protocol.reports import Happened, ProcessReport, StartStage
from ppengine.protocol.snapshot import Event
from ppengine.protocol.steps import FromStage, NewGeneration, Shutdown

log = logging.getLogger("ppengine.core")

LONGEST_WAIT_S = 0.2
"""Between two turns: a signal and questions for the state are looked at then, however rare reports are."""
_UNHURRIED = "request."
"""Events of this kind go with the next report: hundreds may end in a second, and one at a time wakes every reader."""
FRONT_BURST, FRONT_S = 64, 0.05
"""Messages taken from consoles in one turn, and for how long, so that a flood of them cannot starve the stages."""


class Loop:
    """The one thread of the core: polls, lets the engine take a turn, reports."""

    def __init__(self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._config = config
        self._steps = self._socket(context, zmq.ROUTER)
        self._front = self._socket(context, zmq.ROUTER)
        self._collect = self._socket(context, zmq.PUSH)
        self._report = self._socket(context, zmq.PUSH)
        # A stage that is started anew comes under the name of its predecessor.
        self._steps.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._steps.bind(config.endpoint("steps"))
        self._front.bind(config.endpoint("front"))
        self._collect.connect(config.endpoint("collect"))
        self._report.connect(config.endpoint("report"))
        self._identities = [f"s{index}.0".encode() for index in range(config.stages)]
        self._from_stage, self._from_front = Codec(FromStage), Codec(ToFront)
        model = config.profile.model
        spec = read_spec(Path(config.model_path))
        tokenizer = None if model.skip_tokenizer else Tokenizer.load(Path(config.model_path))
        self.engine = Engine(
            config, spec, tokenizer, send_step=self._send_step, reply=self._reply, happened=self._happened,
            send_shadow=self._send_shadow, start_stage=self._start_stage, tell_stage=self._tell_stage,
        )  # fmt: skip
        self._reporter = Reporter(self.engine)
        self._supervisor = b""
        """Routing id of who reports processes; it starts them too."""
        self._dropped = 0
        self._events: list[Event] = []
        """Not yet told."""
        self._state_waiters: list[tuple[bytes, StateQuery, float]] = []

    def run(self) -> None:
        """Turn until the engine leaves."""
        # What was imported and loaded stays for good: without it, a full collection holds up a turn for less long.
        gc.collect()
        gc.freeze()
        poller = zmq.Poller()
        poller.register(self._steps, zmq.POLLIN)
        poller.register(self._front, zmq.POLLIN)
        interval = 1.0 / self._config.profile.console.publish_hz
        report_at = time.monotonic()
        while not self.engine.leaving:
            deadline = min(report_at, time.monotonic() + LONGEST_WAIT_S)
            deadline = min(deadline, self.engine.outputs.next_deadline() or deadline)
            woken = poller.poll(max(0, math.ceil((deadline - time.monotonic()) * 1e3)))
            if woken and not self._drain_stages() and not readable(self._front):
                continue  # steps that other stages are still busy with: nothing follows from that
            if self._drain_front():
                # That may have taken long, and what the stages have sent meanwhile is not to look late.
                self._drain_stages()
            self.engine.advance()
            self.engine.outputs.serve_waiters()
            self._serve_state_waiters()
            now = time.monotonic()
            if now >= report_at:
                report_at = max(report_at + interval, now)
                self._tell_events(self._report)
                self._push(self._report, self._reporter.build(self._dropped))
        self._close()

    # --- sockets --------------------------------------------------------------------------------------------

    @staticmethod
    def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
        socket = context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0 if kind == zmq.ROUTER else 100)
        return socket

    def _drain_stages(self) -> bool:
        """Take what the stages sent; return whether there is something to do about it."""
        news = False
        while readable(self._steps):
            frames = self._steps.recv_multipart(NOBLOCK)
            try:
                news = self.engine.on_stage(self._from_stage.decode(frames[-1])) or news
            except ProtocolError as error:
                self.engine.event("protocol.error", f"from a stage: {error}")
        return news

    def _drain_front(self) -> bool:
        """Take what was asked for; return whether there was anything."""
        begun = time.monotonic()
        for number in range(FRONT_BURST):
            if not readable(self._front) or time.monotonic() - begun > FRONT_S:
                return number > 0
            client, *frames = self._front.recv_multipart(NOBLOCK)
            try:
                self._on_front(client, self._from_front.decode(frames[-1]))
            except ProtocolError as error:
                self.engine.event("protocol.error", f"on front: {error}")
        return True

    def _on_front(self, client: bytes, message: object) -> None:
        engine = self.engine
        match message:
            case Command():
                engine.commands.handle(client, message)
            case Fetch():
                engine.outputs.fetch(client, message)
            case Inspect():
                engine.inspect(client, message)
            case AddMany():
                engine.add_many(client, message)
            case Collect():
                engine.outputs.collect(client, message)
            case AbortMany():
                engine.abort_many(message.requests)
            case ForgetMany():
                engine.outputs.forget(message.requests)
            case StateQuery():
                self._state_waiters.append((client, message, time.monotonic() + message.wait_ms / 1e3))
            case ProcessReport():
                self._supervisor = client
                engine.on_processes(message)

    def _serve_state_waiters(self) -> None:
        now, engine, left = time.monotonic(), self.engine, []
        for client, query, deadline in self._state_waiters:
            if engine.state == "loading" and now < deadline:
                left.append((client, query, deadline))
                continue
            blocks = engine.resizer.mapped_blocks if engine.serving else 0
            answer = StateAnswer(
                nonce=query.nonce, state=engine.state, message=engine.message,
                max_model_len=self._config.max_model_len, num_blocks=blocks,
                code="DOES_NOT_FIT" if engine.unfit else "",
            )  # fmt: skip
            self._reply(client, answer)
        self._state_waiters = left

    def _send_step(self, payload: bytes) -> None:
        for identity in self._identities:
            self._steps.send_multipart([identity, payload], NOBLOCK)

    def _send_shadow(self, payload: bytes) -> None:
        self._steps.send_multipart([IDENTITY, payload], NOBLOCK)

    def _tell_stage(self, stage: int, message: NewGeneration | Shutdown) -> None:
        """To the step loop, and to the control thread in case that is stuck."""
        for prefix in ("s", "c"):
            self._steps.send_multipart([f"{prefix}{stage}.0".encode(), encode(message)], NOBLOCK)

    def _start_stage(self, stage: int, generation: int) -> None:
        message = StartStage(stage=stage, generation=generation)
        self._front.send_multipart([self._supervisor, encode(message)], NOBLOCK)

    def _reply(self, client: bytes, message: msgspec.Struct) -> None:
        if isinstance(message, Refused):
            log.info("refused: %s (%s)", message.text, message.code)
        self._front.send_multipart([client, encode(message)], NOBLOCK)

    def _happened(self, event: Event) -> None:
        if not event.kind.startswith("request.") and not event.text.startswith("submit "):
            log.info("%s%s", event.text, f", by {event.by}" if event.by else "")
        self._events.append(event)
        if not event.kind.startswith(_UNHURRIED):
            if event.kind == "stage.lost":
                # It may be made good before the next report: what it is judged by goes first, on the same way.
                self._push(self._collect, self._reporter.build(self._dropped))
            self._tell_events(self._collect)

    def _tell_events(self, socket: zmq.Socket[bytes]) -> None:
        if self._events:
            self._push(socket, Happened(events=self._events))
            self._events = []

    def _push(self, socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
        try:
            socket.send(encode(message), NOBLOCK)
        except zmq.Again:
            self._dropped += 1

    def _close(self) -> None:
        self.engine.outputs.serve_waiters()
        self._serve_state_waiters()
        self._tell_events(self._report)
        self._push(self._report, self._reporter.build(self._dropped))
        self.engine.checks.shadow.stop()
        for index in range(self._config.stages):
            self._tell_stage(index, Shutdown(self.engine.recovery.generation))
        for socket in (self._steps, self._front, self._collect, self._report):
            socket.close(linger=500)


def main() -> int:
    """Run the core until it is told to stop. Exit code 0: stopped; 1: could not start or go on."""
    parser = argparse.ArgumentParser(prog="ppengine.core")
    parser.add_argument("--engine", type=Path, required=True)
    lifeline.add_argument(parser)
    arguments = parser.parse_args()
    lifeline.adopt(arguments.lifeline)
    logs.start()
    config = EngineConfig.load(arguments.engine)
    with observed(stack_file(config.run_dir, None)):
        return _run(config)


def _run(config: EngineConfig) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        loop = Loop(config, context)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: loop.engine.leave("signal"))
    log.info("core of %s (%s) started, waiting for %d stages", config.name, config.id, config.stages)
    loop.run()
    log.info("leaving: %s", loop.engine.leaving)
    context.term()
    if loop.engine.failed:
        print(f"error: {loop.engine.failed}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
