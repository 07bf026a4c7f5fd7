"""`help`: the legend of every screen, or the options of a command."""

from __future__ import annotations

import click

from ppconsole.cli import exits
from ppconsole.cli.options import json_option
from ppconsole.cli.session import print_json


@click.command("help")
@click.argument("topic", required=False, metavar="[columns|COMMAND]")
@json_option("Print the legend as JSON.")
@click.pass_context
def help_command(context: click.Context, topic: str | None, as_json: bool) -> None:
    """Explain every column and letter, or one command.

    `ppconsole help columns` prints the legend of every column, letter and glyph on every screen of the console. No
    engine has to run.
    """
    group = context.parent
    if topic == "columns":
        _print_legend(as_json)
    elif as_json:
        raise exits.Failure("help --json: the legend alone has JSON; see ppconsole help columns --json", exits.USAGE)
    elif group is None or not isinstance(group.command, click.Group):
        raise exits.Failure("help is a command of ppconsole", exits.USAGE)
    elif topic is None:
        click.echo(group.get_help())
    elif (command := group.command.get_command(context, topic)) is None:
        raise exits.Failure(f"{topic!r} is neither columns nor a command; see ppconsole help", exits.USAGE)
    else:
        with click.Context(command, info_name=topic, parent=group) as inner:
            click.echo(command.get_help(inner))


def _print_legend(as_json: bool) -> None:
    from ppconsole.view import colours, help_page, legend

    if as_json:
        sections = {screen: {each.title: dict(each.rows) for each in found} for screen, found in legend.SCREENS.items()}
        named = map(colours.section, ("pp-dark", "pp-light", "ansi-dark", "mono"))
        sections["all"] = {each.title: dict(each.rows) for each in named}
        print_json(sections)
    else:
        click.echo("\n".join(help_page.text()).rstrip())
