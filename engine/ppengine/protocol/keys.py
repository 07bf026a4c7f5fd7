"""Keypairs of this user, in 0600 files that no other user may read.

$XDG_CONFIG_HOME/ppconsole/keys/     (or ~/.config/... where the variable is not set), 0700
    client.key                       keypair of the user's consoles
    server.key                       keypair of the user's engines: consoles elsewhere pin its public half
    allowed                          keys of other users (`allowed_keys.py`)

A key is 64 hex digits everywhere, so that a shell takes it as one plain word.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from ppengine.protocol.error_text import shown
from ppengine.protocol.json_files import BYTES_MOST, decode_json

KEY_DIGITS = 64
_KEY = re.compile(rf"[0-9a-f]{{{KEY_DIGITS}}}")


class KeyFileError(Exception):
    """A key or its file cannot be used. One line: the file, the defect, and the right form."""


class Keypair(msgspec.Struct, frozen=True):
    """A CURVE keypair, each half in hex."""

    public: str
    secret: str

    def __repr__(self) -> str:
        """Return the public half alone: a log or a traceback must not have the other."""
        return f"Keypair({self.public})"


def check_key(text: str) -> str:
    """Return a public key. Raises KeyFileError for any other text."""
    if not _KEY.fullmatch(text):
        raise KeyFileError(f"{shown(text)} is no key; a key has {KEY_DIGITS} digits of 0-9 and a-f")
    return text


def config_dir() -> Path:
    """Return the user's folder of settings; it may be missing."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if base.startswith("/") else Path("~/.config").expanduser()) / "ppconsole"


def keys_dir() -> Path:
    """Return the folder of keys, made 0700 if missing. Raises KeyFileError."""
    path = config_dir() / "keys"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror}; keys need a folder of yours: set XDG_CONFIG_HOME") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise KeyFileError(f"{path} must be a folder of uid {os.getuid()}, and no link")
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise KeyFileError(_mode_text(path, info, "0700"))
    return path


def read_private(path: Path) -> bytes:
    """Return the content of a file that this user alone may read. Raises OSError if missing, and KeyFileError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        link = path.is_symlink()
        text = f"is a link to {path.readlink()}; it must be a file" if link else f"cannot be read: {error.strerror}"
        raise KeyFileError(f"{path} {text}") from None
    with os.fdopen(descriptor, "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            raise KeyFileError(f"{path} must be a file of uid {os.getuid()}, it is one of uid {info.st_uid}")
        if stat.S_IMODE(info.st_mode) & 0o077:
            raise KeyFileError(_mode_text(path, info, "0600"))
        data = file.read(BYTES_MOST + 1)
    if len(data) > BYTES_MOST:
        raise KeyFileError(f"{path} has more than {BYTES_MOST} bytes, the most that is read")
    return data


def read_keypair(path: Path) -> Keypair:
    """Return the keypair in a file. Raises FileNotFoundError, KeyFileError."""
    try:
        pair = decode_json(read_private(path), Keypair)
    except ValueError:
        raise KeyFileError(f"{path} has no keypair; remove it, and the next use makes another") from None
    if not _KEY.fullmatch(pair.public) or not _KEY.fullmatch(pair.secret):
        raise KeyFileError(f"{path} has no keypair; remove it, and the next use makes another")
    return pair


def own_keypair(name: str, make: Callable[[], Keypair]) -> Keypair:
    """Return the keypair `client` or `server` of this user, made at its first use. Raises KeyFileError.

    `make` returns a new pair. If several processes make it at once, the first one's counts.
    """
    path = keys_dir() / f"{name}.key"
    with contextlib.suppress(FileNotFoundError):
        return read_keypair(path)
    write_keypair(path, make(), replace=False)
    return read_keypair(path)


def adopt_server_key(run_dir: Path, make: Callable[[], Keypair]) -> Keypair:
    """Return the keypair of one engine: the user's at its first use, and the same until its end.

    The copy in the run folder keeps it for a gateway that replaces another one. Raises KeyFileError.
    """
    path = run_dir / "server.key"
    with contextlib.suppress(FileNotFoundError):
        return read_keypair(path)
    write_keypair(path, own_keypair("server", make), replace=False)
    return read_keypair(path)


def public_key(run_dir: Path) -> str:
    """Return the public key of one engine; empty as long as it has none."""
    try:
        return read_keypair(run_dir / "server.key").public
    except (KeyFileError, FileNotFoundError):
        return ""


def write_keypair(path: Path, pair: Keypair, *, replace: bool = True) -> None:
    """Write a keypair at once or not at all. Without `replace` a file that is there stays. Raises KeyFileError."""
    write_private(path, msgspec.json.encode(pair) + b"\n", replace=replace)


def write_private(path: Path, data: bytes, *, replace: bool = True) -> None:
    """Write a 0600 file at once or not at all, under any umask. Raises KeyFileError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if replace:
                draft.replace(path)
            else:
                with contextlib.suppress(FileExistsError):
                    os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise KeyFileError(f"{path} cannot be written: {error.strerror}") from None


def _mode_text(path: Path, info: os.stat_result, right: str) -> str:
    mode = stat.S_IMODE(info.st_mode)
    return f"{path} has mode {mode:04o}: others can reach it; chmod {right} {path}"
