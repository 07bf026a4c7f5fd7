"""Stages as Ray actors. Ray places them and watches over their lives; their sockets and tensors are our own.

Ray lives in a process of its own, the driver (`ray_driver`), which begins a session. All that a local Ray starts
stays in that session, so that nothing of it survives: Ray itself leaves two agents behind for half a minute when its
driver is killed. Over one socket the driver gets orders (`StartStage`) and reports stages (`ProcessInfo`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
from pathlib import Path

import msgspec

from ppengine.common.child_process import Child, kill_all, session, spawn, until
from ppengine.common.config import EngineConfig
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo, StartStage
from ppengine.supervisor.launch.launcher import ExecutorError

STOP_S = 5.0
"""Seconds Ray gets to shut down in order."""
_WORD_BYTES = 65536


class RayExecutor:
    """One actor a place. Raises ExecutorError where Ray is not installed."""

    def __init__(self, module: str = "ppengine.supervisor.launch.ray_driver") -> None:
        if importlib.util.find_spec("ray") is None:
            raise ExecutorError("parallel.executor is ray, but Ray is not installed: pip install 'ppconsole[ray]'")
        self._module = module
        self._driver: Child | None = None
        self._words: socket.socket | None = None
        self._stages: dict[Place, ProcessInfo] = {}
        self._stores: dict[str, ProcessInfo] = {}
        """Stores on other nodes, by role."""
        self._news: list[ProcessInfo] = []
        """Starts and ends of them that `poll` has not returned yet."""
        self._silent_head = ""
        """Words of the driver about Ray's head; empty: it answers."""
        self._wanted: dict[Place, int] = {}
        """Generation of each place's newest order: reports of older ones are dropped."""

    def start(self, config: EngineConfig) -> None:
        """Start the driver, which starts or joins Ray and then the actors."""
        folder = Path(config.run_dir)
        self._words, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._words.setblocking(False)
        with theirs:
            args = ["--engine", str(folder / "engine.json"), "--words", str(theirs.fileno())]
            self._driver = spawn(self._module, args, log=folder / "ray.log", hand_over=(theirs.fileno(),))

    def resume(self, config: EngineConfig) -> None:
        """Refuse: the actors end with their driver, and their places with them."""
        raise ExecutorError("parallel.executor is ray: only a supervisor with local stages can be restarted")

    def poll(self) -> list[ProcessInfo]:
        """Return the driver and, as soon as Ray has placed them, the stages."""
        if self._driver is None:
            return []
        self._read()
        driver = self._driver.info("ray")
        if self._silent_head:
            ended = driver.exit_code is not None
            driver.detail = self._silent_head + (", and Ray has ended its driver" if ended else "")
        if driver.exit_code is not None:
            for info in self._stages.values():
                if info.exit_code is None:
                    info.exit_code, info.detail = 1, "its Ray driver ended"
        self._take_news()
        stages = [msgspec.structs.replace(info) for _, info in sorted(self._stages.items())]
        return [driver, *stages, *(info for _, info in sorted(self._stores.items()))]

    def _take_news(self) -> None:
        """Take the oldest news of each store: of an end and the next start, the end must be seen."""
        later, taken = list[ProcessInfo](), set[str]()
        for info in self._news:
            if info.role in taken:
                later.append(info)
            else:
                taken.add(info.role)
                self._stores[info.role] = info
        self._news = later

    def restart(self, place: Place, generation: int) -> None:
        """Have the driver kill the place's actor if there is one, and make another in its place."""
        info = self._stages.get(place)
        if info is not None:
            info.replaced = info.replaced or info.exit_code is None
        self._wanted[place] = generation
        # A driver that is gone ends the engine.
        with contextlib.suppress(OSError):
            if self._words is not None:
                order = StartStage(stage=place.stage, rank=place.rank, generation=generation)
                self._words.send(msgspec.json.encode(order))

    def stop(self, timeout: float) -> None:
        """Have Ray end the stages, then kill the rest of its session."""
        driver = self._driver
        if driver is None:
            return
        if driver.poll() is None:
            driver.terminate()
            driver.wait(max(timeout, STOP_S))
        self._read()
        until(lambda: _killed(driver.pid), STOP_S)
        driver.wait(1.0)
        driver.close()
        if self._words is not None:
            self._words.close()
            self._words = None

    def _read(self) -> None:
        """Take what the driver has said: how one stage is, or Ray's head, in each packet."""
        while self._words is not None:
            try:
                word = self._words.recv(_WORD_BYTES)
            except (BlockingIOError, ConnectionError):
                return
            if not word:
                return
            info = msgspec.json.decode(word, type=ProcessInfo)
            if info.role == "ray":
                self._silent_head = info.detail
                continue
            if info.stage is None:
                self._news.append(info)
                continue
            place = Place(info.stage, info.rank or 0)
            if info.generation >= self._wanted.get(place, 0):
                self._stages[place] = info


def _killed(leader: int) -> bool:
    """Kill the session that `leader` began; return whether all of it has ended."""
    left = session(leader)
    kill_all(left)
    return not left
