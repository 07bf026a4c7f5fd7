"""API keys of the port. Without any, a loopback address is open to all users of the host."""

from __future__ import annotations

import hmac
import os
from pathlib import Path

from ppengine.common.config import ConfigError
from ppengine.common.http_address import KEY_VARIABLE, HttpAddress
from ppengine.http.api_errors import ApiError
from ppengine.http.key_limits import MOST
from ppengine.protocol.clients import KeyLimit

_BYTES_MOST = 2**20
KEY_LEAST = 16
"""Least characters of a key."""


class ApiKeys:
    """Names by key, and limits by name. Every comparison takes the same time, however much of a key is right."""

    def __init__(self, names: dict[bytes, str], limits: dict[str, KeyLimit] | None = None) -> None:
        self._names, self.limits = names, limits or {}

    @property
    def none(self) -> bool:
        """Whether there is no key, so that each caller is taken."""
        return not self._names

    @classmethod
    def load(cls, path: str | None) -> ApiKeys:
        """Read the file `path`, a key a line as `NAME KEY [LIMIT=N ...]`, and the environment. Raises ConfigError."""
        names, limits = ({}, {}) if path is None else _read(Path(path))
        if path is not None and not names:
            raise ConfigError(f"http.keys: {path} has no key; write a line each as NAME KEY")
        if key := os.environ.get(KEY_VARIABLE, ""):
            if len(key) < KEY_LEAST:
                raise ConfigError(f"{KEY_VARIABLE} has {len(key)} characters; a key has {KEY_LEAST} or more")
            names[key.encode()] = "api"
        return cls(names, limits)

    def check(self, address: HttpAddress) -> None:
        """Raise ConfigError for an address that other hosts can reach, without a key."""
        if not self._names and not address.loopback:
            raise ConfigError(f"http.listen is {address}, which other hosts can reach, and no API key is set")

    def caller(self, authorization: str | None, plain: str | None = None) -> str:
        """Return the name of the key in an `Authorization` header, `http` if none is needed. Raises ApiError.

        `plain` is the header `x-api-key`, which Anthropic's clients send.
        """
        if not self._names:
            return "http"
        text = plain if authorization is None else authorization
        # The scheme may have letters of either case.
        scheme, _, key = (text or "").partition(" ")
        given = (key if scheme.lower() == "bearer" else text or "").strip().encode("utf-8", "surrogateescape")
        found = [name for key, name in self._names.items() if hmac.compare_digest(key, given)]
        if not found:
            text = "the API key is not known here" if given else "give an API key: Authorization: Bearer KEY"
            raise ApiError(401, "authentication_error", text, code="invalid_api_key")
        return found[0]


def _read(path: Path) -> tuple[dict[bytes, str], dict[str, KeyLimit]]:
    try:
        info = path.stat()
        # Kubernetes mounts a secret as root's, for the group of the pod.
        if info.st_mode & (0o077 if info.st_uid == os.getuid() else 0o007):
            raise ConfigError(f"http.keys: {path} can be read by others; chmod 600 {path}")
        with path.open("rb") as file:
            lines = file.read(_BYTES_MOST).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"http.keys: {path} cannot be read: {error}") from None
    names, limits = dict[bytes, str](), dict[str, KeyLimit]()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"http.keys: {path}, line {number}"
        if len(words) < 2 or len(words[1]) < KEY_LEAST:
            right = f"write NAME KEY, with a key of {KEY_LEAST} characters or more"
            raise ConfigError(f"{place}: {right}")
        names[words[1].encode()] = words[0]
        limit = _limit(words[2:], place)
        if limits.setdefault(words[0], limit) != limit:
            raise ConfigError(f"{place}: {words[0]} has other limits in a line before; keys of one name share them")
    return names, {name: limit for name, limit in limits.items() if limit != KeyLimit()}


def _limit(words: list[str], place: str) -> KeyLimit:
    """Return the limits in the rest of a line. Raises ConfigError."""
    given = dict[str, int]()
    for word in words:
        name, _, text = word.partition("=")
        number = int(text) if text.isascii() and text.isdigit() and len(text) <= len(str(MOST)) else 0
        if name not in KeyLimit.__struct_fields__ or name in given or not 1 <= number <= MOST:
            right = f"{', '.join(KeyLimit.__struct_fields__)}, each once, as NAME=N with N from 1 to {MOST}"
            raise ConfigError(f"{place}: {word[:80]} is no limit; there are {right}")
        given[name] = number
    return KeyLimit(**given)
