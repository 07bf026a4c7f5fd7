"""Addresses of the HTTP port: `HOST:PORT`, with an IP address of this host, or localhost."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

from ppengine.protocol.error_text import shown

KEY_VARIABLE = "PPCONSOLE_API_KEY"
"""Environment variable with one API key, beside those of the file `http.keys`."""
_FORM = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):([0-9]{1,5})")
_RIGHT = "it must be HOST:PORT, with an IP address of this host or localhost, and a port up to 65535 (0: a free one)"


class HttpAddress(NamedTuple):
    """Host, an IPv6 one in brackets, and port."""

    host: str
    port: int

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"{self.host}:{self.port}"

    @property
    def ip(self) -> str:
        """The host as a number."""
        return "127.0.0.1" if self.host == "localhost" else self.host.strip("[]")

    @property
    def six(self) -> bool:
        """Whether the host is an IPv6 address."""
        return ":" in self.ip

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it."""
        return ipaddress.ip_address(self.ip).is_loopback


def parse_http(text: str) -> HttpAddress:
    """Return the address in `text`. Raises ValueError, in one line."""
    form = _FORM.fullmatch(text)
    if form is None or int(form[2]) > 65535:
        raise ValueError(f"{shown(text)} is no address; {_RIGHT}")
    address = HttpAddress(form[1], int(form[2]))
    try:
        ipaddress.ip_address(address.ip)
    except ValueError:
        raise ValueError(f"{shown(text)} is no address; {_RIGHT}") from None
    return address
