"""The stage process: boots its stage, then takes steps from the core in order until told to leave.

It lives in generations: where another stage was lost it leaves its edges, forgets requests and steps, and meets the
others again; weights and mappings stay.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import zmq

from ppengine.common import lifeline, logs
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.debug_attach import observed, stack_file
from ppengine.common.ring import Gauge, Kind, Phase
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.steps import (
    Drained,
    NewGeneration,
    Retired,
    Shutdown,
    StageFailed,
    StageProgress,
    Step,
    ToStage,
)
from ppengine.stage.backends.cpu.kv_cache import size_text
from ppengine.stage.build import Boot, Loaded
from ppengine.stage.checks import StageChecks
from ppengine.stage.control_thread import ControlThread
from ppengine.stage.generations import Generations
from ppengine.stage.pending_step import Pending
from ppengine.stage.recorder import open_rings
from ppengine.stage.runner import Runner
from ppengine.stage.wire import PeerLostError, SupersededError

log = logging.getLogger("ppengine.stage")
_IDLE, _STEP = Kind.IDLE.value, Kind.STEP.value
_POLL_MS = 100
_CHANGING_POLL_MS = 1
"""While the cache is being changed, which takes 10 to 30 ms."""
_LINGER_MS = 1000
_DRAIN_S = 0.5
MOST_PENDING = 2
"""Steps launched and not done: one that the device works on, one that waits for it."""
_GLANCE_S = 2e-5
"""Between two looks at a device that works."""


class StageWorker:
    """One stage's main thread: owns the steps socket and the main ring."""

    def __init__(self, config: EngineConfig, stage: int, rank: int, generation: int, context: zmq.Context[Any]) -> None:
        self._config = config
        self._context = context
        self._stage, self._rank = stage, rank
        self._first = generation
        self._generations = Generations(generation)
        self._rings = open_rings(config, stage, rank, generation)
        self._ring = self._rings.main
        self._codec = Codec(ToStage)
        self._inbox: deque[Step] = deque()
        self._pending: deque[Pending] = deque()
        self._leaving = False
        self._newest = 0
        self._kept: Exception | None = None
        self._arms: Any = None
        self._checks = StageChecks(stage, rank, self._generations)
        self._checks.ledger.thread("main")
        self._control = ControlThread(context, config, stage, rank, self._generations, self._ring, self._checks.news)
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, f"s{stage}.{rank}".encode())
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._socket.connect(config.endpoint("steps"))

    def run(self) -> int:
        """Boot, serve and leave. Returns the exit code."""
        self._control.start()
        try:
            booted = self._boot()
            if booted is None:
                return 1
            # What boot made stays for good: without it, a full collection no longer stalls a step.
            gc.collect()
            gc.freeze()
            while not self._told_to_leave():
                self._live(*booted)
            self._ring.phase(Phase.CLOSING)
            return 0
        finally:
            # What was sent still goes out: closing waits for it, at most the linger time.
            self._socket.close()
            self._control.close()

    def _boot(self) -> tuple[Boot, Loaded] | None:
        boot_args = (self._config, self._stage, self._rank, self._first)
        try:
            boot = Boot(*boot_args, self._rings, self._report, self._checks)
            loaded = boot.run()
        except (ConfigError, OSError) as error:
            self._fail(_one_line(error))
            return None
        except Exception as error:
            self._fail(f"{type(error).__name__}: {_one_line(error)}")
            log.exception("stage %d could not start", self._stage)
            return None
        ready = loaded.ready
        log.info(
            "loaded: weights %s, room for %d blocks of %s, %d host blocks",
            size_text(ready.weights_bytes), ready.reserved_blocks, size_text(ready.block_bytes), ready.swap_blocks,
        )  # fmt: skip
        return boot, loaded

    def _live(self, boot: Boot, loaded: Loaded) -> None:
        """Spend one generation: meet the neighbours, serve, and leave when a newer one begins or at the end."""
        generation = self._generations.enter()
        for ring in self._rings:
            ring.generation = generation
        if generation != self._first:
            self._send(Drained(generation, self._stage, self._rank))
        self._ring.phase(Phase.MEET)
        try:
            runner = boot.connect(loaded, generation, self._over)
        except SupersededError:
            return
        except PeerLostError as error:
            lost = error.with_traceback(None)
        else:
            runner = self._armed(runner)
            if runner.launches:
                runner.while_waiting(partial(self._meanwhile, runner), self._over)
            # Also where this thread is held up in a call of the driver.
            self._generations.on_newer = runner.release
            self._ring.phase(Phase.SERVING)
            self._send(msgspec.structs.replace(loaded.ready, generation=generation))
            with torch.inference_mode():
                self._serve(runner)
            self._generations.on_newer = None
            self._leave(runner, loaded)
            return
        self._lose(str(lost), lost.peer)

    def _leave(self, runner: Runner, loaded: Loaded) -> None:
        if self._told_to_leave():
            if runner.outbox is not None:
                runner.outbox.finish(_DRAIN_S)
            runner.release()
            return
        log.info("leaving generation %d after step %d", self._generations.current, self._newest)
        runner.leave()
        # Nothing there counts any more; what a block holds on the device is written before it is read.
        loaded.host.drop(0, loaded.host.blocks)
        self._inbox.clear()
        self._pending.clear()
        self._ring.gauge(Gauge.INBOX, 0)
        self._ring.gauge(Gauge.OUTBOX, 0)
        self._ring.gauge(Gauge.STEP_FINISHED, self._newest)
        self._newest = 0

    def _armed(self, runner: Runner) -> Runner:
        """Let faults strike on demand. Without the option, nothing of it is so much as imported."""
        if not self._config.allow_faults:
            return runner
        if self._arms is None:
            from ppengine.drills.stage_faults import Arms

            self._arms = Arms(self._config, self._stage, self._context, self._control, self._ring)
            self._socket = self._arms.socket(self._socket)
        armed: Runner = self._arms.runner(runner)
        return armed

    def _serve(self, runner: Runner) -> None:
        peer = None
        try:
            while (step := self._next(runner)) is not None:
                self._execute(runner, step)
            return
        except SupersededError:
            return
        except PeerLostError as error:
            text, peer = str(error), error.peer
        except Exception as error:
            log.exception("step %d failed", self._newest)
            text = f"{type(error).__name__}: {_one_line(error)}"
            if runner.launches:
                # Behind a CUDA error, freeing pinned memory or a graph may abort the process, before its last words.
                self._kept = error
        # Out here no frame of the error keeps an edge open that is to be left.
        self._lose(text, peer)

    def _execute(self, runner: Runner, step: Step) -> None:
        ring, number = self._ring, step.number
        if self._newest and number != self._newest + 1:
            raise ValueError(f"step {number} came after step {self._newest}; steps count without gaps")
        self._newest = number
        ring.gauge(Gauge.STEP_BEGUN, number)
        tokens = sum(row.count for row in step.rows)
        context = sum(row.start + row.count for row in step.rows)
        seq = ring.begin(_STEP, number, -1, tokens, context)
        try:
            self._pending.append(runner.execute(step))
        finally:
            ring.end(seq)
        self._retire()
        while len(self._pending) > MOST_PENDING:
            self._watch(runner)
            if self._over():
                raise SupersededError(f"step {number} was launched")

    def _retire(self) -> None:
        """Acknowledge the steps that are done, in order. What is done because a wait was released is void."""
        while self._pending and self._pending[0].done and not self._generations.superseded:
            retired = self._pending.popleft().finish()
            self._ring.gauge(Gauge.STEP_FINISHED, retired.number)
            self._send(retired)

    def _meanwhile(self, runner: Runner) -> bool:
        """See to what is done while a neighbour's message is waited for; return whether there will be more."""
        self._retire()
        self._tell_mapped(runner)
        if not (self._pending or runner.changing) or self._over():
            return False
        time.sleep(_GLANCE_S)
        return True

    def _tell_mapped(self, runner: Runner) -> None:
        """Tell the core of a change of the cache that has ended."""
        if runner.changing and (mapped := runner.mapped()) is not None:
            self._send(mapped)

    def _next(self, runner: Runner) -> Step | None:
        """Return the next step, None where the generation is over or the stage is to leave.

        Takes all that has come off the socket, so that it can be counted.
        """
        self._take(runner, 0)
        while self._pending and not self._inbox and not self._over():
            self._watch(runner, until_step=True)
        if not self._inbox and not self._leaving:
            seq = self._ring.begin(_IDLE)
            try:
                while not self._inbox and not self._over():
                    self._take(runner, _CHANGING_POLL_MS if runner.changing else _POLL_MS)
                    if runner.outbox is not None and runner.outbox.error is not None:
                        raise runner.outbox.error
            finally:
                self._ring.end(seq)
        if self._over():
            return None
        step = self._inbox.popleft()
        self._ring.gauge(Gauge.INBOX, len(self._inbox))
        return step

    def _watch(self, runner: Runner, until_step: bool = False) -> None:
        """Wait until the device has done a step, there is no more reason to wait, or, if so said, a step has come.

        Looks instead of waiting: what a device waits for may never come. Raises PeerLostError.
        """
        with self._ring.operation(Kind.DEVICE, self._pending[0].retired.number):
            while not self._pending[0].done and not (until_step and self._inbox) and not self._over():
                time.sleep(_GLANCE_S)
                self._take(runner, 0)
                runner.check_neighbours()
        self._retire()

    def _take(self, runner: Runner, timeout_ms: int) -> None:
        self._ring.tick()
        self._tell_mapped(runner)
        while not self._leaving and self._socket.poll(timeout_ms):
            timeout_ms = 0
            message = self._codec.decode(self._socket.recv())
            if isinstance(message, Step) and message.generation == self._generations.current:
                self._inbox.append(message)
                self._ring.gauge(Gauge.INBOX, len(self._inbox))
                runner.announce(message)
            else:
                self._hear(message)

    def _hear(self, message: object) -> None:
        if isinstance(message, Shutdown):
            self._leaving = True
        elif isinstance(message, NewGeneration):
            self._generations.hear(message.generation)

    def _lose(self, text: str, peer: int | None = None) -> None:
        """Report the one fatal error, then stay to be looked at: the first stage that dies must remain the first."""
        sys.stderr.write(f"error: stage {self._stage}: {text}\n")
        generation = self._generations.current
        self._send(Retired(generation, self._newest, self._stage, self._rank, error=text, fatal=True, peer=peer))
        with self._ring.operation(Kind.IDLE):
            while not self._over():
                self._ring.tick()
                if self._socket.poll(_POLL_MS):
                    self._hear(self._codec.decode(self._socket.recv()))

    def _over(self) -> bool:
        return self._told_to_leave() or self._generations.superseded

    def _told_to_leave(self) -> bool:
        return self._leaving or self._control.stop.is_set()

    def _report(self, text: str) -> None:
        self._ring.tick()
        generation = self._generations.newest
        self._send(StageProgress(stage=self._stage, rank=self._rank, text=text, generation=generation))

    def _fail(self, text: str) -> None:
        sys.stderr.write(f"error: stage {self._stage}: {text}\n")
        self._send(StageFailed(stage=self._stage, rank=self._rank, text=text, generation=self._first))

    def _send(self, message: msgspec.Struct) -> None:
        self._socket.send(encode(message))


def run_stage(config: EngineConfig, stage: int, rank: int, generation: int) -> int:
    """Run one stage in the calling thread (a process's main one) until it is told to leave. Returns the exit code."""
    logs.start()
    start, end = config.layers[stage]
    log.info("stage %d of %d started, layers %d to %d of %s", stage, config.stages, start, end - 1, config.model_path)
    with observed(stack_file(config.run_dir, stage, rank)), zmq.Context() as context:
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
    # Past this point only destructors would run, and threads of libraries be waited for.
    os._exit(code)


def _one_line(error: BaseException) -> str:
    # CUDA's errors go on with advice for who compiles torch.
    text = str(error).partition("\n")[0] if isinstance(error, torch.AcceleratorError) else str(error)
    return " ".join(text.split())


if __name__ == "__main__":
    main()
