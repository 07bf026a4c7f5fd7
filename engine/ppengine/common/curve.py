"""CURVE on the sockets of an engine: one that others can reach admits keys that the ZAP handler allows."""

from __future__ import annotations

import zmq
from zmq.utils import z85

from ppengine.protocol.keys import Keypair

Socket = zmq.Socket[bytes]
CONSOLES, NODES, LOCAL = b"ppconsole", b"ppconsole-nodes", b"ppconsole-local"
"""Domains: of the public sockets, of those for other nodes of the engine, and of files in the run folder.

None is empty: with an empty domain libzmq would accept any key while no handler runs.
"""


def make_keypair() -> Keypair:
    """Return a new keypair."""
    public, secret = zmq.curve_keypair()
    return Keypair(z85.decode(public).hex(), z85.decode(secret).hex())


def be_server(socket: Socket, server: Keypair, domain: bytes = CONSOLES) -> None:
    """Make endpoints that `socket` binds from now on encrypt, and refuse every peer that no ZAP handler accepts.

    That holds also if there is no handler.
    """
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(server.secret))
    socket.setsockopt(zmq.ZAP_DOMAIN, domain)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def be_plain(socket: Socket) -> None:
    """Make endpoints that `socket` binds from now on neither encrypt nor ask for a key: files of the run folder."""
    socket.setsockopt(zmq.CURVE_SERVER, 0)
    socket.setsockopt(zmq.ZAP_DOMAIN, LOCAL)


def be_client(socket: Socket, client: Keypair, server_key: str) -> None:
    """Make `socket` encrypt with `client`, and connect to the owner of `server_key` alone."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(server_key))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(client.public))
    socket.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(client.secret))
