"""HTTP for hubs: bounded answers, bounded redirects, and files that go on where they broke off."""

from __future__ import annotations

import hashlib
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec
from typing_extensions import override

from ppengine.checkpoint.config_json import CheckpointError
from ppengine.protocol.error_text import one_line, shown

TIMEOUT_S = 20.0
"""Seconds without a byte after which a connection counts as broken."""
LISTING_MOST = 16 * 1024 * 1024
"""Bytes of a listing."""
REDIRECTS_MOST = 5
_TRIES = 4
"""Broken connections in a row, without a new byte, after which a download ends."""
_CHUNK = 1 << 20
_BROKEN = (OSError, http.client.HTTPException)


class HubError(CheckpointError):
    """A model that a hub does not give. One line: the model or file, the reason, and what would be right."""


class Stopped(Exception):
    """The download was stopped on request; what has come stays for the next one."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """A few, to https alone unless the hub itself is not, and a token only within one host."""

    max_redirections = REDIRECTS_MOST
    max_repeats = 2

    @override
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> urllib.request.Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme != "https" and after.scheme != before.scheme:
            raise HubError(f"{before.hostname} redirects to {shown(newurl, 120)}; only https is followed")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
        if request is not None and after.netloc == before.netloc:
            for name, value in req.unredirected_hdrs.items():
                request.add_unredirected_header(name, value)
        return request


class Transfer:
    """Requests to one hub. `token` goes to its own host alone; `stopped` is asked between parts of an answer."""

    def __init__(self, token: str = "", stopped: Callable[[], bool] = lambda: False, pause_s: float = 1.0) -> None:
        self._token, self._stopped, self._pause_s = token, stopped, pause_s
        self._opener = urllib.request.build_opener(_Redirects())

    def listing(self, url: str, kind: Any) -> Any:
        """Return the JSON at `url`, decoded as `kind`. Raises HubError."""
        try:
            with self._open(url, {}) as answer:
                text = answer.read(LISTING_MOST + 1)
        except _BROKEN as error:
            raise HubError(f"{_host(url)}: {_reason(error)}") from None
        if len(text) > LISTING_MOST:
            raise HubError(f"{_host(url)}: a listing of more than {LISTING_MOST} bytes")
        try:
            return msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise HubError(f"{_host(url)}: a listing of another form: {one_line(str(error), 120)}") from None

    def download(self, url: str, part: Path, size: int, hasher: Any, came: Callable[[int], None]) -> None:
        """Bring `part` to `size` bytes, behind those that it has; feed all of them to `hasher`.

        `came` is called with the bytes of each chunk, those that were there included. Raises HubError, Stopped.
        """
        with open(part, "ab+", opener=no_link) as file:
            file.seek(0)
            self.feed(file, hasher, came)
            failures = 0
            while (have := file.tell()) < size:
                try:
                    self._rest(url, file, size, hasher, came)
                    error: Exception = OSError("the connection ended early")
                except _BROKEN as broken:
                    error = broken
                if isinstance(error, urllib.error.HTTPError) and error.code < 500:
                    raise HubError(f"{_host(url)}: {_reason(error)}") from None
                failures = 0 if file.tell() > have else failures + 1
                if file.tell() < size:
                    if failures == _TRIES:
                        raise HubError(f"{_host(url)}: {_reason(error)}, {_TRIES} times in a row") from None
                    time.sleep(self._pause_s)

    def feed(self, file: IO[bytes], hasher: Any, came: Callable[[int], None]) -> None:
        """Feed the bytes of a file that is here to `hasher`; gigabytes take a while. Raises Stopped, OSError."""
        while chunk := file.read(_CHUNK):
            self._check()
            hasher.update(chunk)
            came(len(chunk))

    def _rest(self, url: str, file: IO[bytes], size: int, hasher: Any, came: Callable[[int], None]) -> None:
        """Append the bytes behind those of `file`, as many as come. Raises HubError, Stopped, `_BROKEN`."""
        have = file.tell()
        with self._open(url, {"Range": f"bytes={have}-"} if have else {}) as answer:
            if have and answer.status == 206:
                begins = str(answer.headers.get("Content-Range", ""))
                if not begins.startswith(f"bytes {have}-"):
                    raise HubError(f"{_host(url)}: bytes from {have} were requested; it sent {shown(begins, 60)}")
            else:
                # This server sends whole files alone: those bytes are here.
                while have and (chunk := answer.read1(min(have, _CHUNK))):
                    self._check()
                    have -= len(chunk)
            # One byte more than there should be shows a file that is too long.
            # `read1` gives what has come, so that a connection that stalls later loses nothing.
            while chunk := answer.read1(min(_CHUNK, size - file.tell() + 1)):
                self._check()
                if file.tell() + len(chunk) > size:
                    raise HubError(f"{_host(url)}: more than the {size} bytes of its listing")
                try:
                    file.write(chunk)
                    file.flush()
                except OSError as error:
                    # The file may have a part of the chunk, which the hasher has not.
                    raise HubError(f"{file.name}: {error.strerror}") from None
                hasher.update(chunk)
                came(len(chunk))

    def _open(self, url: str, headers: dict[str, str]) -> Any:
        self._check()
        request = urllib.request.Request(url, headers={"User-Agent": "ppconsole", **headers})
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return self._opener.open(request, timeout=TIMEOUT_S)

    def _check(self) -> None:
        if self._stopped():
            raise Stopped


def no_link(path: str, flags: int) -> int:
    """Open a file, and no link: in a folder of several users, another one could have it name any file of this user."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def git_hasher(size: int) -> Any:
    """Return a hasher of git's name of a blob of `size` bytes, which hubs list for small files."""
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)


def _host(url: str) -> str:
    return urlsplit(url).netloc


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        if error.code in (401, 403):
            return f"status {error.code}: no such model, or it needs a token of yours in HF_TOKEN"
        if error.code == 404:
            return "status 404: no such model, revision or file"
        redirects = f": more than {REDIRECTS_MOST} redirects, or one that leaves HTTP" if error.code < 400 else ""
        return f"status {error.code}{redirects}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        error = error.reason
    if isinstance(error, TimeoutError):
        return f"no answer for {TIMEOUT_S:g} s"
    return one_line(getattr(error, "strerror", None) or str(error) or type(error).__name__, 120)
