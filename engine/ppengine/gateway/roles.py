"""Roles of consoles and their rights. Keys come later, in `Hello.credentials`; until then the folder's mode guards."""

from __future__ import annotations

from typing import Literal

from ppengine.protocol.control import Hello

Role = Literal["viewer", "operator", "admin"]


def authenticate(hello: Hello) -> Role:
    """Return the role of a console by its `hello`. Only this user and root can open the sockets."""
    return "viewer" if hello.read_only else "operator"


def may_command(role: Role) -> bool:
    """Return whether a role may send commands."""
    return role != "viewer"
