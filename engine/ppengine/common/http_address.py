"""Addresses of OpenAI's API: `HOST:PORT`, with an IP address of this host or localhost, or `unix:/PATH`."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from ppengine.protocol.discovery import SOCKET_PATH_MOST
from ppengine.protocol.error_text import shown

KEY_VARIABLE = "PPCONSOLE_API_KEY"
"""Environment variable with one API key, beside those of the file `http.keys`."""
_FORM = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):([0-9]{1,5})")
_FILE = re.compile(r"unix:(?://)?(/(?!/)[^\0-\x1f\x7f]*[^/\0-\x1f\x7f])")
_RIGHT = (
    "it must be HOST:PORT, with an IP address of this host or localhost, and a port up to 65535 (0: a free one), or "
    "unix:/PATH, with the whole path of a Unix socket"
)


class HttpAddress(NamedTuple):
    """Host, an IPv6 one in brackets, and port; or the path of a Unix socket."""

    host: str
    port: int
    path: str = ""
    """Path of a Unix socket, which has neither host nor port."""

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"unix:{self.path}" if self.path else f"{self.host}:{self.port}"

    @property
    def base_url(self) -> str:
        """How a client is pointed at it."""
        return str(self) if self.path else f"http://{self}/v1"

    @property
    def ip(self) -> str:
        """The host as a number."""
        return "127.0.0.1" if self.host == "localhost" else self.host.strip("[]")

    @property
    def family(self) -> socket.AddressFamily:
        """The family of its sockets."""
        if self.path:
            return socket.AF_UNIX
        return socket.AF_INET6 if ":" in self.ip else socket.AF_INET

    @property
    def place(self) -> str | tuple[str, int]:
        """The address to which sockets of its family are bound or connected."""
        return self.path or (self.ip, self.port)

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it."""
        return bool(self.path) or ipaddress.ip_address(self.ip).is_loopback


def parse_http(text: str) -> HttpAddress:
    """Return the address in `text`. Raises ValueError, in one line."""
    if (file := _FILE.fullmatch(text)) is not None:
        if (size := len(file[1].encode("utf-8", "surrogateescape"))) > SOCKET_PATH_MOST:
            raise ValueError(
                f"{shown(text)}: its path has {size} bytes, and that of a Unix socket at most {SOCKET_PATH_MOST}"
            )
        return HttpAddress("", 0, file[1])
    form = _FORM.fullmatch(text)
    if form is None or int(form[2]) > 65535:
        raise ValueError(f"{shown(text)} is no address; {_RIGHT}")
    address = HttpAddress(form[1], int(form[2]))
    try:
        ipaddress.ip_address(address.ip)
    except ValueError:
        raise ValueError(f"{shown(text)} is no address; {_RIGHT}") from None
    return address


def takes_connections(address: HttpAddress, within_s: float = 0.2) -> bool:
    """Return whether a process listens at the address, at once."""
    with socket.socket(address.family, socket.SOCK_STREAM) as probe:
        probe.settimeout(within_s)
        try:
            probe.connect(address.place)
        except BlockingIOError:
            return True  # A Unix socket whose backlog is full.
        except OSError:
            return False
    return True
