"""TCP connections of each address: those above a limit are closed before they get to a handshake.

libzmq reports each connection with its descriptor, and keeps the descriptor. So a second one of the same connection is
made, asked for the address, and shut down; libzmq then sees its end.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
from collections import Counter
from collections.abc import Callable

import zmq
from zmq.utils.monitor import parse_monitor_message

from ppengine.common.sockets import NOBLOCK, readable

Socket = zmq.Socket[bytes]
ADDRESS_MOST = 1000
"""Connections of one address on all ports; a console has three."""
BURST = 1000
"""Reports taken from one socket before the next socket's turn."""
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _FAILED


class Connections:
    """Counts connections by address. The ZAP handler logs refused keys, this class all other failed handshakes."""

    def __init__(
        self, context: zmq.Context[Socket], refusals: Callable[[str], object], most: int = ADDRESS_MOST
    ) -> None:
        self._context, self._refusals, self._most = context, refusals, most
        self._watched: dict[str, Socket] = {}
        self._monitors: dict[str, Socket] = {}
        self._addresses: dict[tuple[str, int], str] = {}
        """Address of each open connection, by socket and descriptor."""
        self._counts: Counter[str] = Counter()
        self._surplus: set[tuple[str, int]] = set()
        """Connections that were closed here: their end is no failed handshake."""
        self._failed: dict[str, str] = {}
        """Reason of a failed handshake whose end is the next report of the socket."""

    @property
    def monitors(self) -> dict[Socket, Callable[[], None]]:
        """Sockets to wait for, and what to call when one has a report."""
        return {monitor: lambda name=name: self._take(name) for name, monitor in self._monitors.items()}  # type: ignore[misc]

    def watch(self, name: str, watched: Socket) -> None:
        """Count the connections of a socket, from now on until `leave`."""
        endpoint = f"inproc://connections-{name}-{id(watched)}"
        watched.monitor(endpoint, int(_EVENTS))
        monitor = self._context.socket(zmq.PAIR)
        monitor.linger = 0
        # No limit: libzmq would wait for this process, in the thread that serves all connections.
        monitor.rcvhwm = 0
        monitor.connect(endpoint)
        self._watched[name], self._monitors[name] = watched, monitor

    def leave(self, name: str) -> None:
        """Forget the connections of a socket that is about to be closed.

        Its reports end first: without a reader they would block the thread that serves all
        connections, for ever.
        """
        if name not in self._watched:
            return
        self._watched.pop(name).disable_monitor()
        self._monitors.pop(name).close(linger=0)
        for known in [known for known in self._addresses if known[0] == name]:
            self._drop(known)
        self._failed.pop(name, None)

    def close(self) -> None:
        """Close the sockets of the reports, before those that they are of."""
        for name in list(self._watched):
            self.leave(name)

    def _take(self, name: str) -> None:
        monitor = self._monitors[name]
        for _ in range(BURST):
            if not readable(monitor):
                return
            report = parse_monitor_message(monitor.recv_multipart(NOBLOCK))
            known = name, report["value"]
            if report["event"] == zmq.EVENT_ACCEPTED:
                self._drop(known)
                self._accept(known)
            elif report["event"] == zmq.EVENT_DISCONNECTED:
                surplus = known in self._surplus
                address, reason = self._drop(known), self._failed.pop(name, "")
                if address and reason and not surplus:
                    self._refusals(f"handshake of {address} failed: {reason}")
            else:
                self._failed[name] = _reason(report["event"], report["value"])

    def _accept(self, known: tuple[str, int]) -> None:
        """Count a connection, and close it if its address has too many."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(known[1])) as peer:
            # It may have ended meanwhile, and its number be that of another file.
            if peer.family not in (socket.AF_INET, socket.AF_INET6):
                return
            address = group(peer.getpeername()[0])
            self._addresses[known] = address
            self._counts[address] += 1
            if self._counts[address] > self._most:
                self._refusals(f"closed a connection of {address}, which has {self._most} others")
                self._surplus.add(known)
                peer.shutdown(socket.SHUT_RDWR)

    def _drop(self, known: tuple[str, int]) -> str:
        """Forget a connection; return its address, empty if it is not known."""
        self._surplus.discard(known)
        address = self._addresses.pop(known, "")
        if address:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]
        return address


def group(address: str) -> str:
    """Return the address that is counted: of IPv6 the network of 64 bits, because a host has all of its addresses."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


def _reason(event: int, value: int) -> str:
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return f"it does not speak the protocol (ZMTP error {value:#x})"
    if value in (0, errno.EAGAIN, errno.ETIMEDOUT):
        return "no key was shown in time"
    return os.strerror(value)
