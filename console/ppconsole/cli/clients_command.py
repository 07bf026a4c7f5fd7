"""`clients`: the API keys and routes of the HTTP port, with their load, latencies and errors."""

from __future__ import annotations

import shutil

import click

from ppconsole.cli.options import Common, common_options
from ppconsole.cli.session import one_snapshot, print_json, run

_LEAST, _PIPED = 60, 120
"""Cells of a line at least, and if stdout is no terminal."""


@click.command("clients")
@common_options
def clients_command(common: Common) -> None:
    """Print API keys and routes of the HTTP port.

    The busiest is first. `ppconsole help TTFT99` explains a column.
    """
    from ppconsole.view.cells import text_of
    from ppconsole.view.clients_page import rows, slo_rows

    snapshot = run(lambda: one_snapshot(common))
    if common.json:
        print_json(snapshot.clients)
    else:
        width = max(_LEAST, shutil.get_terminal_size((_PIPED, 24)).columns)
        shown = [*rows(snapshot.clients, width), *slo_rows(snapshot.latency, width)]
        click.echo("\n".join(text_of(line).rstrip() for line in shown))
