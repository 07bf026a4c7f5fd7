"""Keys that may attach to this engine, and their roles: the user's own, and those in `keys/allowed`, read live."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec

from ppengine.protocol.allowed_keys import OWNER, read_allowed
from ppengine.protocol.error_text import one_line
from ppengine.protocol.keys import KeyFileError, read_keypair
from ppengine.protocol.verb_table import Role


class Principal(msgspec.Struct, frozen=True):
    """The owner of a key. `name` is the key's, and goes into the audit log."""

    key: str
    name: str
    role: Role


class Keyring:
    """Follows the files by their times. One that cannot be read allows no key.

    The ZAP thread and the gateway's loop both use it.
    """

    def __init__(self, folder: Path) -> None:
        """Read the keys in `folder`."""
        self._own, self._allowed = folder / "client.key", folder / "allowed"
        self._lock = threading.Lock()
        self._seen: object = None
        self._problems: list[str] = []
        self._news: list[tuple[str, str]] = []
        self._principals: dict[str, Principal] = {}
        self._had_own = False
        """Whether the user's own key has been read: the first console makes it, which changes no rights."""
        self.revocations = 0
        """Number of changes by which a key lost its access."""
        self.refresh()

    def refresh(self) -> None:
        """Read the files again if they have changed."""
        with self._lock:
            seen = tuple(map(_mark, (self._own, self._allowed)))
            if seen == self._seen:
                return
            found, problems = self._read()
            lost = self._principals.keys() - found.keys()
            if self._seen is not None:
                changes = _changes(self._principals, found, first_own=not self._had_own)
                self._news += [("keys.changed", text) for text in changes]
            self._had_own = self._had_own or any(one.name == OWNER for one in found.values())
            self._seen, self._principals = seen, found
            self.revocations += bool(lost)
            self._news += [("keys.error", problem) for problem in problems if problem not in self._problems]
            self._problems = problems

    def take_news(self) -> list[tuple[str, str]]:
        """Return kind and text of the events that are not reported yet: changes, and problems of the files."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def principal(self, key: str) -> Principal | None:
        """Return the owner of a key that may attach now; None: it may not."""
        self.refresh()
        return self._principals.get(key)

    def principals(self) -> list[Principal]:
        """Return the owners of all keys that may attach now."""
        self.refresh()
        return list(self._principals.values())

    def accepts(self, key: str) -> bool:
        """Return whether a key may attach now."""
        return self.principal(key) is not None

    def _read(self) -> tuple[dict[str, Principal], list[str]]:
        found: dict[str, Principal] = {}
        problems: list[str] = []
        try:
            keys, wrong = read_allowed(self._allowed)
            found = {one.key: Principal(one.key, one.name, one.role) for one in keys}
            problems += [f"{self._allowed}: {line}" for line in wrong]
        except KeyFileError as error:
            problems.append(f"{error}; none of its keys is allowed")
        try:
            own = read_keypair(self._own).public
            found[own] = Principal(own, OWNER, "admin")
        except FileNotFoundError:
            pass  # The first console of this user makes it.
        except KeyFileError as error:
            problems.append(f"{error}; consoles of this user are refused")
        return found, list(map(one_line, problems))


def _changes(before: dict[str, Principal], after: dict[str, Principal], *, first_own: bool) -> list[str]:
    """Return a line for each key that came, went or got another name or role.

    `first_own`: the user's own key was never there before, so that it is no change of keys.
    """
    gone = [f"key {one.name} is revoked" for key, one in before.items() if key not in after]
    new = (one for key, one in after.items() if before.get(key) != one)
    return gone + [f"key {one.name} is {one.role}" for one in new if not (first_own and one.name == OWNER)]


def _mark(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes with the file; None without one."""
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_mode
