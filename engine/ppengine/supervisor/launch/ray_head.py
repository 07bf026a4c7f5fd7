"""The head of a Ray cluster, as the driver sees it: whether a process listens at the address of its control store.

Actors that run go on without it, for as long as Ray lets them: 60 s, or `RAY_gcs_rpc_server_reconnect_timeout_s`. Then
Ray ends their processes and the driver's, with a report that names neither address nor time.
"""

from __future__ import annotations

import threading
import time

from ppengine.supervisor.launch.ray_nodes import CALLS, reachable

CALL_GAP_S = 0.7
"""Seconds between two calls of the port; `CALLS` in a row without an answer make a silent head."""


class HeadWatch:
    """Calls the head's port, in a thread of its own: a call of Ray would wait for the head."""

    def __init__(self, address: str) -> None:
        self._address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self.silent = ""
        """How long the head has been silent, in words; empty: it answers."""
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="ray head", daemon=True).start()

    def stop(self) -> None:
        """Call no more."""
        self._over.set()

    def _watch(self) -> None:
        missed, since = 0, ""
        while not self._over.wait(CALL_GAP_S):
            at = time.strftime("%H:%M:%S")
            if reachable(self._host, self._port):
                missed, self.silent = 0, ""
                continue
            missed, since = missed + 1, since if missed else at
            if missed >= CALLS:
                self.silent = f"Ray's head at {self._address} has not answered since {since}"
