"""The address of the HTTP processes: held by the supervisor, so that it stays the engine's while they restart."""

from __future__ import annotations

import importlib.util
import os
import socket
from urllib.parse import urlsplit

import msgspec

from ppengine.common.config import ConfigError, Profile
from ppengine.common.http_address import KEY_VARIABLE, HttpAddress, parse_http
from ppengine.common.socket_files import hold_socket

NEEDS = ("starlette", "uvicorn", "httptools", "uvloop")


def check_http(profile: Profile) -> None:
    """Raise ConfigError for a port that cannot be served, or that other hosts could use without a key."""
    http = profile.http
    if http.listen is None:
        if http.otlp_traces_endpoint is not None:
            raise ConfigError("http.otlp_traces_endpoint: traces are of calls over HTTP; set http.listen, too")
        return
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"http.listen needs {', '.join(missing)}: pip install 'ppconsole[engine,serve]'")
    if http.otlp_traces_endpoint is not None:
        parts = urlsplit(http.otlp_traces_endpoint)
        if "@" in parts.netloc or parts.query or parts.fragment:
            # Profiles are shown to every viewer.
            text = "a user, password or query; put secrets into the environment, in OTEL_EXPORTER_OTLP_HEADERS"
            raise ConfigError(f"http.otlp_traces_endpoint has {text}")
    if http.otlp_traces_endpoint is not None and not _has_otel():
        raise ConfigError(
            "http.otlp_traces_endpoint needs opentelemetry-sdk: pip install 'ppconsole[engine,serve,otel]'"
        )
    address = parse_http(http.listen)
    if address.path and http.processes > 1:
        raise ConfigError(
            f"http.processes is {http.processes}, and http.listen a Unix socket, which is of one process; "
            "set http.processes=1, or listen at HOST:PORT"
        )
    if not address.loopback and http.keys is None and not os.environ.get(KEY_VARIABLE):
        text = f"no API key is set: http.keys=FILE, or {KEY_VARIABLE} in the environment"
        raise ConfigError(f"http.listen is {http.listen}, which other hosts can reach, and {text}")


def _has_otel() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


def reserve(address: HttpAddress) -> socket.socket:
    """Return a socket that is bound to `address` and does not listen, so that it takes no connection. Raises OSError.

    Sockets that share the port have SO_REUSEPORT; one of another program without it keeps the port from being bound.
    """
    if address.path:
        return hold_socket(address.path)
    held = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        # Without this first, a port on which another program listens with SO_REUSEPORT would be shared with it. Closed
        # connections of an engine before this one, which the kernel keeps for a minute, do not matter by SO_REUSEADDR.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(address.place)
        port = held.getsockname()[1]
        held.close()
        held = socket.socket(address.family, socket.SOCK_STREAM)
        # No SO_REUSEADDR here, or another engine could hold the port, too.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind((address.ip, port))
    except OSError:
        held.close()
        raise
    return held


def with_port(profile: Profile, held: socket.socket) -> Profile:
    """Return `profile` with the port that is held in place of 0."""
    assert profile.http.listen is not None, "a port is held"
    address = parse_http(profile.http.listen)
    if address.path:
        return profile
    address = address._replace(port=held.getsockname()[1])
    return msgspec.structs.replace(profile, http=msgspec.structs.replace(profile.http, listen=str(address)))
