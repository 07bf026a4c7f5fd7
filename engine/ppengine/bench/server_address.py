"""Addresses of servers that are measured over HTTP: `http://HOST:PORT`, with a path or not, or `unix:/PATH`."""

from __future__ import annotations

import re
from typing import NamedTuple

from ppengine.common.http_address import parse_http

_URL = re.compile(r"http://([^/\s:]+):(\d{1,5})(/\S*)?")


class Target(NamedTuple):
    """Host and port of a server, or the path of its Unix socket."""

    host: str
    port: int
    prefix: str = ""
    """Path before that of the API."""
    file: str = ""

    def __str__(self) -> str:
        """Return it as it is written."""
        return f"unix:{self.file}" if self.file else f"http://{self.named}{self.prefix}"

    @property
    def named(self) -> str:
        """Value of the header `Host`."""
        return self.host if self.file else f"{self.host}:{self.port}"


def parse_target(text: str) -> Target:
    """Return the address in `text`. Raises ValueError, in one line."""
    if text.startswith("unix:"):
        return Target("localhost", 0, file=parse_http(text).path)
    url = _URL.fullmatch(text)
    if url is None or int(url[2]) > 65535:
        raise ValueError(f"{text}: write it as http://HOST:PORT or unix:/PATH")
    return Target(url[1], int(url[2]), (url[3] or "").rstrip("/").removesuffix("/v1"))
