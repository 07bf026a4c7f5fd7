"""Sockets between the nodes of one engine: stages and agents elsewhere connect to the engine's own host.

All of them are CURVE sockets with a keypair for each boot and a ZAP domain of their own. Nothing listens on the other
nodes but the edges of their stages (`ppengine.stage.wire`).
"""

from __future__ import annotations

import hmac
import socket as sockets
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from ppengine.common import curve
from ppengine.common.curve import Socket
from ppengine.common.sockets import bind_tcp
from ppengine.protocol.json_files import decode_json
from ppengine.protocol.keys import KeyFileError, Keypair, read_keypair, read_private, write_keypair, write_private

NAMES = ("steps", "collect", "agent", "faults", "stores")
"""Sockets that other nodes reach, in the order of their ports."""
SERVER_KEY, NODE_KEY = "cluster.key", "node.key"
"""Files in the run folder: the keypair of these sockets, on the engine's host alone, and `NodeKeys`."""
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 2, zmq.TCP_KEEPALIVE_INTVL: 2, zmq.TCP_KEEPALIVE_CNT: 5}
"""Kernels look for each other, in seconds: a process that is stopped for a while must lose no message, as by zmq's
heartbeats it would."""
HANDSHAKE_MS = 10_000
"""Milliseconds for a peer to show its key; then its connection is closed."""
FRAME_BYTES_MOST = 64 * 2**20
_ANYWHERE = ("192.0.2.1", 9)
"""An address of no host (RFC 5737): the route to it leaves by the default interface. Nothing is sent."""


class Cluster(msgspec.Struct, frozen=True):
    """How processes on other nodes reach the engine: `address` of its host, and the port of each socket there."""

    address: str
    ports: dict[str, int]

    def endpoint(self, name: str) -> str:
        """Return the TCP endpoint of one of `NAMES`."""
        return f"tcp://{self.address}:{self.ports[name]}"


class NodeKeys(msgspec.Struct, frozen=True):
    """Keys of a node: the public one of the engine's sockets, and the keypair of all nodes."""

    server: str
    own: Keypair


def make_keys(run_dir: Path) -> None:
    """Write the keypairs of a boot into its run folder. Raises KeyFileError."""
    server = curve.make_keypair()
    write_keypair(run_dir / SERVER_KEY, server)
    write_node_keys(run_dir, NodeKeys(server.public, curve.make_keypair()))


def read_keys(run_dir: Path) -> dict[str, bytes]:
    """Return the content of the key files, by name; empty for an engine on one host. Raises KeyFileError."""
    paths = [path for name in (SERVER_KEY, NODE_KEY) if (path := run_dir / name).exists()]
    return {path.name: read_private(path) for path in paths}


def write_keys(run_dir: Path, keys: Mapping[str, bytes]) -> None:
    """Write key files again. Raises KeyFileError."""
    for name, content in keys.items():
        write_private(run_dir / name, content)


def write_node_keys(run_dir: Path, keys: NodeKeys) -> None:
    """Write the keys of a node into its run folder. Raises KeyFileError."""
    write_private(run_dir / NODE_KEY, msgspec.json.encode(keys))


def read_node_keys(run_dir: Path) -> NodeKeys:
    """Return the keys of a node. Raises FileNotFoundError, KeyFileError."""
    path = run_dir / NODE_KEY
    try:
        return decode_json(read_private(path), NodeKeys)
    except ValueError as error:
        raise KeyFileError(f"{path} has no keys of a node: {error}") from None


def node_accepts(run_dir: Path) -> Callable[[str], bool]:
    """Return the check of the keys in the domain of the nodes. Raises FileNotFoundError, KeyFileError."""
    right = read_node_keys(run_dir).own.public
    return lambda key: hmac.compare_digest(key, right)


def bind(socket: Socket, run_dir: Path, endpoint: str) -> None:
    """Bind `socket` to an endpoint for other nodes. Raises FileNotFoundError, KeyFileError, OSError."""
    curve.be_server(socket, read_keypair(run_dir / SERVER_KEY), curve.NODES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES_MOST)
    _keep_alive(socket)
    bind_tcp(socket, endpoint)
    # Local endpoints of the socket, bound later, are plain ones.
    curve.be_plain(socket)


def be_node(socket: Socket, run_dir: Path) -> None:
    """Make `socket` connect as a node of the engine. Raises FileNotFoundError, KeyFileError."""
    keys = read_node_keys(run_dir)
    curve.be_client(socket, keys.own, keys.server)
    _keep_alive(socket)


def own_address(towards: str = "") -> str:
    """Return the address of this host on the way to `towards` (HOST:PORT), or on the default route. Raises OSError.

    The way to this host itself has no address that others reach: then the default route counts, too.
    """
    target = urlsplit(f"//{towards}")
    where = (target.hostname, target.port or 1) if target.hostname else _ANYWHERE
    with sockets.socket(sockets.AF_INET, sockets.SOCK_DGRAM) as probe:
        probe.connect(where)
        address = str(probe.getsockname()[0])
    return own_address() if target.hostname and address.startswith("127.") else address


def free_ports(address: str) -> dict[str, int]:
    """Return a free port of `address` for each of `NAMES`. Raises OSError."""
    held = [sockets.create_server((address, 0)) for _ in NAMES]
    try:
        return {name: one.getsockname()[1] for name, one in zip(NAMES, held, strict=True)}
    finally:
        for one in held:
            one.close()


def _keep_alive(socket: Socket) -> None:
    for option, value in KEEPALIVE.items():
        socket.setsockopt(option, value)
