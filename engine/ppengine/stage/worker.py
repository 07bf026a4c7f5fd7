"""The stage process: boots its stage, then takes steps from the core in order until it must leave.

It lives in generations: when another stage is lost, it leaves its edges, forgets requests and
steps, and meets the others again; weights and mappings stay.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
import zmq
from ppkernels.cpu.rows import lay_out

from ppengine.common import lifeline, logs
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.debug_attach import observed, stack_file
from ppengine.common.ring import Gauge, Kind, Phase
from ppengine.common.sizes import size_text
from ppengine.protocol.place import Place
from ppengine.protocol.stage_lifecycle import Drained, StageFailed, StageProgress
from ppengine.protocol.steps import Retired
from ppengine.stage.build import Boot, Loaded
from ppengine.stage.checks import StageChecks
from ppengine.stage.control_thread import ControlThread
from ppengine.stage.core_link import CoreLink, open_socket
from ppengine.stage.edge_addresses import AddressBook, CoreBook, FolderBook
from ppengine.stage.generations import Generations
from ppengine.stage.recorder import open_rings
from ppengine.stage.runner import Runner
from ppengine.stage.step_loop import POLL_MS, StepLoop
from ppengine.stage.wire import PeerLostError, SupersededError

if TYPE_CHECKING:
    from ppengine.drills.stage_faults import StageFaults  # imported with --allow-faults alone

log = logging.getLogger("ppengine.stage")
_DRAIN_S = 0.5


class StageWorker:
    """One stage's main thread: owns the steps socket and the main ring."""

    def __init__(self, config: EngineConfig, stage: int, rank: int, generation: int, context: zmq.Context[Any]) -> None:
        self._config = config
        self._stage, self._rank = stage, rank
        self._first = generation
        self._generations = generations = Generations(generation)
        self._rings = open_rings(config, stage, rank, generation)
        self._ring = self._rings.main
        self._kept: Exception | None = None
        self._checks = StageChecks(stage, rank, generations)
        self._checks.ledger.thread("main")
        self._control = ControlThread(context, config, stage, rank, generations, self._ring, self._checks.news)
        socket = open_socket(context, config, stage, rank)
        self._faults = self._make_faults(context)
        if self._faults is not None:
            socket = self._faults.socket(socket)
        self._link = CoreLink(socket, generations, self._control.stop)

    def _make_faults(self, context: zmq.Context[Any]) -> StageFaults | None:
        """Return the fault points of this stage. Without the option, their module is not even imported."""
        if not self._config.allow_faults:
            return None
        from ppengine.drills.stage_faults import StageFaults

        place = Place(self._stage, self._rank)
        return StageFaults(self._config, place, context, self._control, self._ring)

    def run(self) -> int:
        """Boot, serve and leave. Returns the exit code."""
        self._control.start()
        try:
            self._report(f"stage {self._stage}: started")
            booted = self._boot()
            if booted is None:
                return 1
            # Objects of boot stay for good: without them, a full collection no longer stalls a step.
            gc.collect()
            gc.freeze()
            while not self._link.leaving:
                self._live(*booted)
            self._ring.phase(Phase.CLOSING)
            return 0
        finally:
            # Messages still go out: closing waits for them, at most the linger time.
            self._link.close()
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
            self._link.send(Drained(generation, self._stage, self._rank))
        self._ring.phase(Phase.MEET)
        try:
            # The loop exists before any message is waited for.
            runner = boot.connect(
                loaded, generation, self._book(generation), self._link.over, lambda: loop.meanwhile(),
                lambda number: loop.late_masks(number),
            )  # fmt: skip
        except SupersededError:
            return
        except PeerLostError as error:
            lost = error.with_traceback(None)
        else:
            if self._faults is not None:
                runner = self._faults.runner(runner)
            loop = StepLoop(runner, self._link, self._ring, self._generations)
            # Needed while this thread is held up in a call of the driver.
            self._generations.on_newer = runner.release
            self._ring.phase(Phase.SERVING)
            self._link.send(msgspec.structs.replace(loaded.ready, generation=generation, links=runner.links))
            with torch.inference_mode():
                self._serve(loop, loaded.resources.launches)
            self._generations.on_newer = None
            self._leave(runner, loop, loaded)
            return
        self._lose(0, str(lost), lost)

    def _book(self, generation: int) -> AddressBook:
        config = self._config
        if config.cluster is None:
            return FolderBook(Path(config.run_dir), generation)
        return CoreBook(self._link, config.address, self._stage, self._rank, generation)

    def _leave(self, runner: Runner, loop: StepLoop, loaded: Loaded) -> None:
        if self._link.leaving:
            if runner.outgoing is not None:
                runner.outgoing.finish(_DRAIN_S)
            runner.release()
            return
        log.info("leaving generation %d after step %d", self._generations.current, loop.newest)
        runner.leave()
        # Swapped blocks are of no use any more; a block of the device is written before it is read.
        loaded.resources.swap.forget()
        self._ring.gauge(Gauge.INBOX, 0)
        self._ring.gauge(Gauge.OUTBOX, 0)
        self._ring.gauge(Gauge.STEP_FINISHED, loop.newest)

    def _serve(self, loop: StepLoop, launches: bool) -> None:
        peer: PeerLostError | None = None
        try:
            loop.run()
            return
        except SupersededError:
            return
        except PeerLostError as error:
            text, peer = str(error), error.with_traceback(None)
        except Exception as error:
            log.exception("step %d failed", loop.newest)
            text = failure_words(error)
            if launches:
                # After a CUDA error, freeing pinned memory or a graph may abort the process, before its last words.
                self._kept = error
        # Out here no frame of the error keeps an edge open that must be left.
        self._lose(loop.newest, text, peer)

    def _lose(self, newest: int, text: str, peer: PeerLostError | None = None) -> None:
        """Report the one fatal error, then stay for inspection: the first stage that dies must remain the first."""
        sys.stderr.write(f"error: stage {self._stage}: {text}\n")
        generation = self._generations.current
        at, rank = (None, None) if peer is None else (peer.peer, peer.rank)
        self._link.send(
            Retired(generation, newest, self._stage, self._rank, error=text, fatal=True, peer=at, peer_rank=rank)
        )
        with self._ring.operation(Kind.IDLE):
            while not self._link.over():
                self._ring.tick()
                self._link.receive(POLL_MS)

    def _report(self, text: str) -> None:
        self._ring.tick()
        generation = self._generations.newest
        phase = self._ring.phase_name
        self._link.send(
            StageProgress(stage=self._stage, rank=self._rank, text=text, generation=generation, phase=phase)
        )

    def _fail(self, text: str) -> None:
        sys.stderr.write(f"error: stage {self._stage}: {text}\n")
        self._link.send(StageFailed(stage=self._stage, rank=self._rank, text=text, generation=self._first))


def run_stage(config: EngineConfig, stage: int, rank: int, generation: int) -> int:
    """Run one stage in the calling thread (a process's main one) until it must leave. Returns the exit code."""
    logs.start()
    start, end = config.layers[stage]
    log.info("stage %d of %d started, layers %d to %d of %s", stage, config.stages, start, end - 1, config.model_path)
    with observed(stack_file(config.run_dir, stage, rank)), zmq.Context() as context:
        code = StageWorker(config, stage, rank, generation, context).run()
    log.info("leaving with exit code %d", code)
    return code


def preload() -> None:
    """Load what the first step of a stage would, once for all stages that are forked from this process.

    With its first kernel numba loads a third of itself. This kernel is in every step.
    """
    lay_out(np.zeros((1, 3), np.int64), np.zeros((1, 1), np.int64), 1)


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
    # Past this point only destructors would run, and the process would wait for threads of libraries.
    os._exit(code)


def failure_words(error: BaseException) -> str:
    """Return type and message of an error in one line.

    Compiled code that returns with an exception set makes a SystemError of it; the reason is its cause.
    """
    reason = error.__cause__ if isinstance(error, SystemError) and error.__cause__ is not None else error
    return f"{type(reason).__name__}: {_one_line(reason)}"


def _one_line(error: BaseException) -> str:
    # CUDA's errors go on with advice for people who compile torch.
    text = str(error).partition("\n")[0] if isinstance(error, torch.AcceleratorError) else str(error)
    return " ".join(text.split())


if __name__ == "__main__":
    main()
