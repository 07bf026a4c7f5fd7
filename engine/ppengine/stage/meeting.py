"""How the two ends of an edge meet: the receiver listens, the sender calls, and both prove that they have its key."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable

from ppengine.stage.edge_addresses import AddressBook
from ppengine.stage.wire import POLL_MS, SupersededError, Wire

MEET_S = 0.01
"""Between two looks for the other side of an edge."""
_KEY_BYTES = 32
CALLERS_MOST = 64
"""Callers of an edge at once that have not proved that they have its key."""
_STRANGER_S, _GREET_S, _CONNECT_S = 2.0, 5.0, 1.0
"""Seconds that a caller gets for its proof, that the right one waits for the other's, and for a connection."""


def meet(
    book: AddressBook, name: str, upstream: bool, peer: int, left: Callable[[], bool], rank: int | None = None
) -> Wire:
    """Return the wire `name` once both of its processes are there; the side that receives listens.

    Both prove with an HMAC that they know the key of this edge and generation, which never goes over the connection.
    `rank`: the tensor rank there, None: this one's. Raises SupersededError as soon as `left()` is true.
    """
    call = _call if upstream else _answer
    connection, key = call(book, name, left)
    return Wire(connection, peer, left, rank, key)


def _answer(book: AddressBook, name: str, left: Callable[[], bool]) -> tuple[socket.socket, bytes]:
    """Return the first caller that has the key, and the key. Strangers wait beside it, each for a short time."""
    key = secrets.token_bytes(_KEY_BYTES)
    callers: dict[socket.socket, _Caller] = {}
    # A poll, not a select, which refuses descriptors from 1,024 on.
    with contextlib.ExitStack() as opened, selectors.PollSelector() as poll:
        listener = opened.enter_context(socket.create_server((book.host, 0), backlog=CALLERS_MOST))
        opened.callback(book.withdraw, name)
        opened.callback(_close_all, callers)
        listener.setblocking(False)
        poll.register(listener, selectors.EVENT_READ)
        publish_at = 0.0
        while not left():
            now = time.monotonic()
            if now >= publish_at:
                publish_at = now + POLL_MS / 1e3
                book.publish(name, listener.getsockname()[1], key)
            ready = [chosen.fileobj for chosen, _ in poll.select(POLL_MS / 1e3)]
            for caller in [one for one in callers if one in ready]:
                if _proves(caller, callers[caller], key):
                    callers.pop(caller)
                    return caller, key
            if listener in ready and (admitted := _admit(listener, callers)) is not None:
                poll.register(admitted, selectors.EVENT_READ)
            for caller in [one for one, known in callers.items() if known.over or time.monotonic() > known.deadline]:
                del callers[caller]
                poll.unregister(caller)
                caller.close()
    raise SupersededError(name)


def _close_all(callers: dict[socket.socket, _Caller]) -> None:
    for caller in callers:
        caller.close()


class _Caller:
    """A caller of an edge that has not proved that it has the key."""

    def __init__(self) -> None:
        self.nonce = secrets.token_bytes(_KEY_BYTES)
        self.said = bytearray()
        self.deadline = time.monotonic() + _STRANGER_S
        self.over = False


def _admit(listener: socket.socket, callers: dict[socket.socket, _Caller]) -> socket.socket | None:
    """Take a call in and return it, and mark the oldest stranger as over if there are too many."""
    try:
        caller, _ = listener.accept()
    except OSError:
        return None
    caller.setblocking(False)
    callers[caller] = known = _Caller()
    try:
        caller.send(known.nonce)
    except OSError:
        known.over = True
    if len(callers) > CALLERS_MOST:
        next(iter(callers.values())).over = True
    return caller


def _proves(caller: socket.socket, known: _Caller, key: bytes) -> bool:
    """Read from a caller; return whether it has proved that it has the key, and has got the same proof."""
    try:
        said = caller.recv(2 * _KEY_BYTES - len(known.said))
    except OSError:
        said = b""
    known.said += said
    known.over = not said
    if len(known.said) < 2 * _KEY_BYTES:
        return False
    proof, theirs = bytes(known.said[:_KEY_BYTES]), bytes(known.said[_KEY_BYTES:])
    known.over = not hmac.compare_digest(proof, _proof(key, b"call", known.nonce))
    if known.over:
        return False
    try:
        caller.send(_proof(key, b"answer", theirs))
    except OSError:
        known.over = True
    return not known.over


def _call(book: AddressBook, name: str, left: Callable[[], bool]) -> tuple[socket.socket, bytes]:
    while not left():
        address = book.find(name)
        if address is not None:
            with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
                where = address.host, address.port
                caller = opened.enter_context(socket.create_connection(where, timeout=_CONNECT_S))
                if _admitted(caller, address.key, left):
                    opened.pop_all()
                    return caller, address.key
        time.sleep(MEET_S)
    raise SupersededError(name)


def _admitted(listener: socket.socket, key: bytes, left: Callable[[], bool]) -> bool:
    """Prove to the side that listens that this one has the key; return whether it proves the same."""
    deadline = time.monotonic() + _GREET_S
    theirs = _exactly(listener, _KEY_BYTES, deadline, left)
    mine = secrets.token_bytes(_KEY_BYTES)
    listener.sendall(_proof(key, b"call", theirs) + mine)
    return hmac.compare_digest(_exactly(listener, _KEY_BYTES, deadline, left), _proof(key, b"answer", mine))


def _exactly(peer: socket.socket, count: int, deadline: float, left: Callable[[], bool]) -> bytes:
    """Return `count` bytes of `peer`; fewer at its end, at the deadline and once `left()` is true. Raises OSError."""
    peer.settimeout(POLL_MS / 1e3)
    found = bytearray()
    while len(found) < count and time.monotonic() < deadline and not left():
        with contextlib.suppress(TimeoutError):
            said = peer.recv(count - len(found))
            if not said:
                break
            found += said
    return bytes(found)


def _proof(key: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, side + nonce, "sha256")
