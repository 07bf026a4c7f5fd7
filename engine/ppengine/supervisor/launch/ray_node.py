"""The actor on every other node of an engine: its folder, its agent, its stores, and the news of its stages.

It runs one method at a time, in its main thread. `look` takes a quarter of a second, so an order waits no longer.

Each look renews the lease of the node, from the end of the look before it: the driver has asked after that. A node
that is cut off kills its stages when the lease is over, and the driver places them elsewhere only then. So no stage
runs twice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path

import msgspec

from ppengine.common.child_process import Child, kill_all, spawn
from ppengine.common.cluster import NodeKeys, write_node_keys
from ppengine.common.config import EngineConfig
from ppengine.protocol.discovery import process_start
from ppengine.supervisor.claims import end_noted, make_node, node_folders, note, stages_in
from ppengine.supervisor.launch.node_stores import NodeStores, StoreNews

LOOK_S = 0.25
"""Seconds for which `look` waits for news."""
_PAUSE_S = 0.02
_LOG_BYTES = 256 * 1024
"""Bytes of a log that go with one look."""
LEASE_S = 6.0
"""Seconds after an answer until the stages of this node end, unless the look behind the next one begins."""
_TICK_S = 0.2
MOST_AGENTS = 5
"""Most agents in all: one that keeps ending has a reason that a restart does not remove."""


class NodeActor:
    """Made by the driver, one a node. Its answers are of builtin types alone."""

    def __init__(self) -> None:
        self._config: EngineConfig | None = None
        self._agent: Child | None = None
        self._agents = 0
        self._stores: NodeStores | None = None
        self._sent: dict[str, int] = {}
        """Bytes of each log that the driver has."""
        self._renewed = self._answered = boot_time()
        threading.Thread(target=self._guard, name="lease", daemon=True).start()

    def start(self, config: bytes, keys: bytes, sent: dict[str, int]) -> None:
        """Make the engine's folder on this node and start its agent. Raises OSError, KeyFileError, TimeoutError.

        `sent`: bytes of each log that the driver has, from an actor before this one.
        """
        self._sent = dict(sent)
        made = local_config(msgspec.json.decode(config, type=EngineConfig))
        make_node(made)
        write_node_keys(Path(made.run_dir), msgspec.json.decode(keys, type=NodeKeys))
        stores = NodeStores(Path(made.run_dir))
        stores.clear()
        end_noted(Path(made.run_dir), "agent")
        self._config, self._stores = made, stores
        self._watch_agent()
        self._answered = boot_time()

    def look(
        self, stages: list[tuple[int, int]], stores: list[str]
    ) -> tuple[list[int], dict[str, bytes], list[StoreNews]]:
        """Wait a moment for the end of one of `stages`, given by pid and start time, or for a line in a log.

        `stores`: roles of the stores that this node must have. Returns the pids that are gone, new bytes by name of
        the log, and starts and ends of stores.
        """
        self._renewed = self._answered
        deadline = time.monotonic() + LOOK_S
        while True:
            gone = [pid for pid, start in stages if process_start(pid) != start]
            news = [] if self._stores is None else self._stores.keep(stores)
            logs = self._new_lines()
            if gone or logs or news or time.monotonic() >= deadline:
                self._watch_agent()
                self._answered = boot_time()
                return gone, logs, news
            time.sleep(_PAUSE_S)

    def kill(self, pid: int, start: int) -> None:
        """Kill a stage, also one that is stopped, which Ray cannot end."""
        if process_start(pid) == start:
            kill_all([pid])

    def leave(self) -> None:
        """End all that this engine has on the node."""
        if self._config is not None:
            kill_all(stages_in(Path(self._config.run_dir)))
        if self._stores is not None:
            self._stores.kill()
        self.stop()

    def stop(self) -> None:
        """End stores and agent, and remove the folders."""
        if self._stores is not None:
            self._stores.stop()
        if self._agent is not None:
            self._agent.kill()
            self._agent.wait(1.0)
            self._agent.close()
        if self._config is not None:
            for folder in (self._config.run_dir, self._config.ring_dir):
                shutil.rmtree(folder, ignore_errors=True)

    def _guard(self) -> None:
        """End what this engine has on the node once its lease is over."""
        while boot_time() - self._renewed < LEASE_S:
            time.sleep(_TICK_S)
        self.leave()
        os._exit(1)

    def _watch_agent(self) -> None:
        """Start the agent, and another one if it has ended."""
        if self._config is None or self._agents >= MOST_AGENTS:
            return
        if self._agent is None or self._agent.poll() is not None:
            if self._agent is not None:
                self._agent.close()
            folder = Path(self._config.run_dir)
            with contextlib.suppress(OSError):  # No descriptor or process is left: the next look tries again.
                self._agent = spawn(
                    "ppengine.agent", ["--engine", str(folder / "engine.json")], log=folder / "agent.log"
                )
                self._agents += 1
                # Its lifeline ends it, unless it is stopped then.
                note(folder, "agent", self._agent.pid)

    def _new_lines(self) -> dict[str, bytes]:
        if self._config is None:
            return {}
        found = {}
        for path in Path(self._config.run_dir).glob("*.log"):
            sent = self._sent.get(path.name, 0)
            with contextlib.suppress(OSError):
                if path.stat().st_size > sent:
                    with path.open("rb") as file:
                        file.seek(sent)
                        found[path.name] = file.read(_LOG_BYTES)
                    self._sent[path.name] = sent + len(found[path.name])
        return found


def boot_time() -> float:
    """Return the clock of this host that goes on while it is suspended, in seconds."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def local_config(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the folders of this node."""
    run_dir, ring_dir = node_folders(config.id, config.node)
    return msgspec.structs.replace(config, run_dir=str(run_dir), ring_dir=str(ring_dir))
