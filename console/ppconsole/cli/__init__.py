"""Commands. Importing this costs click and nothing else; each command's module comes when it is called for."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from ppengine.protocol.verb_table import ROWS, Row

from ppconsole.cli import exits
from ppconsole.cli.options import engine_option


def _module_of(row: Row) -> str:
    """Return the module of a verb's command."""
    return {"submit": "submitting", "fault": "faults", "lease": "leases"}.get(
        row.name, "many" if row.target == "request" else "effects"
    )  # fmt: skip


_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a full or broken disk below stdout."""
COMMANDS = {
    "demo": "demo", "tour": "touring", "serve": "serving", "attach": "screen", "ls": "engines", "status": "watching",
    "watch": "watching", "wait": "waiting", "events": "watching", "show": "inspecting", "finished": "inspecting",
    "logs": "inspecting", "doctor": "doctor", "follow": "submitting",
    **{name: _module_of(row) for name, row in ROWS.items() if row.typed and not row.written},
    "key": "key_commands", "context": "contexts",
    "explain": "inspecting", "incidents": "incidents", "history": "recordings", "stacks": "inspecting",
    "streams": "streams", "topology": "topology_command", "clients": "clients_command", "store": "store_commands",
    "record": "recordings", "replay": "recordings", "export": "exporting", "bench": "serving", "plan": "serving",
    "help": "helping",
}  # fmt: skip
"""Module of each command, in the order of `--help`."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are needed."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the environment variables behind the commands."""
        from ppconsole.cli.environment import VARIABLES

        with formatter.section("Environment"):
            formatter.write_dl([(name, f"{meaning}.") for name, meaning in VARIABLES])

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of `cmd_name` and return its command; None for an unknown name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"ppconsole.cli.{COMMANDS[cmd_name]}")
        command: click.Command
        if cmd_name in ROWS:
            command = module.verb_command(cmd_name)
        else:
            command = getattr(module, cmd_name.replace("-", "_") + "_command")
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ppconsole", prog_name="ppconsole")
@engine_option
@click.pass_context
def ppconsole(context: click.Context, engine: str | None) -> None:
    """Watch and operate a pipeline-parallel LLM engine.

    Data goes to stdout, messages to stderr. Exit codes: 0 done, 1 error, 2 usage, 3 no engine, 4 denied, 5 timeout,
    6 conflict, 7 not found, 8 does not fit, 10 `explain` found a fault, 130 interrupted.
    """
    verb = context.invoked_subcommand or ""
    command = ppconsole.get_command(context, verb)
    if engine is None or command is None:
        return
    defaults = _engine_of(command, engine)
    if not defaults:
        raise click.UsageError(f"{verb} is about no running engine: -e {engine} has no meaning for it.")
    context.default_map = {verb: defaults}


def _engine_of(command: click.Command, engine: str) -> dict[str, Any]:
    """Return the defaults that make `engine` the one of a command, or of those in a group; empty: they take none."""
    if isinstance(command, click.Group):
        inner = {name: _engine_of(each, engine) for name, each in command.commands.items()}
        return {name: defaults for name, defaults in inner.items() if defaults}
    return {"engine": engine} if any(parameter.name == "engine" for parameter in command.params) else {}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _open_closed()
    try:
        code = ppconsole.main(args=arguments, prog_name="ppconsole", standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return exits.USAGE
    except click.UsageError as error:
        return _misused(error)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return exits.INTERRUPTED
    except BrokenPipeError:
        # The reader has closed its end.
        _drop_output()
        return exits.ERROR
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITABLE:
            raise
        _drop_output()
        exits.Failure(f"the output cannot be written: {error.strerror}").show()
        return exits.ERROR
    return code if isinstance(code, int) else exits.DONE


def _open_closed() -> None:
    """Let /dev/null be what the caller has closed, as `<&-` does: else a pipe of an engine would get its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def _drop_output() -> None:
    """Keep the rest of the buffer from raising again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _misused(error: click.UsageError) -> int:
    """Print the error in the words of a command, and return the exit code."""
    from ppconsole.model.usage_text import usage_text
    from ppconsole.view.completion import nearest

    command, text = error.ctx.command_path if error.ctx else "ppconsole", usage_text(error)
    if isinstance(error, click.exceptions.NoSuchCommand) and not error.possibilities:
        text += nearest(error.command_name, list(COMMANDS))
    if isinstance(error, click.NoSuchOption) and command == "ppconsole serve":
        from ppconsole.cli.vllm_flags import counterpart

        if here := counterpart(error.option_name):
            text = f"No such option '{error.option_name}'; {here}"
    exits.Failure(f"{text}{'' if text.endswith('?') else '.'} See: {command} --help").show()
    return exits.USAGE
