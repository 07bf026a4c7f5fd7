"""The stage process: boots its stage, then takes steps from the core in order until told to leave."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from ppengine import lifeline, logs
from ppengine.config import ConfigError, EngineConfig
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.steps import Retired, Shutdown, StageFailed, StageProgress, Step, ToStage
from ppengine.ring import Gauge, Kind, Phase
from ppengine.stage.boot import Boot
from ppengine.stage.control import ControlThread, allow_observers
from ppengine.stage.kv_cache import size_text
from ppengine.stage.recorder import open_recorder
from ppengine.stage.runner import Runner
from ppengine.stage.transport import PeerLostError

log = logging.getLogger("ppengine.stage")
_POLL_MS = 100
_LINGER_MS = 1000
_DRAIN_S = 0.5


class StageWorker:
    """One stage's main thread: owns the steps socket and the main ring."""

    def __init__(self, config: EngineConfig, stage: int, rank: int, generation: int, context: zmq.Context[Any]) -> None:
        self._config = config
        self._stage, self._rank, self._generation = stage, rank, generation
        self._context = context
        self._ring = open_recorder(config, stage, rank, "main", generation)
        self._send_ring = open_recorder(config, stage, rank, "send", generation)
        self._codec = Codec(ToStage)
        self._inbox: deque[Step] = deque()
        self._leaving = False
        self._newest = 0
        self._control = ControlThread(context, config, stage, rank, generation, self._ring)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"s{stage}.{rank}".encode())
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(config.endpoint("steps"))

    def run(self) -> int:
        """Boot, serve and leave. Returns the exit code."""
        self._control.start()
        try:
            runner = self._boot()
            if runner is None:
                return 1
            if self._config.allow_faults:
                runner = self._arm(runner)
            # What boot made stays for good: without it, a full collection no longer stalls a step.
            gc.collect()
            gc.freeze()
            self._ring.phase(Phase.SERVING)
            with torch.inference_mode():
                self._serve(runner)
            self._ring.phase(Phase.CLOSING)
            if runner.outbox is not None:
                runner.outbox.close(_DRAIN_S)
            return 0
        finally:
            # What was sent still goes out: closing waits for it, at most the linger time.
            self._socket.close()
            self._control.close()

    def _boot(self) -> Runner | None:
        boot_args = (self._config, self._stage, self._rank, self._generation)
        try:
            runner, ready = Boot(*boot_args, (self._ring, self._send_ring), self._report).run()
        except (ConfigError, PeerLostError, OSError) as error:
            self._fail(_one_line(error))
            return None
        except Exception as error:
            self._fail(f"{type(error).__name__}: {_one_line(error)}")
            log.exception("stage %d could not start", self._stage)
            return None
        self._send(ready)
        log.info(
            "loaded: weights %s, room for %d blocks of %s, %d host blocks",
            size_text(ready.weights_bytes), ready.reserved_blocks, size_text(ready.block_bytes), ready.swap_blocks,
        )  # fmt: skip
        return runner

    def _arm(self, runner: Runner) -> Runner:
        """Let faults strike on demand. Without the option, nothing of it is so much as imported."""
        from ppengine.faults.stage import arm

        armed: Runner
        parts = (runner, self._socket, self._context, self._control, self._ring)
        armed, self._socket = arm(self._config, self._stage, *parts)
        return armed

    def _serve(self, runner: Runner) -> None:
        try:
            while (step := self._next(runner)) is not None:
                self._execute(runner, step)
        except PeerLostError as error:
            self._lose(str(error), error.peer)
        except Exception as error:
            log.exception("step %d failed", self._newest)
            self._lose(f"{type(error).__name__}: {_one_line(error)}")

    def _execute(self, runner: Runner, step: Step) -> None:
        ring, number = self._ring, step.number
        if self._newest and number != self._newest + 1:
            raise ValueError(f"step {number} came after step {self._newest}; steps count without gaps")
        self._newest = number
        ring.gauge(Gauge.STEP_BEGUN, number)
        with ring.operation(Kind.STEP, number, size=sum(row.count for row in step.rows)):
            retired = runner.execute(step)
        ring.gauge(Gauge.STEP_FINISHED, number)
        self._send(retired)

    def _next(self, runner: Runner) -> Step | None:
        """Return the next step, None to leave. Takes all that has come off the socket, so that it can be counted."""
        self._take(runner, 0)
        if not self._inbox and not self._leaving:
            with self._ring.operation(Kind.IDLE):
                while not self._inbox and not self._told_to_leave():
                    self._take(runner, _POLL_MS)
                    if runner.outbox is not None and runner.outbox.error is not None:
                        raise runner.outbox.error
        if self._told_to_leave():
            return None
        step = self._inbox.popleft()
        self._ring.gauge(Gauge.INBOX, len(self._inbox))
        return step

    def _take(self, runner: Runner, timeout_ms: int) -> None:
        self._ring.tick()
        while not self._leaving and self._socket.poll(timeout_ms):
            timeout_ms = 0
            message = self._codec.decode(self._socket.recv())
            if isinstance(message, Shutdown):
                self._leaving = True
            elif isinstance(message, Step) and message.generation == self._generation:
                self._inbox.append(message)
                runner.announce(message)
        self._ring.gauge(Gauge.INBOX, len(self._inbox))

    def _lose(self, text: str, peer: int | None = None) -> None:
        """Report the one fatal error, then stay to be looked at: the first stage that dies must remain the first."""
        sys.stderr.write(f"error: stage {self._stage}: {text}\n")
        lost = Retired(self._generation, self._newest, self._stage, self._rank, error=text, fatal=True, peer=peer)
        self._send(lost)
        with self._ring.operation(Kind.IDLE):
            while not self._told_to_leave():
                self._ring.tick()
                if self._socket.poll(_POLL_MS):
                    self._leaving = isinstance(self._codec.decode(self._socket.recv()), Shutdown)

    def _told_to_leave(self) -> bool:
        return self._leaving or self._control.stop.is_set()

    def _report(self, text: str) -> None:
        self._ring.tick()
        self._send(StageProgress(stage=self._stage, rank=self._rank, text=text))

    def _fail(self, text: str) -> None:
        sys.stderr.write(f"error: stage {self._stage}: {text}\n")
        self._send(StageFailed(stage=self._stage, rank=self._rank, text=text))

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send(encode(message))


def run_stage(config: EngineConfig, stage: int, rank: int, generation: int) -> int:
    """Run one stage in the calling thread (a process's main one) until it is told to leave. Returns the exit code."""
    logs.start()
    start, end = config.layers[stage]
    log.info("stage %d of %d started, layers %d to %d of %s", stage, config.stages, start, end - 1, config.model_path)
    with allow_observers(config, stage, rank), zmq.Context() as context:
        code = StageWorker(config, stage, rank, generation, context).run()
    log.info("leaving with exit code %d", code)
    return code


def main() -> None:
    """Entry point of the stage process; a parent gives it a lifeline."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.stage.worker")
    parser.add_argument("--engine", type=Path, required=True, help="engine.json of the run folder")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--generation", type=int, default=1)
    lifeline.add_argument(parser)
    args = parser.parse_args()
    lifeline.adopt(args.lifeline)
    code = run_stage(EngineConfig.load(args.engine), args.stage, args.rank, args.generation)
    sys.stderr.flush()
    # Past this point only destructors would run, and gloo's wait for peers that may be stuck.
    os._exit(code)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


if __name__ == "__main__":
    main()
