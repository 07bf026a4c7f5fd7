"""Who may do what. Keys come later and have their place in `Hello.credentials`; until then the folder's mode guards."""

from __future__ import annotations

from typing import Literal

from ppengine.protocol.control import Hello

Role = Literal["viewer", "operator", "admin"]


def authenticate(hello: Hello) -> Role:
    """Return the role of a console that says `hello`. Whoever can open the sockets is this user, or root."""
    return "viewer" if hello.read_only else "operator"


def may_command(role: Role) -> bool:
    """Return whether a role may do more than look."""
    return role != "viewer"
