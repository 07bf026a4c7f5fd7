"""The options with which prompts are sent from the console: those of `submit`, set by `:set`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from ppengine.protocol.verb_table import ROWS, Argument

from ppconsole.model import grammar
from ppconsole.model.usage_text import usage_text

BASE = {"max-tokens": 256, "temperature": 0.8}
"""Defaults of the console. The other options have those of `submit`."""
_ROW = ROWS["submit"]
_ARGUMENTS = {argument.option.lstrip("-"): argument for argument in _ROW.arguments if argument.option}
NAMES = tuple(_ARGUMENTS)
FORM = "set NAME VALUE|default"
_RESET = "default"
_FLAG = {"on": True, "off": False}
_NOTHING = MappingProxyType[str, Any]({})


class OptionError(ValueError):
    """An option that cannot be set; the text says what would be right."""


class OptionRow(NamedTuple):
    """One option as text. `changed`: it differs from the console's default."""

    name: str
    value: str
    default: str
    help: str
    changed: bool


def argument_of(name: str) -> Argument | None:
    """Return the argument of an option; dashes before it and underscores in it are fine."""
    return _ARGUMENTS.get(name.lstrip("-").replace("_", "-"))


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """`chosen` has the values that an operator has set, by the option's name without dashes."""

    chosen: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    def defaults(self) -> dict[str, Any]:
        """Return the defaults for parsing a `submit` line, by argument name."""
        return {_ARGUMENTS[name].name: _plain(name, value) for name, value in {**BASE, **self.chosen}.items()}

    def changed(self, *lines: Sequence[str]) -> PromptOptions:
        """Return the options after `set` with the words of each line, `NAME VALUE` or `NAME=VALUE`.

        Raises OptionError.
        """
        made = self
        for words in lines:
            made = made._with(words)
        made.check()
        return made

    def _with(self, words: Sequence[str]) -> PromptOptions:
        written, _, first = words[0].partition("=")
        name, values = written.lstrip("-").replace("_", "-"), ([first] if first else []) + list(words[1:])
        argument = _ARGUMENTS.get(name)
        if argument is None:
            raise OptionError(f"{written!r} is not an option of a prompt; the options are {', '.join(NAMES)}")
        if not values:
            raise OptionError(f"{name} lacks a value; it is written: set {name} VALUE, or set {name} {_RESET}")
        others = {key: value for key, value in self.chosen.items() if key != name}
        if tuple(values) != (_RESET,):
            others[name] = self._value(name, argument, values)
        return PromptOptions(MappingProxyType(others))

    def _value(self, name: str, argument: Argument, values: Sequence[str]) -> Any:
        if argument.kind == "flag":
            if len(values) != 1 or values[0] not in _FLAG:
                raise OptionError(f"{name} is {' '.join(values)!r}; it must be on, off or {_RESET}")
            return _FLAG[values[0]]
        if argument.kind == "texts":
            return list(values)
        if len(values) != 1:
            raise OptionError(f"{name} takes one value, not {len(values)}: {' '.join(values)}")
        try:
            return grammar.parse(_ROW, [argument.option, values[0], "x"], {})[argument.name]
        except click.UsageError as error:
            raise OptionError(usage_text(error)) from None

    def check(self) -> None:
        """Raise OptionError unless a prompt with these options would be well formed."""
        from ppengine.protocol.verbs import build

        try:
            build("submit", grammar.parse(_ROW, ["x"], self.defaults()))
        except click.UsageError as error:
            raise OptionError(usage_text(error)) from None
        except ValueError as error:
            raise OptionError(str(error)) from None

    def summary(self) -> str:
        """Return the options in short: `64 tok · T 0.8`, then the other ones that were set."""
        values = {**BASE, **self.chosen}
        parts = [f"{values['max-tokens']} tok", f"T {values['temperature']:g}"]
        parts += [
            name if value is True else f"{name} {_text(value)}"
            for name, value in self.chosen.items()
            if name not in BASE and value is not False
        ]
        return " · ".join(parts)

    def rows(self) -> list[OptionRow]:
        """Return every option with its value, its default and its meaning."""
        return [self._row(name, argument) for name, argument in _ARGUMENTS.items()]

    def _row(self, name: str, argument: Argument) -> OptionRow:
        normal = BASE.get(name, False if argument.kind == "flag" else argument.default)
        value = self.chosen.get(name, normal)
        return OptionRow(name, _text(value), _text(normal), argument.help, value != normal)


def _plain(name: str, value: Any) -> Any:
    """Return a value as click takes it for a default."""
    kind = _ARGUMENTS[name].kind
    return grammar.written(kind, value) if kind in ("ids", "biases") else value


def _text(value: Any) -> str:
    """Return a value as it is written after `set NAME`."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        return grammar.written("biases", value)
    if isinstance(value, list):
        return " ".join(repr(each) if isinstance(each, str) else f"{each}" for each in value)
    return f"{value:g}" if isinstance(value, float) else f"{value}"
