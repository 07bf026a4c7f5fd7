"""Checks of a command before it may have an effect: role, epoch, override, age, lease, in this order."""

from __future__ import annotations

from ppengine.gateway.control_lease import ControlLease
from ppengine.gateway.sessions import Session
from ppengine.protocol.control import Command, ErrorCode, Refused
from ppengine.protocol.frames import Header
from ppengine.protocol.verb_table import Role, covers
from ppengine.protocol.verbs import Many, Verb, name_of, row_of


def refusal_of(head: Header, command: Command, session: Session, epoch: str, lease: ControlLease) -> Refused | None:
    """Return why a command is refused; None if it is not."""
    if not covers(session.role, least := _least_role(command.verb)):
        read_only, name = f"{session.user} is attached read-only", name_of(command.verb)
        key = f"key {session.principal.name} is {session.role}, {name} needs {least}"
        return refused(command, "DENIED", f"{read_only if session.read_only else key}: {name} is refused")
    if command.epoch != epoch:
        text = f"the engine was restarted: epoch {command.epoch[:64]!r} has ended, {epoch} runs"
        return refused(command, "STALE_EPOCH", text)
    if command.override and not command.reason.strip():
        return refused(command, "INVALID", "an override needs a reason: --reason TEXT")
    age_ms = session.age_s(head) * 1e3
    if not age_ms <= command.ttl_ms:
        return refused(command, "EXPIRED", f"sent {age_ms:.0f} ms ago, it was good for {command.ttl_ms} ms")
    leased = lease.obstacle(command)
    return refused(command, "LEASED", leased) if leased else None


def refused(command: Command, code: ErrorCode, text: str) -> Refused:
    """Return a refusal of `command`."""
    return Refused(id=command.id, code=code, text=text)


def _least_role(verb: Verb) -> Role:
    """Return the least role for a verb; several at once need as much as one."""
    return row_of(verb.verbs[0]).role if isinstance(verb, Many) and verb.verbs else row_of(verb).role
