"""The Ray of one engine: the cluster at RAY_ADDRESS, or a local one that belongs to this engine alone.

A local Ray is loopback only, without a dashboard, with its files in the run folder.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from ppengine.common.config import EngineConfig
from ppengine.protocol.discovery import SOCKET_PATH_MOST
from ppengine.supervisor.launch.launcher import ExecutorError

_SOCKET_BYTES = 66
"""Longest name of a socket below Ray's folder: /session_<date>_<time>_<pid>/sockets/plasma_store."""
_OBJECT_STORE_BYTES = 80 * 2**20
"""Ray's least; the stages put nothing there."""


class RaySession:
    """Joins or starts Ray, and takes a local one down."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.owned = not os.environ.get("RAY_ADDRESS")
        """Whether this Ray belongs to the engine."""

    @property
    def folder(self) -> Path:
        """Files of a local Ray: in the run folder, or the ring folder if that name is too long for Ray's sockets."""
        folder = Path(self._config.run_dir) / "ray"
        fits = len(os.fsencode(folder)) + _SOCKET_BYTES <= SOCKET_PATH_MOST
        return folder if fits else Path(self._config.ring_dir) / "ray"

    def join(self) -> None:
        """Start or join Ray. Raises ExecutorError."""
        if self.owned:
            self._isolate()
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if self.owned:
            options.update(
                address="local",
                include_dashboard=False,
                num_cpus=len(self._config.groups),
                object_store_memory=_OBJECT_STORE_BYTES,
                _temp_dir=str(self.folder),
                _node_ip_address="127.0.0.1",
            )
        try:
            load_ray().init(**options)
        except (ConnectionError, OSError, RuntimeError, ValueError) as error:
            raise ExecutorError(why_not(error)) from None

    def leave(self) -> None:
        """Take a local Ray down."""
        if self.owned:
            load_ray().shutdown()

    def remove(self) -> None:
        """Remove the files of a local Ray whose processes are killed."""
        if self.owned:
            shutil.rmtree(self.folder, ignore_errors=True)

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


def load_ray() -> Any:
    """Import Ray, whose package only the `ray` extra brings; what its modules export has no types."""
    import ray
    import ray.util.scheduling_strategies

    return ray


def why_not(error: BaseException) -> str:
    """Return one line about a Ray that did not start."""
    if "InvalidAuthToken" in f"{error} {error.__cause__}":
        return "the Ray cluster at RAY_ADDRESS refuses our token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH"
    return f"Ray did not start: {flat(error)}"


def flat(error: BaseException) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())


def cause_of_death(text: str) -> str:
    """Return what Ray knows, out of an account that begins with ids and ends in guesses."""
    known = text.partition("The actor is dead because ")[2] or text
    for guesses in ("Some common causes include", "There are some potential root causes"):
        known = known.partition(guesses)[0]
    return f"Ray: {known.strip()}"[:500]
