"""`store`: backends of KV tiers, and the verbs on them."""

from __future__ import annotations

import shutil
import sys
from typing import Any

import click
from ppengine.protocol.verb_table import ROWS, Row

from ppconsole.cli import exits
from ppconsole.cli.effects import carry_out, help_of
from ppconsole.cli.options import Common, Effect, backend_options, common_options
from ppconsole.cli.session import one_snapshot, print_json, run
from ppconsole.model.grammar import parameters

_LEAST, _PIPED = 60, 120
"""Cells of a line at least, and if stdout is no terminal."""


@click.group("store")
def store_command() -> None:
    """List, add and operate backends of KV tiers.

    A backend keeps KV blocks outside of device and host: in files, Valkey, S3, or the memory of a process. `store ls`
    prints device, host and backends.
    """


@store_command.command("ls")
@common_options
def list_command(common: Common) -> None:
    """Print device, host cache, backends and stores.

    `ppconsole help W-BREAKER` explains a column.
    """
    from ppconsole.view.cells import text_of
    from ppconsole.view.tiers_page import rows

    snapshot = run(lambda: one_snapshot(common))
    if common.json:
        print_json(snapshot.tiers)
    else:
        width = max(_LEAST, shutil.get_terminal_size((_PIPED, 24)).columns)
        click.echo("\n".join(text_of(line).rstrip() for line in rows(snapshot, width)))


def _url(values: dict[str, Any]) -> dict[str, Any]:
    """Return values with the URL of stdin in the place of `-`. Raises Failure."""
    if values.get("url") != "-":
        return values
    url = sys.stdin.readline().strip()
    if not url:
        raise exits.Failure("stdin has no URL", exits.USAGE)
    return {**values, "url": url}


def _verb_command(row: Row) -> click.Command:
    """Return the command of a verb on a backend."""
    name = row.words.split()[1]

    @click.command(name, params=parameters(row), help=help_of(row))
    @backend_options
    def command(common: Common, effect: Effect, **values: Any) -> int:
        from ppengine.protocol.verbs import build

        try:
            verb = build(row.name, _url(values))
        except ValueError as error:
            raise exits.Failure(str(error), exits.USAGE) from None
        return carry_out(verb, common, effect)

    return command


for _row in ROWS.values():
    if _row.target == "backend":
        store_command.add_command(_verb_command(_row))
