"""The control lease: while a key holds it, verbs of other keys are refused, except for their own submissions.

It is kept in `<run folder>/lease.json`, so it outlives a gateway. Each verb of its holder renews it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import assert_never

import msgspec

from ppengine.protocol.control import Accepted, Command, Outcome, Refused, Reply
from ppengine.protocol.json_files import read_json_file
from ppengine.protocol.kept_files import write_file
from ppengine.protocol.snapshot import LeaseInfo
from ppengine.protocol.verb_table import Row, covers
from ppengine.protocol.verbs import Lease, Many, row_of

log = logging.getLogger("ppengine.gateway")
_WRITE_S = 1.0
"""A renewal by less, in seconds, is not written."""


class Held(msgspec.Struct, kw_only=True):
    """A lease. Times are of the monotonic clock, which all processes of a host share."""

    principal: str
    by: str
    ttl_s: float
    until: float


class ControlLease:
    """At most one lease. A holder whose key is revoked, or is no operator any more, loses it."""

    def __init__(self, path: Path, say: Callable[[str, str], object], may_hold: Callable[[str], bool]) -> None:
        """Go on with the lease in the file. `say` makes an event; `may_hold` is asked about the name of a key."""
        self._path, self._say, self._may_hold = path, say, may_hold
        self._written = 0.0
        self._held = self._read()

    def info(self) -> LeaseInfo | None:
        """Return the lease as snapshots have it."""
        held, now = self._held, time.monotonic()
        if held is None or held.until <= now:
            return None
        return LeaseInfo(principal=held.principal, by=held.by, left_s=round(held.until - now, 1))

    def obstacle(self, command: Command) -> str:
        """Return why a command of another key is refused, empty if it is not; one of the holder renews the lease.

        An abort passes without the rights of an override, so that the core lets it end own requests alone.
        """
        self.expire()
        held, leased = self._held, _row(command).leased
        if held is None or leased == "free" or command.dry_run:
            return ""
        if held.principal == command.principal:
            self._renew(held)
            return ""
        if leased == "own" and not command.override:
            command.role = "operator" if covers(command.role, "operator") else command.role
            return ""
        return f"{_words(held)}; ppconsole lease take --force takes it over"

    def handle(self, command: Command, op: str) -> Iterator[Reply]:
        """Yield the answers to a `Lease`; act between them."""
        verb = command.verb
        assert isinstance(verb, Lease), "the gateway has no other verb for it"
        self.expire()
        held = self._held
        other = held if held is not None and held.principal != command.principal else None
        match verb.action:
            case "take" if other is not None and not verb.force:
                yield Refused(id=command.id, code="LEASED", text=f"{_words(other)}; --force takes it over")
                return
            case "release" if other is not None:
                yield Refused(id=command.id, code="LEASED", text=f"{_words(other)}; its holder releases it")
                return
            case "release" if held is None:
                yield Refused(id=command.id, code="NOT_FOUND", text="no key holds the lease")
                return
            case "take":
                plan = f"verbs of other keys than {command.principal} are refused until {verb.ttl_s:g} s without one"
            case "release":
                plan = "all keys may change the engine again"
            case _:
                assert_never(verb.action)
        plan += f"; taken over from key {other.principal}" if other is not None else ""
        if command.dry_run:
            yield Outcome(id=command.id, op=op, state="planned", text=plan, plan=[plan])
            return
        yield Accepted(id=command.id, op=op, plan=[plan])
        if verb.action == "take":
            self._held = Held(
                principal=command.principal, by=command.by, ttl_s=verb.ttl_s, until=time.monotonic() + verb.ttl_s
            )
        else:
            self._held = None
        self._write()
        if other is not None:
            why = f": {command.reason}" if command.reason else ""
            text = f"key {command.principal} has taken the control lease from key {other.principal}{why}"
            self._say("lease.takeover", text)
        yield Outcome(id=command.id, op=op, state="applied", text=plan)

    def expire(self) -> None:
        """End a lease whose time is over, or whose holder may change nothing any more."""
        held = self._held
        if held is None:
            return
        over, lost = held.until <= time.monotonic(), not self._may_hold(held.principal)
        if over or lost:
            self._held = None
            self._write()
            why = f"after {held.ttl_s:g} s without a verb" if over else "its key may change nothing any more"
            self._say("lease.ended", f"the control lease of key {held.principal} has ended, {why}")

    def _renew(self, held: Held) -> None:
        held.until = time.monotonic() + held.ttl_s
        if held.until - self._written >= _WRITE_S:
            self._write()

    def _read(self) -> Held | None:
        try:
            return read_json_file(self._path, Held)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            log.warning("the control lease in %s cannot be read, it has ended: %s", self._path, error)
            return None

    def _write(self) -> None:
        try:
            if self._held is None:
                self._path.unlink(missing_ok=True)
            else:
                write_file(self._path, msgspec.json.encode(self._held))
                self._written = self._held.until
        except OSError as error:
            log.warning("the control lease is not kept for another gateway: %s: %s", self._path, error.strerror)


def _row(command: Command) -> Row:
    """Return the row of a verb; of many verbs, that of each."""
    verb = command.verb
    return row_of(verb.verbs[0] if isinstance(verb, Many) else verb)


def _words(held: Held) -> str:
    left = max(0.0, held.until - time.monotonic())
    return f"key {held.principal} ({held.by}) holds the control lease for {left:.0f} s more"
