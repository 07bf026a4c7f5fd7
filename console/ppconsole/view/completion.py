"""Completing a command line: the lines that it may become, the steps of Tab, and the nearest name of a mistyped one."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verb_table import ROWS, Argument
from ppengine.protocol.verb_table import Row as VerbRow

from ppconsole.model import choosing
from ppconsole.model.grammar import form
from ppconsole.model.prompt_options import NAMES, argument_of
from ppconsole.model.safe import clean
from ppconsole.view.cells import Row, Seg, clip

_LEAST_ROOM = 24
"""Fewest cells for the values in front of options."""
_REQUEST = Argument("request", "request")


class Completion(NamedTuple):
    """The line after Tab, the candidates for it, and which of them it is; `at` -1: their common beginning."""

    line: str = ""
    candidates: tuple[str, ...] = ()
    at: int = -1


def complete(line: str, snapshot: Snapshot | None, commands: Sequence[str], columns: Sequence[str] = ()) -> list[str]:
    """Return the lines that `line` may become: its last word completed to each command, option, value or id.

    `commands`: some have two words. `columns`: those that sort the table of the screen.
    """
    head, space, last = line.rpartition(" ")
    words = head.split()
    options: Sequence[str] = [command.partition(" ")[0] for command in commands]
    if words:
        second = [command.partition(" ")[2] for command in commands if command.startswith(f"{words[0]} ")]
        options = second if second and len(words) == 1 else _candidates(words, last, snapshot, columns)
    return [f"{head}{space}{clean(option)}" for option in dict.fromkeys(options) if option.startswith(last)]


def form_of(line: str) -> str:
    """Return how the verb at the beginning of `line` is written; empty if it is no whole verb."""
    row = _row(line.split()) if " " in line else None
    return form(row) if row is not None else ""


def advance(now: Completion, line: str, find: Callable[[str], Sequence[str]], step: int) -> Completion:
    """Return the completion after Tab (`step` 1) or Shift+Tab (-1) on `line`."""
    if now.candidates and line == now.line:
        at = step - 1 if now.at < 0 else now.at + step
        at %= len(now.candidates)
        return Completion(now.candidates[at], now.candidates, at)
    found = tuple(find(line))
    if len(found) == 1:
        return Completion(f"{found[0]} ")
    shared = _shared(found) if found else ""
    return Completion(shared if len(shared) > len(line) else line, found)


def _shared(lines: Sequence[str]) -> str:
    """Return the beginning that all `lines` share."""
    first, last = min(lines), max(lines)
    return next((first[:at] for at, letter in enumerate(first) if last[at : at + 1] != letter), first)


def candidates_row(completion: Completion, width: int) -> Row:
    """Return the candidates as a line, the one that is written marked, and those before it dropped if it is narrow.

    Options after ids or other values are always visible, however many values there are.
    """
    words = [line.rpartition(" ")[2] for line in completion.candidates]
    values = sum(not word.startswith("-") for word in words)
    options = _strip(words[values:], completion.at - values, width)
    room = width - sum(len(text) for text, _ in options)
    if values == 0 or room < _LEAST_ROOM:
        return clip(Row(tuple(_strip(words, completion.at, width)), "foot"), width)
    shown = clip(Row(tuple(_strip(words[:values], completion.at, room - 1))), room - 1)
    return clip(Row((*shown.segs, (" ", ""), *options), "foot"), width)


def _strip(words: Sequence[str], at: int, width: int) -> list[Seg]:
    """Return `words` with the one at `at` marked, from that one on if they do not fit up to it."""
    first = max(0, at) if at < len(words) else 0
    while first and sum(len(word) + 1 for word in words[: first + 1]) <= width:
        first = 0
    segs: list[Seg] = []
    for index, word in enumerate(words[first:], first):
        segs += [(word, "key" if index == at else "key.text"), (" ", "")]
    return segs


def nearest(word: str, names: Sequence[str]) -> str:
    """Return `; did you mean X?` for a mistyped name, or nothing where none is near."""
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _candidates(words: list[str], last: str, snapshot: Snapshot | None, columns: Sequence[str]) -> Sequence[str]:
    """Return the words that may follow `words`."""
    if words[0] == "sort":
        return columns if len(words) == 1 else []
    if words[0] == "show":
        return _values(_REQUEST, snapshot) if len(words) == 1 else []
    if words[0] == "set":
        return NAMES if len(words) == 1 else _option_values(words[1:])
    row = _row(words)
    if row is None:
        return []
    words = words[len(row.words.split()) - 1 :]
    arguments = (*row.arguments, *choosing.ARGUMENTS) if row.target == "request" else row.arguments
    valued = {argument.option: argument for argument in arguments if argument.option and argument.kind != "flag"}
    if words[-1] in valued:
        return _values(valued[words[-1]], snapshot)
    options = [argument.option for argument in arguments if argument.option]
    if last.startswith("-"):
        return options
    if row.target == "request":  # any number of them, each once
        return [each for each in _values(_REQUEST, snapshot) if each not in words] + options
    plain = [word for before, word in pairwise(words) if word not in options and before not in valued]
    wanted = [argument for argument in row.arguments if not argument.option][len(plain) : len(plain) + 1]
    return [value for argument in wanted for value in _values(argument, snapshot)] + options


def _row(words: Sequence[str]) -> VerbRow | None:
    """Return the verb of one or two words at the beginning of `words`."""
    return ROWS.get(words[0]) or next((each for each in ROWS.values() if each.words.split() == words[:2]), None)


def _option_values(words: list[str]) -> list[str]:
    """Return the words that may follow `set NAME`."""
    argument = argument_of(words[0])
    if argument is None or len(words) > 1:
        return []
    return ["on", "off", "default"] if argument.kind == "flag" else ["default"]


def _values(argument: Argument, snapshot: Snapshot | None) -> list[str]:
    """Return the values of an argument that are known now."""
    if argument.kind == "request" and snapshot is not None:
        return [request.id for request in snapshot.requests if request.state != "finished"]
    if argument.name == "owner" and snapshot is not None:
        return sorted({shlex.quote(request.owner) for request in snapshot.requests if request.state != "finished"})
    if argument.kind == "client" and snapshot is not None:
        return sorted({shlex.quote(client.key) for client in snapshot.clients})
    if argument.kind == "backend" and snapshot is not None and snapshot.tiers is not None:
        return [backend.name for backend in snapshot.tiers.backends]
    if argument.kind == "stage" and snapshot is not None:
        return [str(index) for index in sorted({stage.index for stage in snapshot.stages})]
    return list(argument.choices)
