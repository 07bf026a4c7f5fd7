"""The Ray driver of one engine: `python -m MODULE --engine RUN_DIR/engine.json --lifeline FD`.

With RAY_ADDRESS it joins that cluster, else it starts a local Ray for this engine alone: loopback only, no dashboard,
files in the run folder. A placement group holds one CPU a stage, all on this host, because stages, core and gateway
talk through ipc sockets. Over the socket `--words` it takes orders to restart a stage, one `StartStage` per packet,
and reports stages, one `ProcessInfo` per packet, both JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ppengine.common import lifeline
from ppengine.common.child_process import describe_exit, kill_all, session, until
from ppengine.common.config import EngineConfig
from ppengine.protocol.discovery import process_start
from ppengine.protocol.error_text import PREFIX, one_line
from ppengine.protocol.reports import UNKNOWN_STATUS, ProcessInfo, StartStage
from ppengine.protocol.steps import FIRST_GENERATION
from ppengine.supervisor.launch.launcher import ExecutorError
from ppengine.supervisor.launch.ray_stage import StageActor

PLACE_S = 30.0
END_S = 2.0
"""Seconds a killed stage gets to be gone."""
WATCH_S = 0.05
CAUSE_S = 0.3
"""How long to wait for Ray's account of a death that /proc shows already."""
_SOCKET_BYTES = 66
"""Longest name of a socket below Ray's folder: /session_<date>_<time>_<pid>/sockets/plasma_store."""
_OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's least; the stages put nothing there."""
_ORDER_BYTES = 4096


@dataclass
class Hand:
    """The actor of a stage, running or starting."""

    stage: int
    generation: int
    actor: Any
    words_from: int
    """Offset of its own lines in the stage's log."""
    waited_for: Any = None
    """The call that we wait for, an ObjectRef: first its process id, then its run. None: it has ended."""
    pid: int = 0
    """0: not known yet."""
    start: int | None = None

    @property
    def lives(self) -> bool:
        """Whether its process is there."""
        return self.pid != 0 and process_start(self.pid) == self.start is not None


class Driver:
    """Places the stages of `config` and watches them until it is stopped. `words`: the socket to the supervisor."""

    def __init__(self, config: EngineConfig, words: socket.socket) -> None:
        self._config = config
        self._words = words
        self._owned = not os.environ.get("RAY_ADDRESS")
        self._stopping = False
        self._group: Any = None
        self._hands: dict[int, Hand] = {}

    @property
    def folder(self) -> Path:
        """Files of a local Ray: in the run folder, or the ring folder if that name is too long for Ray's sockets."""
        folder = Path(self._config.run_dir) / "ray"
        return folder if len(os.fsencode(folder)) + _SOCKET_BYTES <= 107 else Path(self._config.ring_dir) / "ray"

    def ask_to_stop(self) -> None:
        """End `run` soon."""
        self._stopping = True

    def run(self) -> None:
        """Start or join Ray, place the stages, watch them. Raises ExecutorError."""
        self._join()
        # Ray has taken SIGTERM for itself.
        signal.signal(signal.SIGTERM, lambda *_: self.ask_to_stop())
        try:
            if not self._stopping:
                self._place()
            while not self._stopping:
                self._watch()
        finally:
            self._leave()

    def abandon(self) -> None:
        """Leave nothing of a local Ray behind when the supervisor is gone; stages may be stopped, Ray may be stuck."""
        while left := [pid for pid in session(os.getpid()) if pid != os.getpid()]:
            kill_all(left)
            time.sleep(0.01)
        self._kill_stages()
        if self._owned:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(1)

    def _join(self) -> None:
        if self._owned:
            self._isolate()
        ray = _ray()

        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if self._owned:
            options.update(
                address="local",
                include_dashboard=False,
                num_cpus=self._config.stages,
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self.folder),
                _node_ip_address="127.0.0.1",
            )
        try:
            ray.init(**options)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ExecutorError(why_not(error)) from None

    def _isolate(self) -> None:
        """Set what a local Ray takes from the environment: no reports to its makers, loopback, a token of its own."""
        token = Path(self._config.run_dir) / "ray.token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        os.environ.update(
            RAY_USAGE_STATS_ENABLED="0",
            # Its name aside, this is what keeps every port of a local Ray on 127.0.0.1.
            RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
            # Without these Ray makes a token in the user's home and leaves it there.
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
        )
        os.environ.pop("RAY_AUTH_TOKEN", None)

    def _place(self) -> None:
        ray = _ray()

        stages = self._config.stages
        here = f"node:{ray.util.get_node_ip_address()}"
        self._group = ray.util.placement_group([{"CPU": 1.0, here: 0.001}] * stages, strategy="STRICT_PACK")
        deadline = time.monotonic() + PLACE_S
        while not ray.wait([self._group.ready()], timeout=0.2)[0]:
            if self._stopping:
                return
            if time.monotonic() > deadline:
                free = ray.available_resources().get("CPU", 0)
                raise ExecutorError(
                    f"Ray has not placed {stages} stages on this host in {PLACE_S:g} s: each needs a CPU, the cluster "
                    f"has {free:g} free; free some, or set parallel.executor=local"
                )
        for stage in range(stages):
            self._hire(stage, FIRST_GENERATION)

    def _hire(self, stage: int, generation: int) -> None:
        """Make the actor of a stage, in the stage's bundle, without waiting for it."""
        ray = _ray()

        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        place = strategy(self._group, placement_group_bundle_index=stage)
        actor = ray.remote(StageActor).options(num_cpus=1, max_restarts=0, scheduling_strategy=place).remote()
        log = self._log(stage)
        words_from = log.stat().st_size if log.exists() else 0
        self._hands[stage] = Hand(stage, generation, actor, words_from, actor.pid.remote())

    def _watch(self) -> None:
        """Take orders; wait a moment for what actors answer, or for /proc to show that one is gone."""
        ray = _ray()

        self._take_orders()
        open_calls = [hand.waited_for for hand in self._hands.values() if hand.waited_for is not None]
        if not open_calls:
            time.sleep(WATCH_S)
            return
        answered, _ = ray.wait(open_calls, num_returns=1, timeout=WATCH_S)
        for hand in self._hands.values():
            if hand.waited_for is not None and (hand.waited_for in answered or (hand.pid and not hand.lives)):
                self._hear(hand)

    def _take_orders(self) -> None:
        while not self._stopping:
            try:
                word = self._words.recv(_ORDER_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionError):
                return
            if not word:
                return
            order = msgspec.json.decode(word, type=StartStage)
            self._replace(self._hands[order.stage], order.generation)

    def _replace(self, hand: Hand, generation: int) -> None:
        self._dismiss(hand)
        # Its memory is to be free when the next one looks how much there is.
        until(lambda: not hand.lives, END_S)
        self._hire(hand.stage, generation)

    def _hear(self, hand: Hand) -> None:
        """Take an answer: the pid of an actor that is there now, which begins to run then, or the end of its run."""
        ray = _ray()

        if hand.pid:
            code, detail = self._cause(hand)
            hand.waited_for = None
            self._say(hand, code, detail)
            return
        try:
            hand.pid = ray.get(hand.waited_for)
        except ray.exceptions.RayError as error:
            hand.waited_for = None
            self._say(hand, 1, cause_of_death(_one_line(error)))
            return
        hand.start = process_start(hand.pid)
        engine = str(Path(self._config.run_dir) / "engine.json")
        hand.waited_for = hand.actor.run.remote(engine, hand.stage, hand.generation)
        self._say(hand)

    def _cause(self, hand: Hand) -> tuple[int, str]:
        """Return exit code and detail of a stage that ended. Ray keeps no wait status of a death."""
        ray = _ray()

        try:
            code = int(ray.get(hand.waited_for, timeout=CAUSE_S))
        except ray.exceptions.GetTimeoutError:
            return UNKNOWN_STATUS, "its process is gone; Ray does not say why"
        except ray.exceptions.RayError as error:
            return UNKNOWN_STATUS, cause_of_death(_one_line(error))
        return code, describe_exit(code, self._log(hand.stage), hand.words_from)

    def _say(self, hand: Hand, code: int | None = None, detail: str = "") -> None:
        info = ProcessInfo(
            role="stage",
            stage=hand.stage,
            rank=0,
            pid=hand.pid,
            exit_code=code,
            detail=detail,
            generation=hand.generation,
        )
        with contextlib.suppress(OSError):  # The supervisor is gone: our lifeline ends us.
            self._words.send(msgspec.json.encode(info))

    def _kill_stages(self) -> None:
        """Kill all stages that live; from any thread."""
        kill_all(hand.pid for hand in list(self._hands.values()) if hand.lives)

    def _log(self, stage: int) -> Path:
        return Path(self._config.run_dir) / f"stage{stage}.log"

    def _dismiss(self, hand: Hand) -> None:
        """End an actor: its process first, which is on this host, for Ray cannot end one that is stopped."""
        if hand.lives:
            kill_all([hand.pid])
        _ray().kill(hand.actor)

    def _leave(self) -> None:
        ray = _ray()

        self._kill_stages()  # all of them before Ray is asked for anything, which may not answer
        for hand in self._hands.values():
            self._dismiss(hand)
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        if self._owned:
            ray.shutdown()


def _ray() -> Any:
    """Import Ray, whose package only the `ray` extra brings; what its modules export has no types."""
    import ray
    import ray.util.scheduling_strategies

    return ray


def why_not(error: BaseException) -> str:
    """Return one line about a Ray that did not start."""
    if "InvalidAuthToken" in f"{error} {error.__cause__}":
        return "the Ray cluster at RAY_ADDRESS refuses our token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
    return f"Ray did not start: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def cause_of_death(text: str) -> str:
    """Return what Ray knows, out of an account that begins with ids and ends in guesses."""
    known = text.partition("The actor is dead because ")[2] or text
    for guesses in ("Some common causes include", "There are some potential root causes"):
        known = known.partition(guesses)[0]
    return f"Ray: {known.strip()}"[:500]


def main() -> int:
    """Run the driver until it is stopped."""
    parser = argparse.ArgumentParser(prog="ppengine.supervisor.launch.ray_driver")
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--words", type=int, required=True, help="socket to the supervisor")
    lifeline.add_argument(parser)
    options = parser.parse_args()
    # Ray starts processes: none of them is to inherit it.
    os.set_inheritable(options.words, False)
    driver = Driver(EngineConfig.load(options.engine), socket.socket(fileno=options.words))
    signal.signal(signal.SIGTERM, lambda *_: driver.ask_to_stop())
    lifeline.adopt(options.lifeline, on_close=driver.abandon)
    try:
        driver.run()
    except ExecutorError as error:
        print(f"{PREFIX}{one_line(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
