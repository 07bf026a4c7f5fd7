"""Addresses of engines on other hosts: `tcp://HOST:PORT`, the first of three consecutive ports."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from ppengine.protocol.error_text import shown

SOCKETS = ("control", "state", "bulk")
"""Public sockets in the order of their ports."""
_PORT_MOST = 65536 - len(SOCKETS)
_FORM = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):([0-9]{1,5})")
_RIGHT = f"it must be tcp://HOST:PORT, with a port from 1 to {_PORT_MOST}"


class TcpAddress(NamedTuple):
    """Host, an IPv6 one in brackets, and first port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"tcp://{self.host}:{self.port}"

    def endpoint(self, name: str) -> str:
        """Return the endpoint of a public socket."""
        return f"tcp://{self.host}:{self.port + SOCKETS.index(name)}"

    @property
    def six(self) -> bool:
        """Whether the host is an IPv6 address."""
        return self.host.startswith("[")

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> TcpAddress:
    """Return the address in `text`. Raises ValueError, in one line."""
    form = _FORM.fullmatch(text)
    if form is None or not 1 <= int(form[2]) <= _PORT_MOST:
        raise ValueError(f"{shown(text)} is no address; {_RIGHT}")
    return TcpAddress(form[1], int(form[2]))


def check_listen(text: str) -> TcpAddress:
    """Return an address to listen on: a number, or localhost. Raises ValueError, in one line."""
    if text.startswith(("tcp://*:", "tcp://:")):
        raise ValueError(f"{shown(text)} would be every interface; write it in full: tcp://0.0.0.0:PORT")
    address = parse_address(text)
    try:
        ipaddress.ip_address(address.host.strip("[]"))
    except ValueError:
        if address.host != "localhost":
            raise ValueError(f"{shown(text)}: a host to listen on must be an IP address of this one") from None
    return address
