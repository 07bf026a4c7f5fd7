"""The file `keys/allowed`: one key a line, `ROLE KEY NAME`. Comments begin with `#`.

operator 5f0c...9e21 alice@laptop
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from ppengine.protocol.error_text import one_line, shown
from ppengine.protocol.keys import KeyFileError, check_key, keys_dir, read_private, write_private
from ppengine.protocol.verb_table import Role

ROLES: tuple[Role, ...] = get_args(Role)
NAME_MOST = 64
OWNER = "owner"
"""Name of the user who runs the engine: the own key is admin without a line here."""
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._@-]{{0,{NAME_MOST - 1}}}")


class AllowedKey(NamedTuple):
    """One key that may attach, with the least that the engine knows of its owner."""

    role: Role
    key: str
    """Public key in hex."""
    name: str


def allowed_path() -> Path:
    """Return the place of the file; it may be missing. Raises KeyFileError."""
    return keys_dir() / "allowed"


def check_name(name: str) -> str:
    """Return the name of a key. Raises KeyFileError for one that a line cannot hold."""
    if not _NAME.fullmatch(name):
        right = f"1 to {NAME_MOST} letters, digits, '.', '_', '@' and '-', with no sign first"
        raise KeyFileError(f"{shown(name)} is no name of a key; it must have {right}")
    if name == OWNER:
        raise KeyFileError(f"{OWNER} is the name of the engine's own user; give another one")
    return name


def parse(text: str) -> tuple[list[AllowedKey], list[str]]:
    """Return the keys, and a problem for each line that is none: it has no effect."""
    found: list[AllowedKey] = []
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            one = _key_of(line)
        except KeyFileError as error:
            problems.append(one_line(f"line {number}: {error}"))
            continue
        if one is None:
            continue
        twice = next((other for other in found if one.key == other.key or one.name == other.name), None)
        if twice is not None:
            problems.append(f"line {number}: {one.name} has the key or the name of an earlier line")
            continue
        found.append(one)
    return found, problems


def read_allowed(path: Path) -> tuple[list[AllowedKey], list[str]]:
    """Return keys and problems of the file; without a file there are none. Raises KeyFileError."""
    return parse(_text(path))


def allow(path: Path, one: AllowedKey) -> None:
    """Add a key, and leave all other lines. Raises KeyFileError if its name or key is there."""
    text = _text(path)
    for other in parse(text)[0]:
        if one.key == other.key or one.name == other.name:
            which = "key" if one.key == other.key else "name"
            raise KeyFileError(
                f"{path} has this {which}: {other.role} {other.name}; to change it: ppconsole key revoke {other.name}"
            )
    lines = [*text.splitlines(), f"{one.role} {one.key} {one.name}"]
    _write(path, lines)


def revoke(path: Path, name: str) -> AllowedKey:
    """Remove the key of a name, and return it. Raises KeyFileError if there is none."""
    lines = _text(path).splitlines()
    keys = parse("\n".join(lines))[0]
    gone = next((one for one in keys if one.name == name), None)
    if gone is None:
        names = ", ".join(one.name for one in keys) or "none"
        raise KeyFileError(f"{path} has no key named {shown(name)}; its names: {names}")
    # Every line with this key goes, a repeated one as well: it would count as soon as the first is gone.
    _write(path, [line for line in lines if not _mentions(line, gone)])
    return gone


def _mentions(line: str, gone: AllowedKey) -> bool:
    words = line.split("#", 1)[0].split()
    return gone.key in words or words[2:3] == [gone.name]


def _key_of(line: str) -> AllowedKey | None:
    words = line.split("#", 1)[0].split()
    if not words:
        return None
    if len(words) != 3:
        raise KeyFileError(f"{len(words)} words where ROLE KEY NAME belong")
    role, key, name = words
    if role not in ROLES:
        raise KeyFileError(f"{shown(role)} is no role; the roles are {', '.join(ROLES)}")
    return AllowedKey(role, check_key(key), check_name(name))


def _text(path: Path) -> str:
    try:
        return read_private(path).decode()
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError:
        raise KeyFileError(f"{path} is not UTF-8") from None


def _write(path: Path, lines: Sequence[str]) -> None:
    write_private(path, "".join(f"{line}\n" for line in lines).encode())
