"""Verbs of the console: from the command line (`:set-memory 0.5`) and from keys, to words, and to the same CLI line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import click
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verb_table import ROWS, Argument, Row, Target
from ppengine.protocol.verbs import Submit, Verb, build, row_of

from ppconsole.model import grammar
from ppconsole.model.safe import clean


class UsageError(ValueError):
    """A command line that cannot be understood, or a key without a target; the text says what would be right."""


class Usage(NamedTuple):
    """How a verb is written and its effect."""

    form: str
    text: str


VERBS: dict[str, Usage] = {
    row.name: Usage(grammar.form(row), row.help) for row in ROWS.values() if row.runs != "faults"
}
"""Verbs that the console offers. The line takes faults too, but completion and palette do not suggest them."""
SCREENS: dict[str, str] = {
    "stacks": "stacks of stages and core", "logs": "log lines of all processes", "events": "all events",
    "diagnosis": "which stage is stuck, and why", "explain": "the same",
    "streams": "streams, live checks and their findings", "show": "one request in detail: show REQUEST",
    "help": "keys and letters", "quit": "leave the console",
}  # fmt: skip
PROMPT_DEFAULTS = {"max_tokens": 256, "temperature": 0.8}
"""Sampling of a prompt that is typed in the console; `:submit` has an option for each."""
_TARGETS: dict[Target, str] = {
    "submission": "a new request", "request": "request {0.request}", "stage": "stage {0.stage}",
    "memory": "memory of all stages", "check": "the {0.check} check of all stages", "engine": "the engine",
}  # fmt: skip


def prompt(text: str) -> Submit:
    """Return the submission of a prompt that was typed."""
    return Submit(prompt=text, sampling=SamplingParams(**PROMPT_DEFAULTS))  # type: ignore[arg-type]


# --- the command line -----------------------------------------------------------------------------------------


def parse(line: str, selected: str | None = None) -> Verb:
    """Return the verb in `line`; a request that is left out is the selected one. Raises UsageError."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r}: {error}") from None
    row, rest = _row_of_words(words)
    try:
        return build(row.name, grammar.parse(row, rest, selected, PROMPT_DEFAULTS))
    except click.UsageError as error:
        text = " ".join(error.format_message().split()).rstrip(".")
        raise UsageError(f"{row.name}: {text}; it is written: {grammar.form(row)}") from None
    except ValueError as error:
        raise UsageError(f"{row.name}: {error}") from None


def _row_of_words(words: list[str]) -> tuple[Row, list[str]]:
    """Return the row that `words` begin with, and the words after it. Raises UsageError."""
    for count in (2, 1):
        for row in ROWS.values():
            if " ".join(words[:count]) in (row.name, row.words):
                return row, words[count:]
    word = words[0] if words else ""
    raise UsageError(f"{word!r} is not a command; the commands are {', '.join((*VERBS, *SCREENS))}")


def complete(line: str, snapshot: Snapshot | None) -> str | None:
    """Return `line` completed to the first command, option, value or id that begins with its last word."""
    head, space, last = line.rpartition(" ")
    options = _candidates(head.split(" "), last, snapshot) if space else [*VERBS, *SCREENS]
    found = next((option for option in options if option.startswith(last) and option != last), None)
    return None if found is None or not line else f"{head}{space}{clean(found)}"


def _candidates(words: list[str], last: str, snapshot: Snapshot | None) -> list[str]:
    """Return the words that may follow `words`."""
    if words[0] == "show":
        return _values(Argument("request", "request"), snapshot)
    row = ROWS.get(words[0])
    if row is None:
        return []
    valued = {argument.option: argument for argument in row.arguments if argument.option and argument.kind != "flag"}
    if words[-1] in valued:
        return _values(valued[words[-1]], snapshot)
    options = [argument.option for argument in row.arguments if argument.option]
    if last.startswith("-"):
        return options
    plain = [word for before, word in pairwise(words) if word not in options and before not in valued]
    wanted = [argument for argument in row.arguments if not argument.option][len(plain) : len(plain) + 1]
    return [value for argument in wanted for value in _values(argument, snapshot)] + options


def _values(argument: Argument, snapshot: Snapshot | None) -> list[str]:
    """Return the values of an argument that are known now."""
    if argument.kind == "request" and snapshot is not None:
        return [request.id for request in snapshot.requests if request.state != "finished"]
    if argument.kind == "stage" and snapshot is not None:
        return [str(stage.index) for stage in snapshot.stages]
    return list(argument.choices)


# --- keys -----------------------------------------------------------------------------------------------------


_STAGES = {
    "continue": ("stopped", "is stopped by a signal"), "restart-stage": ("dead", "is dead; choose one (Tab)"),
    "cordon": ("", "is chosen (Tab)"),
}  # fmt: skip
"""State of the stage that a key acts on where none is selected, and the refusal if no stage is in it."""


def of_key(name: str, snapshot: Snapshot, request: str | None, stage: int | None) -> Verb | str:
    """Return the verb of a key on the selection; a string is the beginning of a line that needs more words.

    Raises UsageError where there is no stage to act on.
    """
    row, engine = ROWS[name], snapshot.engine
    values: dict[str, object] = {}
    if row.target == "request":
        values["request"] = request
    elif row.target == "stage":
        values["stage"] = stage = _stage_of(name, snapshot, stage)
    if name == "pause" and engine.state == "paused":
        name = "resume"
    elif name == "drain":
        values["undo"] = engine.state == "draining"
    elif name == "cordon":
        values["undo"] = any(each.index == stage and each.cordon is not None for each in snapshot.stages)
    if any(not argument.option and argument.name not in values for argument in row.arguments):
        return " ".join([name, *map(str, values.values())])
    return build(name, values)


def _stage_of(name: str, snapshot: Snapshot, stage: int | None) -> int:
    """Return the stage that a key acts on. Raises UsageError."""
    state, lacking = _STAGES[name]
    halted = [each.index for each in snapshot.stages if each.state == state] if stage is None else [stage]
    if not halted:
        raise UsageError(f"no stage {lacking}")
    return halted[0]


# --- a verb in words ------------------------------------------------------------------------------------------


def effect_of(verb: Verb) -> str:
    """Return the effect of a verb in one line."""
    return row_of(verb).help


def target_of(verb: Verb) -> str:
    """Return what the verb acts on, in words."""
    return clean(_TARGETS[row_of(verb).target].format(verb))


def revision_of(verb: Verb, snapshot: Snapshot) -> int | None:
    """Return the revision to guard the verb with: of its request, or of memory; None where there is none."""
    if not row_of(verb).has_revision:
        return None
    request = getattr(verb, "request", None)
    if request is None:
        return snapshot.engine.memory_revision
    return next((each.revision for each in snapshot.requests if each.id == request), None)


def cli_line(verb: Verb, engine: str) -> str:
    """Return the shell line that does the same."""
    return shell_line(grammar.words_of(verb), engine)


def shell_line(words: Sequence[str], engine: str) -> str:
    """Return the shell line of `words` of the CLI about an engine; empty: about the only one."""
    named = ["-e", engine] if engine else []
    return shlex.join(clean(word) for word in ("ppconsole", *named, *words))
