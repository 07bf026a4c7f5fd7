"""Stages as Ray actors. Ray places them and watches over their lives; their sockets and tensors are our own.

Ray lives in a process of its own, the driver (`ray_driver`), which begins a session. All that a local Ray starts
stays in that session, so that nothing of it survives: Ray itself leaves two agents behind for half a minute when its
driver is killed.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import msgspec

from ppengine.config import NO_RESTART_ON_RAY, EngineConfig
from ppengine.executor.base import ExecutorError
from ppengine.executor.process import Child, kill_all, session, spawn, until
from ppengine.protocol.reports import ProcessInfo

STOP_S = 5.0
"""What Ray gets to shut down in order."""


class RayExecutor:
    """One actor a stage. Raises ExecutorError where Ray is not installed."""

    def __init__(self, module: str = "ppengine.executor.ray_driver") -> None:
        if importlib.util.find_spec("ray") is None:
            raise ExecutorError("parallel.executor is ray, but Ray is not installed: pip install 'ppconsole[ray]'")
        self._module = module
        self._driver: Child | None = None
        self._stages: dict[int, ProcessInfo] = {}
        self._unread = b""

    def start(self, config: EngineConfig) -> None:
        """Start the driver, which starts or joins Ray and then the actors."""
        folder = Path(config.run_dir)
        args = ["--engine", str(folder / "engine.json")]
        self._driver = spawn(self._module, args, log=folder / "ray.log", pipe=True)
        if self._driver.stdout is not None:
            os.set_blocking(self._driver.stdout.fileno(), False)

    def poll(self) -> list[ProcessInfo]:
        """Return the driver and, as soon as Ray has placed them, the stages."""
        if self._driver is None:
            return []
        self._read(self._driver)
        driver = self._driver.info("ray")
        if driver.exit_code is not None:
            for info in self._stages.values():
                if info.exit_code is None:
                    info.exit_code, info.detail = 1, "its Ray driver ended"
        return [driver, *(msgspec.structs.replace(info) for _, info in sorted(self._stages.items()))]

    def restart(self, stage: int, generation: int) -> None:
        """Refuse by name: the core does not ask for it."""
        raise ExecutorError(f"stage {stage} cannot be started anew with parallel.executor ray: {NO_RESTART_ON_RAY}")

    def stop(self, timeout: float) -> None:
        """Have Ray take the stages down, then kill what is left of it."""
        driver = self._driver
        if driver is None:
            return
        if driver.poll() is None:
            driver.terminate()
            driver.wait(max(timeout, STOP_S))
        self._read(driver)
        until(lambda: _killed(driver.pid), STOP_S)
        driver.wait(1.0)
        driver.close()

    def _read(self, driver: Child) -> None:
        """Take what the driver has said: one ProcessInfo a line."""
        if driver.stdout is None or driver.stdout.closed:
            return
        while chunk := driver.stdout.read(65536):
            self._unread += chunk
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            info = msgspec.json.decode(line, type=ProcessInfo)
            if info.stage is not None:
                self._stages[info.stage] = info


def _killed(leader: int) -> bool:
    """Kill the session that `leader` began; tell whether nothing of it is left."""
    left = session(leader)
    kill_all(left)
    return not left
