"""Named engines on other hosts: `$XDG_CONFIG_HOME/ppconsole/contexts.json` has address and pinned key of each."""

from __future__ import annotations

import re

import msgspec
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.error_text import shown
from ppengine.protocol.frames import PROTOCOL
from ppengine.protocol.json_files import read_json_file
from ppengine.protocol.keys import KeyFileError, check_key, config_dir, write_private
from ppengine.protocol.tcp_address import TcpAddress, parse_address

LOCAL = "local"
"""Name of no context: the engines of this host."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class ContextError(Exception):
    """A context that cannot be used. One line."""


class Context(msgspec.Struct, frozen=True):
    """One engine on another host."""

    name: str
    address: str
    server_key: str


class Contexts(msgspec.Struct):
    """The file. `current` is the context of commands that name no engine."""

    current: str = LOCAL
    contexts: list[Context] = []

    def find(self, name: str) -> Context | None:
        """Return the context of a name."""
        return next((one for one in self.contexts if one.name == name), None)

    def need(self, name: str) -> Context:
        """Return the context of a name. Raises ContextError, which lists the names."""
        found = self.find(name)
        if found is None:
            known = ", ".join(one.name for one in self.contexts) or "none; ppconsole context add makes one"
            raise ContextError(f"no context {shown(name)}; there are: {known}")
        return found

    def add(self, name: str, address: str, server_key: str) -> None:
        """Add a context, or replace the one of its name. Raises ContextError."""
        if name == LOCAL or not _NAME.fullmatch(name):
            right = "1 to 64 letters, digits, '.', '_' and '-', with no sign first, and not 'local'"
            raise ContextError(f"{shown(name)} is no name of a context; it must have {right}")
        made = Context(name, str(_address(address)), _key(server_key))
        self.contexts = [*(one for one in self.contexts if one.name != name), made]

    def remove(self, name: str) -> None:
        """Remove a context; if it is the current one, `local` is. Raises ContextError."""
        gone = self.need(name)
        self.contexts = [one for one in self.contexts if one != gone]
        self.current = LOCAL if self.current == name else self.current

    def use(self, name: str) -> None:
        """Make a context, or `local`, the current one. Raises ContextError."""
        self.current = name if name == LOCAL else self.need(name).name


def read_contexts() -> Contexts:
    """Return the contexts; without a file there are none. Raises ContextError."""
    path = config_dir() / "contexts.json"
    try:
        return read_json_file(path, Contexts)
    except FileNotFoundError:
        return Contexts()
    except (OSError, ValueError) as error:
        raise ContextError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def write_contexts(contexts: Contexts) -> None:
    """Write the file at once. Raises ContextError."""
    try:
        config_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(config_dir() / "contexts.json", msgspec.json.encode(contexts) + b"\n")
    except (OSError, KeyFileError) as error:
        raise ContextError(str(error)) from None


def find_remote(wanted: str | None, server_key: str | None = None) -> EngineRecord | None:
    """Return the engine elsewhere that `wanted` means: an address, a context, or with None the current context.

    None: `wanted` can only be an engine of this host. Raises ContextError.
    """
    if wanted is not None and wanted.startswith("tcp://"):
        address = _address(wanted)
        known = next((one.server_key for one in read_contexts().contexts if one.address == str(address)), None)
        key = server_key or known
        if key is None:
            text = f"the key of the engine at {address} is not known: give --server-key KEY, or add a context"
            raise ContextError(f"{text}; on its host, ppconsole key ls prints KEY")
        return remote_record(address, _key(key))
    contexts = read_contexts()
    if wanted is None:
        found = None if contexts.current == LOCAL else contexts.need(contexts.current)
    else:
        found = contexts.find(wanted)
    return None if found is None else remote_record(_address(found.address), _key(found.server_key), found.name)


def remote_record(address: TcpAddress, server_key: str, name: str = "") -> EngineRecord:
    """Return the record of an engine elsewhere: its id, epoch and name come with its answer to Hello."""
    return EngineRecord(
        id="", name=name or str(address), epoch="", pid=0, pid_start=0, proto=PROTOCOL, model="",
        state_endpoint=address.endpoint("state"), control_endpoint=address.endpoint("control"),
        bulk_endpoint=address.endpoint("bulk"), pipeline_parallel_size=0, run_dir="", started_wall=0.0,
        server_key=server_key, address=str(address),
    )  # fmt: skip


def _address(text: str) -> TcpAddress:
    try:
        return parse_address(text)
    except ValueError as error:
        raise ContextError(str(error)) from None


def _key(text: str) -> str:
    try:
        return check_key(text)
    except KeyFileError as error:
        raise ContextError(str(error)) from None
