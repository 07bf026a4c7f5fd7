"""`context`: names for engines on other hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import json_option
from ppconsole.cli.session import print_json, say

if TYPE_CHECKING:
    from ppconsole.link.contexts import Contexts


@click.group("context")
def context_command() -> None:
    """Name engines on other hosts, each with its pinned key.

    Commands find their engine by -e, then PPCONSOLE_ENGINE, then the current context, then on this host.
    """


@contextmanager
def _contexts(*, write: bool) -> Iterator[Contexts]:
    """Yield the contexts, and keep changes with `write`. Raises Failure."""
    from ppconsole.link.contexts import ContextError, read_contexts, write_contexts

    try:
        contexts = read_contexts()
        yield contexts
        if write:
            write_contexts(contexts)
    except ContextError as error:
        raise exits.Failure(str(error), exits.USAGE) from None


@context_command.command("add")
@click.argument("name")
@click.argument("address", metavar="tcp://HOST:PORT")
@click.option("--server-key", required=True, metavar="KEY", help="Key of the engine: `ppconsole key ls` on its host.")
def add_command(name: str, address: str, server_key: str) -> None:
    """Add the engine at an address, or replace the one of this NAME."""
    with _contexts(write=True) as contexts:
        contexts.add(name, address, server_key)


@context_command.command("ls")
@json_option()
def list_command(as_json: bool) -> None:
    """List the contexts; `*` marks the current one."""
    with _contexts(write=False) as contexts:
        if as_json:
            print_json(contexts)
            return
        for one in contexts.contexts:
            mark = "*" if one.name == contexts.current else " "
            click.echo(f"{mark} {one.name:<16} {one.address:<28} {one.server_key}")
        if not contexts.contexts:
            say("no context; add one: ppconsole context add NAME tcp://HOST:PORT --server-key KEY")


@context_command.command("use")
@click.argument("name")
def use_command(name: str) -> None:
    """Make NAME the current context; `local` is this host."""
    with _contexts(write=True) as contexts:
        contexts.use(name)


@context_command.command("rm")
@click.argument("name")
def remove_command(name: str) -> None:
    """Remove a context; if it is the current one, `local` is."""
    with _contexts(write=True) as contexts:
        contexts.remove(name)
