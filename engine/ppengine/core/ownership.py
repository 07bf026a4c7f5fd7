"""Requests of other keys: a verb that acts on them needs an override with a reason, or the role admin.

A request belongs to the name of the key that submitted it. A user whose key is replaced under the same name keeps it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from ppengine.core.plans import CommandError
from ppengine.core.scheduler.request import Request
from ppengine.protocol.allowed_keys import OWNER
from ppengine.protocol.control import Command
from ppengine.protocol.verb_table import covers

_SHOWN = 4
"""Owners that are named in a line."""
_HOW = "acting on it needs --override --reason TEXT, or an admin"


def principal(command: Command) -> str:
    """Return the name of the key that a command came with; one that came by `front` is of the engine's own user."""
    return command.principal or OWNER


def check(request: Request, command: Command) -> str:
    """Return the owner of a request of another key, empty for an own one.

    Raises CommandError if the command may not act on it.
    """
    if request.principal == principal(command):
        return ""
    if not _may(command):
        raise CommandError("DENIED", f"{request.group} belongs to key {request.principal}; {_HOW}")
    return request.principal


def check_all(requests: Iterable[Request], command: Command) -> dict[str, int]:
    """Return `owners` of many requests. Raises CommandError if the command may not act on them."""
    found = owners(requests, command)
    if found and not _may(command):
        raise CommandError("DENIED", f"{lines(found)[0]}; {_HOW}")
    return found


def owners(requests: Iterable[Request], command: Command) -> dict[str, int]:
    """Return the number of requests of other keys, by the name of the key; samples of a prompt count once."""
    own = principal(command)
    groups = {request.group: request.principal for request in requests if request.principal != own}
    return dict(Counter(groups.values()).most_common())


def lines(found: Mapping[str, int]) -> list[str]:
    """Return the line of a plan that names the owners; none for own requests alone."""
    if not found:
        return []
    count = sum(found.values())
    names = [f"{name} {number}" for name, number in list(found.items())[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more keys" if len(found) > _SHOWN else ""
    return [f"{count} {'request is' if count == 1 else 'requests are'} of other keys: {', '.join(names)}{more}"]


def _may(command: Command) -> bool:
    return command.override or covers(command.role, "admin")
