"""`help`: the legend of every screen, or the options of a command."""

from __future__ import annotations

import click

from ppconsole.cli import exits
from ppconsole.cli.options import json_option
from ppconsole.cli.session import print_json


@click.command("help")
@click.argument("topic", required=False, metavar="[columns|COMMAND|NAME]")
@json_option("Print the legend as JSON.")
@click.pass_context
def help_command(context: click.Context, topic: str | None, as_json: bool) -> None:
    """Explain every column and letter, or one name.

    `ppconsole help columns` prints the legend of every column, letter and glyph on every screen of the console.
    `ppconsole help 'I>O'` prints the entries with that name, of all screens. No engine has to run.
    """
    group = context.parent
    if topic == "columns":
        _print_legend(as_json)
    elif topic is not None and (group is None or not _is_command(group, topic)):
        _print_topic(topic, as_json)
    elif as_json:
        raise exits.Failure("help --json: the legend alone has JSON; see ppconsole help columns --json", exits.USAGE)
    elif group is None or not isinstance(group.command, click.Group):
        raise exits.Failure("help is a command of ppconsole", exits.USAGE)
    elif topic is None:
        click.echo(group.get_help())
    elif (command := group.command.get_command(context, topic)) is not None:
        with click.Context(command, info_name=topic, parent=group) as inner:
            click.echo(command.get_help(inner))


def _is_command(group: click.Context, topic: str) -> bool:
    return isinstance(group.command, click.Group) and group.command.get_command(group, topic) is not None


def _print_topic(topic: str, as_json: bool) -> None:
    """Print the entries of the legend with one name."""
    from ppconsole.view import help_page

    found = help_page.find(topic)
    if not found:
        text = f"{topic!r} is neither columns, a command nor a name in the legend; see ppconsole help columns"
        raise exits.Failure(text, exits.USAGE)
    if as_json:
        print_json({section.title: dict(section.rows) for section in found})
    else:
        click.echo("\n".join(help_page.topic_text(found)))


def _print_legend(as_json: bool) -> None:
    from ppconsole.view import colours, help_page, legend

    if as_json:
        sections = {screen: {each.title: dict(each.rows) for each in found} for screen, found in legend.SCREENS.items()}
        named = map(colours.section, ("pp-dark", "pp-light", "ansi-dark", "mono"))
        sections["all"] = {each.title: dict(each.rows) for each in named}
        print_json(sections)
    else:
        click.echo("\n".join(help_page.text()).rstrip())
