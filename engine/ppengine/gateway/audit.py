"""The audit log: one JSON line before a command has an effect, and one for each of its results.

It lies in `<run folder>/audit.jsonl` (0600); when the engine has ended, its newest 4 MiB are among the kept files. With
PPCONSOLE_AUDIT_DIR set to a folder, every line is appended to `<folder>/<engine name>-<engine id>.jsonl` too. Prompts
are not written, only their lengths; a backend's place is written without its password.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ppengine.protocol.backend_fields import without_secrets
from ppengine.protocol.control import Command
from ppengine.protocol.store_verbs import StoreAdd
from ppengine.protocol.verbs import Many, Submit, label_of, name_of

KEEP_VARIABLE = "PPCONSOLE_AUDIT_DIR"
RESERVE, RESERVE_BYTES = "audit.reserve", 64 * 1024
TAIL_BYTES = 4 * 1024 * 1024
"""Bytes of its predecessor's lines that a new gateway reads."""
RECORDED_MOST = 1000
"""Commands with an end that it keeps for repeats."""
ENDS = frozenset({"applied", "failed", "superseded", "planned", "refused", "unknown"})
"""Outcomes after which a command has no other."""


def _failure(path: Path, error: OSError) -> AuditError:
    """Return the error with its reason before the path: a row of 80 columns ends with a long path."""
    return AuditError(f"the audit log cannot be written: {error.strerror} ({path})")


def audit_file(run_dir: Path) -> Path:
    """Return the path of an engine's log."""
    return run_dir / "audit.jsonl"


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
"""A link in a folder of several users could have the engine's user write to any file of its own."""


class AuditError(Exception):
    """The log cannot be written; one line."""


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line. `outcome`: received, accepted, deferred, applied, failed, superseded, planned, refused or unknown."""

    wall: float
    id: str
    by: str
    uid: int
    verb: str
    args: dict[str, Any]
    reason: str
    dry_run: bool
    outcome: str
    text: str = ""
    code: str = ""
    op: str = ""
    client: str = ""
    principal: str = ""
    """Name of the key that the command came with; `by` is a label which its owner chose."""
    override: bool = False
    """Whether it may act on requests of other keys."""


class Recorded(msgspec.Struct):
    """A command in the log of a gateway before this one: its first line, and its outcomes."""

    entry: Entry
    outcomes: list[Entry]

    @property
    def end(self) -> Entry | None:
        """The line of its end; None: it has none."""
        return self.outcomes[-1] if self.outcomes and self.outcomes[-1].outcome in ENDS else None


class AuditLog:
    """Appends to one or two files. A write is one system call, so lines never mix.

    A reserve on the disk of the first keeps room for the lines of `stop`, and for ends of commands under way.
    """

    def __init__(self, run_dir: Path, name: str, engine_id: str, environ: Mapping[str, str] = os.environ) -> None:
        """Open the files. Raises AuditError."""
        paths = [audit_file(run_dir)]
        if environ.get(KEEP_VARIABLE):
            paths.append(Path(environ[KEEP_VARIABLE]) / f"{name.replace('/', '_')}-{engine_id}.jsonl")
        self._files: list[tuple[Path, int]] = []
        self._reserve = run_dir / RESERVE
        for path in paths:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._files.append((path, os.open(path, _FLAGS, 0o600)))
            except OSError as error:
                raise _failure(path, error) from None
        with contextlib.suppress(AuditError):
            self._keep_reserve()

    def recorded(self) -> dict[str, Recorded]:
        """Return the commands of the last `TAIL_BYTES` by id: those without an end, and the newest others."""
        found: dict[str, Recorded] = {}
        for line in _last_lines(self._files[0][0]):
            try:
                entry = msgspec.json.decode(line, type=Entry)
            except (msgspec.MsgspecError, ValueError):
                continue  # The last line of a gateway that was killed.
            if entry.outcome == "received":
                found[entry.id] = Recorded(entry, [])
            elif entry.id in found:
                found[entry.id].outcomes.append(entry)
        newest = set(list(found)[-RECORDED_MOST:])
        return {one: known for one, known in found.items() if known.end is None or one in newest}

    def write(self, entry: Entry, *, reserved: bool = False) -> None:
        """Append one line. `reserved`: it may use the reserve, and others need one that is whole.

        Raises AuditError: a command that cannot be recorded must not be carried out.
        """
        if not reserved:
            self._keep_reserve()
        line = msgspec.json.encode(entry) + b"\n"
        for number, (path, descriptor) in enumerate(self._files):
            self._files[number] = path, _present(path, descriptor)  # one by one: that of the next may raise
        for path, descriptor in self._files:
            try:
                try:
                    _append(descriptor, line)
                except OSError:
                    if not reserved or not self._reserve.exists():
                        raise
                    self._reserve.unlink()
                    _append(descriptor, line)
            except OSError as error:
                raise _failure(path, error) from None

    def _keep_reserve(self) -> None:
        """Take the reserve, unless it is there. Raises AuditError."""
        if self._reserve.exists():
            return
        try:
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, RESERVE_BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._reserve.unlink(missing_ok=True)
            raise _failure(self._files[0][0], error) from None

    def close(self) -> None:
        """Close the files."""
        for _, descriptor in self._files:
            os.close(descriptor)
        self._files.clear()


def _present(path: Path, descriptor: int) -> int:
    """Return the descriptor of a log; one whose file was removed is written again, with all its lines."""
    if path.exists():
        return descriptor
    try:
        lines = Path(f"/proc/self/fd/{descriptor}").read_bytes()
        fresh = os.open(path, _FLAGS, 0o600)
    except OSError as error:
        raise _failure(path, error) from None
    try:
        _append(fresh, lines)
    except OSError as error:
        os.close(fresh)
        path.unlink(missing_ok=True)
        raise _failure(path, error) from None
    os.close(descriptor)
    return fresh


def _append(descriptor: int, line: bytes) -> None:
    """Append a line, or nothing of it. Raises OSError."""
    written = os.write(descriptor, line)
    if written < len(line):
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def entry_of(command: Command, client: str, principal: str) -> Entry:
    """Return the first line of a command."""
    return Entry(
        wall=time.time(),
        id=command.id,
        by=command.by,
        uid=os.getuid(),
        verb=name_of(command.verb),
        args=_arguments(command),
        reason=command.reason,
        dry_run=command.dry_run,
        outcome="received",
        client=client,
        principal=principal,
        override=command.override,
    )


def _last_lines(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        return file.read().splitlines()


def _arguments(command: Command) -> dict[str, Any]:
    """Return the verb's arguments as plain data, texts and tokens of a prompt as lengths, many requests as ids."""
    if isinstance(command.verb, Many):
        many = command.verb
        each = msgspec.to_builtins(many.verbs[0])
        shared = {name: value for name, value in each.items() if name not in ("type", "request")}
        return {"verb": label_of(many), "count": len(many.verbs), "requests": many.requests, **shared}
    arguments: dict[str, Any] = msgspec.to_builtins(command.verb, str_keys=True)
    arguments.pop("type", None)
    if isinstance(command.verb, StoreAdd):
        arguments["url"] = without_secrets(command.verb.url)
    if isinstance(command.verb, Submit):
        for field in ("prompt", "prompt_token_ids", "cache_salt"):
            value = arguments.pop(field, None)
            if value is not None:
                arguments[f"{field}_length"] = len(value)
        # Stop texts and bad words are the user's words too.
        sampling = arguments.get("sampling", {})
        for field in {"stop", "bad_words", "bad_words_ids"}.intersection(sampling):
            sampling[field] = [len(text) for text in sampling[field]]
    return arguments
