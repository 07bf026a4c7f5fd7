"""The stores on another node: children of the node's actor, restarted as the supervisor restarts those of its host."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

from ppengine.common.child_process import Child, spawn, until
from ppengine.supervisor.claims import end_noted, note
from ppengine.supervisor.restart_plan import RestartPlan

StoreNews = tuple[str, int, int | None, str]
"""Role, pid, exit code and detail; without an exit code the store has started. Builtin types, as Ray brings them."""
LEAVE_S = 1.0
"""Seconds for a store that ends in order."""


class NodeStores:
    """Owns the stores in the run folder `folder` of a node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[str, Child] = {}
        self._restarts = RestartPlan()
        self._over = False

    def clear(self) -> None:
        """Kill the stores of an actor before this one. Raises TimeoutError."""
        end_noted(self._folder, "store")

    def keep(self, roles: Collection[str]) -> list[StoreNews]:
        """Start the stores of `roles` that are missing, end others; return starts and ends since the last call."""
        news: list[StoreNews] = []
        for role, child in list(self._children.items()):
            info = child.info(role)
            if info.exit_code is not None:
                del self._children[role]
                child.close()
                news.append((role, info.pid, info.exit_code, info.detail))
                self._restarts.helper_ended(role)
            elif role not in roles:
                child.kill()
        for role in roles:
            if role not in self._children and not self._restarts.waits(role) and not self._over:
                self._start(role, news)
        return news

    def _start(self, role: str, news: list[StoreNews]) -> None:
        arguments = ["--engine", str(self._folder / "engine.json"), "--role", role]
        try:
            child = spawn("ppengine.store", arguments, log=self._folder / f"{role}.log")
        except OSError:
            self._restarts.try_again(role)
            return
        self._children[role] = child
        news.append((role, child.pid, None, ""))
        with contextlib.suppress(OSError):  # Its lifeline ends it, unless it is stopped then.
            note(self._folder, role, child.pid)

    def kill(self) -> None:
        """Kill all stores, and start none again. From any thread."""
        self._over = True
        for child in list(self._children.values()):
            child.kill()

    def stop(self) -> None:
        """End all stores in order, and kill those that do not leave."""
        self._over = True
        for child in self._children.values():
            child.terminate()
        until(lambda: all(child.poll() is not None for child in self._children.values()), LEAVE_S)
        self.kill()
        for child in self._children.values():
            child.wait(LEAVE_S)
            child.close()
