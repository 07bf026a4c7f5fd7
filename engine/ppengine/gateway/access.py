"""Access to the public sockets: the live keyring, and the ZAP handler that asks it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from ppengine.common.curve import CONSOLES, NODES
from ppengine.common.zap import ZapHandler
from ppengine.gateway.keyring import Keyring, Principal
from ppengine.protocol.verb_table import covers

log = logging.getLogger("ppengine.gateway")


HUNG_S = 5.0
"""Seconds without an answer after which the handler counts as hung."""


class HandlerHung(Exception):
    """The handler has stopped in the middle; this process must end, and its successor will have another."""


class AccessControl:
    """Make it before the sockets that it guards: a socket without a handler refuses everybody."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        folder: Path,
        refusals: Callable[[str], object],
        node_accepts: Callable[[str], bool] | None = None,
    ) -> None:
        """Read the keys in `folder` and start the handler. `refusals` logs a line. Raises zmq.ZMQError.

        `node_accepts`: for the keys of other nodes, if the engine has any.
        """
        self._keyring = Keyring(folder)
        accepts = {CONSOLES: self._keyring.accepts} | ({} if node_accepts is None else {NODES: node_accepts})
        self._handler = ZapHandler(context, accepts, refusals)
        self._revocations = self._keyring.revocations

    def principal(self, key: str) -> Principal | None:
        """Return the owner of a key that may attach now; None: it may not, and must get no service."""
        return self._keyring.principal(key)

    def may_change(self, name: str) -> bool:
        """Return whether the key with this name may change the engine now."""
        return any(one.name == name and covers(one.role, "operator") for one in self._keyring.principals())

    def revoked(self) -> bool:
        """Return whether a key has lost its access since the last call."""
        before, self._revocations = self._revocations, self._keyring.revocations
        return before != self._revocations

    def turn(self, say: Callable[[str, str], object]) -> None:
        """Read changed files, report their news, and replace a handler that has ended. Call it once a second.

        Raises HandlerHung if the handler does not answer.
        """
        self._keyring.refresh()
        for kind, text in self._keyring.take_news():
            say(kind, text)
        if self._handler.revive():
            log.error("the ZAP handler had ended, no console could attach; another one runs")
        if (seconds := self._handler.hung_s(time.monotonic())) > HUNG_S:
            # Its socket cannot be closed under its thread, so another gateway must follow.
            raise HandlerHung(f"the ZAP handler has not answered for {seconds:.1f} s, no console can attach")

    def close(self) -> None:
        """Close the socket of the probes; the handler ends with the context."""
        self._handler.close_probe()
