"""How a verb is written: click's parameters from a row of the verb table, a parser of lines, and back to words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from ppengine.protocol.verb_table import Argument, Row

from ppconsole.model import choosing, memory_change

if TYPE_CHECKING:
    from ppengine.protocol.verbs import Verb

_NEGATIVE = re.compile(r"-\.?\d")
_FEW = 4
"""Most options that are spelled out where a verb is explained in one line."""


def _utilization(text: str) -> float | memory_change.Change:
    """Return a memory utilization, or a change of the present one. An engine refuses a number that is out of range."""
    try:
        value = memory_change.parse(text)
    except ValueError:
        raise click.UsageError(f"{text!r} is no utilization; it is {memory_change.FORM}") from None
    if isinstance(value, float) and not math.isfinite(value):
        raise click.UsageError(f"memory utilization is {value}; it must be above 0 and at most 1")
    return value


def _duration(text: str) -> float:
    """Return a time in seconds: `90`, `90s`, `5m`, `1h`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise click.UsageError(f"{text!r} is no time; it is written 90, 90s, 5m or 1h")
    return float(found[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}[found[2]]


def _ids(option: str) -> Callable[[str], list[int]]:
    """Return click's type of numbers with commas between."""

    def ids(text: str) -> list[int]:
        try:
            return [int(part) for part in text.replace(",", " ").split()]
        except ValueError:
            raise click.UsageError(f"{option} is {text!r}; it must be numbers with commas between: 2,50256") from None

    return ids


def _biases(option: str) -> Callable[[str], dict[int, float]]:
    """Return click's type of `ID:BIAS` with commas between."""

    def biases(text: str) -> dict[int, float]:
        try:
            pairs = [part.split(":") for part in text.replace(",", " ").split()]
            return {int(token): float(bias) for token, bias in pairs}
        except ValueError:
            raise click.UsageError(
                f"{option} is {text!r}; it must be ID:BIAS with commas between: 2:-100,11:4"
            ) from None

    return biases


def written(kind: str, value: Any) -> str:
    """Return a value with several parts in one word, as the option takes it."""
    if kind == "biases":
        return ",".join(f"{token}:{_text(bias)}" for token, bias in value.items())
    return ",".join(map(str, value))


def parameters(row: Row) -> list[click.Parameter]:
    """Return click's parameters of a verb; each passes its value by the argument's name."""
    return [_parameter(argument) for argument in row.arguments]


def many_parameters(row: Row) -> list[click.Parameter]:
    """Return click's parameters of a verb on any number of requests, for `choosing.take`."""
    requests = click.Argument(["requests"], nargs=-1, metavar="[REQUEST]...")
    own = [requests if argument.kind == "request" else _parameter(argument) for argument in row.arguments]
    return own + [_parameter(argument) for argument in choosing.ARGUMENTS]


class _NumberCommand(click.Command):
    """Command with a number among its words: `-5` is a value, not an option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words. Beside a negative number, an unknown option is refused as one word too many."""
        ctx.ignore_unknown_options = any(_NEGATIVE.match(word) for word in args)
        return super().parse_args(ctx, args)


def command_class(row: Row) -> type[click.Command]:
    """Return click's class of a verb's command."""
    return _NumberCommand if any(map(_is_number, row.arguments)) else click.Command


def _is_number(argument: Argument) -> bool:
    return not argument.option and argument.kind in ("integer", "number", "stage", "utilization")


def _parameter(argument: Argument) -> click.Parameter:
    if not argument.option:
        required = not argument.optional
        return click.Argument([argument.name], type=_type(argument), metavar=argument.metavar, required=required)
    # click takes an explicit default of None for a value, and the option for given.
    default = {} if argument.default is None else {"default": argument.default, "show_default": True}
    return click.Option(
        [argument.option, argument.name],
        type=None if argument.kind == "flag" else _type(argument),
        # With False, click takes a negative number for an option that it does not know.
        is_flag=True if argument.kind == "flag" else None,
        multiple=argument.kind == "texts",
        required=argument.required,
        metavar=argument.metavar,
        help=argument.help or None,
        **default,
    )


class _Beginnings(click.Choice[str]):
    """A choice that takes a unique beginning, too: `run`, as the tables write the state `running`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the choice that a word begins. Raises click.BadParameter."""
        found = [choice for choice in self.choices if value and choice.startswith(str(value).casefold())]
        if len(found) > 1 and value not in found:
            self.fail(f"{value!r} is ambiguous: {', '.join(found)}.", param, ctx)
        return super().convert(found[0] if len(found) == 1 else value, param, ctx)


def _type(argument: Argument) -> Any:
    if argument.name == "state":
        return _Beginnings(argument.choices)
    if argument.choices:
        return click.Choice(argument.choices)
    if argument.kind == "utilization":
        return _utilization
    if argument.kind == "ids":
        return _ids(argument.option)
    if argument.kind == "biases":
        return _biases(argument.option)
    if argument.kind == "duration":
        return _duration
    return {"stage": click.IntRange(0), "integer": click.INT, "number": click.FLOAT}.get(argument.kind, click.STRING)


def parse(row: Row, words: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line; those of a verb on requests are for `choosing.take`. A prompt may be several words.

    `defaults` go before the row's. Raises click.UsageError.
    """
    params = many_parameters(row) if row.target == "request" else parameters(row)
    for parameter in params:
        if any(argument.kind == "prompt" and argument.name == parameter.name for argument in row.arguments):
            parameter.nargs = -1
            parameter.required = True
    command = command_class(row)(row.name, params=params, add_help_option=False)
    values = dict(command.make_context(row.name, list(words), default_map=dict(defaults)).params)
    for argument in row.arguments:
        if argument.kind == "prompt":
            values[argument.name] = " ".join(values[argument.name])
    return values


def form(row: Row) -> str:
    """Return how a verb is written, in one line."""
    words = [row.words]
    words += [_value_name(argument) for argument in row.arguments if not argument.option]
    options = [argument for argument in row.arguments if argument.option]
    if len(options) > _FEW:
        return " ".join([*words, "[OPTIONS]"])
    for option in options:
        text = option.option if option.kind == "flag" else f"{option.option} {_value_name(option)}"
        words.append(text if option.required else f"[{text}]")
    if row.target == "request":
        words.append(f"(or {' '.join(argument.option for argument in choosing.ARGUMENTS)})")
    return " ".join(words)


def _value_name(argument: Argument) -> str:
    if argument.kind == "request":
        return "REQUEST..."
    name = "|".join(argument.choices) or argument.metavar or argument.name.upper()
    return f"[{name}]" if argument.optional else name


def words_of(verb: Verb) -> list[str]:
    """Return the words of the CLI that make `verb`; options at their defaults are left out, and a password is, too."""
    from ppengine.protocol.backend_fields import without_secrets
    from ppengine.protocol.verbs import Many, default_of, row_of, value_of

    one = verb.verbs[0] if isinstance(verb, Many) else verb
    row = row_of(one)

    def values(argument: Argument) -> list[str]:
        if isinstance(verb, Many) and argument.kind == "request":
            return verb.requests
        value = value_of(one, argument.field)
        if argument.optional and value == default_of(one, argument.field):
            return []
        return [without_secrets(value) if argument.kind == "url" else _text(value)]

    # A positional word that begins with a dash, except a number, is no option behind `--` alone.
    plain = [(argument, values(argument)) for argument in row.arguments if not argument.option]
    dashed = any(word.startswith("-") and not _is_number(argument) for argument, each in plain for word in each)
    words = row.words.split()
    for argument in row.arguments:
        value = value_of(one, argument.field) if argument.option else None
        if argument.option and value is not None and value != default_of(one, argument.field):
            words += _option(argument, value)
        elif not argument.option and not dashed:
            words += values(argument)
    return [*words, "--", *(word for _, each in plain for word in each)] if dashed else words


def _option(argument: Argument, value: Any) -> list[str]:
    if argument.kind == "flag":
        return [argument.option]
    if argument.kind in ("ids", "biases"):
        return [argument.option, written(argument.kind, value)]
    values = value if argument.kind == "texts" else [value]
    return [word for each in values for word in (argument.option, _text(each))]


def _text(value: Any) -> str:
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if not isinstance(value, float) or float(short) == value else repr(value)
