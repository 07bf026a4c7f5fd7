"""The keypair of this user's consoles, and its use on a socket."""

from __future__ import annotations

from typing import Any

import zmq
from ppengine.protocol.keys import Keypair, own_keypair
from zmq.utils import z85


def make_keypair() -> Keypair:
    """Return a new keypair."""
    public, secret = zmq.curve_keypair()
    return Keypair(z85.decode(public).hex(), z85.decode(secret).hex())


def client_keypair() -> Keypair:
    """Return the keypair of this user's consoles, made at the first use. Raises KeyFileError."""
    return own_keypair("client", make_keypair)


def encrypt(socket: zmq.Socket[Any], client: Keypair, server_key: str) -> None:
    """Make `socket` encrypt with `client`, and connect to the owner of `server_key` alone."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(client.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(client.secret))
