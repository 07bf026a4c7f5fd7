"""`topology`: the places of an engine, their neighbours, the ways of messages, and the links of cards."""

from __future__ import annotations

import shutil

import click

from ppconsole.cli.options import Common, common_options
from ppconsole.cli.session import one_snapshot, print_json, run

_LEAST, _PIPED = 60, 120
"""Cells of a line at least, and if stdout is no terminal."""


@click.command("topology")
@common_options
def topology_command(common: Common) -> None:
    """Print places, neighbours, messages and cards.

    A place is a stage and a tensor rank of it, written 1.0. `ppconsole help PEERS` explains a column.
    """
    from ppconsole.model.topology import topology_of
    from ppconsole.view.cells import text_of
    from ppconsole.view.marks import faulty_places
    from ppconsole.view.topology_page import rows

    snapshot = run(lambda: one_snapshot(common))
    found = topology_of(snapshot)
    if common.json:
        print_json(found)
    else:
        width = max(_LEAST, shutil.get_terminal_size((_PIPED, 24)).columns)
        click.echo("\n".join(text_of(line).rstrip() for line in rows(found, width, faulty_places(snapshot))))
