"""Options that commands share."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ppconsole.cli import exits

if TYPE_CHECKING:
    from ppconsole.model.filters import Filter

Command = Callable[..., Any]
SECONDS = click.FloatRange(min=0, min_open=True, max=1e6)


@dataclass(frozen=True)
class Common:
    """`-e`, `--json`, `--timeout` of every verb. `timeout` None: the command's own default."""

    engine: str | None = None
    json: bool = False
    timeout: float | None = None


@dataclass(frozen=True)
class Effect:
    """Options of verbs with an effect."""

    dry_run: bool = False
    wait: bool = True
    reason: str = ""
    if_rev: int | None = None
    override: bool = False


class NewFile(click.Path):
    """A file to write. A folder that is missing is named before the engine is asked for anything."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """Return the path. Raises Failure without its folder."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        absent = [folder for folder in path.parents if not os.path.lexists(folder)]
        if absent:
            raise exits.Failure(f"{path} cannot be written: there is no folder {absent[-1]}")
        return path


def timeout_option(text: str) -> Callable[[Command], Command]:
    """Return `--timeout`; `text` is its help."""
    return click.option("--timeout", type=SECONDS, metavar="S", help=text)


def json_option(text: str = "Print JSON.") -> Callable[[Command], Command]:
    """Return `--json`, passed as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=text)


def engine_option(function: Command) -> Command:
    """Add `-e`."""
    text = "Id, unique id prefix or name of the engine, or a context."
    return click.option("-e", "--engine", metavar="ENGINE", help=text)(function)


def filter_option(function: Command) -> Command:
    """Add `--filter`, passed as `wanted`."""
    text = "List the requests that it matches: 'state:wait owner:alice blk>40'."
    return click.option("--filter", "wanted", default="", metavar="FILTER", help=text)(function)


def filter_of(text: str, *, finished: bool = False) -> Filter:
    """Return the filter of live or finished requests that an option has. Raises Failure."""
    from ppconsole.model.filters import FilterError
    from ppconsole.model.request_fields import finished_filter, request_filter

    try:
        return finished_filter(text) if finished else request_filter(text)
    except FilterError as error:
        raise exits.Failure(str(error), exits.USAGE) from None


def common_options(function: Command) -> Command:
    """Add the options of `Common` and pass them as `common`."""

    @engine_option
    @json_option()
    @timeout_option("Give up after S seconds (exit code 5).")
    @functools.wraps(function)
    def wrapped(engine: str | None, as_json: bool, timeout: float | None, **rest: Any) -> Any:
        return function(common=Common(engine, as_json, timeout), **rest)

    return wrapped


_DRY_RUN = click.option("--dry-run", is_flag=True, help="Print what would happen; change nothing.")
_NO_WAIT = click.option("--no-wait", is_flag=True, help="Return once the engine has accepted it.")
_REASON = click.option("--reason", default="", metavar="TEXT", help="Why, for the audit log and other consoles.")


def _unmeant(context: click.Context, option: click.Parameter, value: object) -> None:
    """Refuse an option of verbs on requests."""
    if value:
        words = "--if-rev guards requests and memory" if option.name == "if_rev" else "--override is about requests"
        raise click.UsageError(f"{words}; a backend has neither a revision nor an owner.")


def backend_options(function: Command) -> Command:
    """Add the options of `Common` and `Effect` that mean something for a backend; refuse the others with a reason."""

    @common_options
    @_DRY_RUN
    @_NO_WAIT
    @_REASON
    @click.option("--if-rev", hidden=True, expose_value=False, callback=_unmeant)
    @click.option("--override", is_flag=True, hidden=True, expose_value=False, callback=_unmeant)
    @functools.wraps(function)
    def wrapped(dry_run: bool, no_wait: bool, reason: str, **rest: Any) -> Any:
        return function(effect=Effect(dry_run, not no_wait, reason), **rest)

    return wrapped


def effect_options(function: Command) -> Command:
    """Add the options of `Common` and `Effect` and pass them as `common` and `effect`."""

    @common_options
    @_DRY_RUN
    @_NO_WAIT
    @_REASON
    @click.option("--if-rev", type=int, metavar="N", help="Only if the request, or memory, is still at revision N.")
    @click.option("--override", is_flag=True, help="Act on requests of other keys, too; it needs --reason.")
    @functools.wraps(function)
    def wrapped(dry_run: bool, no_wait: bool, reason: str, if_rev: int | None, override: bool, **rest: Any) -> Any:
        if override and not reason.strip():
            raise click.UsageError("--override needs --reason TEXT: the audit log has it.")
        return function(effect=Effect(dry_run, not no_wait, reason, if_rev, override), **rest)

    return wrapped
