"""Verbs of the console: from the command line (`:set-memory 0.5`) and from keys, to words, and to the same CLI line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

import click
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verb_table import ROWS, Row, Target
from ppengine.protocol.verbs import Submit, Verb, build, row_of

from ppconsole.model import grammar
from ppconsole.model.prompt_options import PromptOptions
from ppconsole.model.safe import clean
from ppconsole.view.completion import nearest


class UsageError(ValueError):
    """A command line that cannot be understood, or a key without a target; the text says what would be right."""


class Usage(NamedTuple):
    """How a verb is written and its effect."""

    form: str
    text: str


VERBS: dict[str, Usage] = {
    row.name: Usage(grammar.form(row), row.help) for row in ROWS.values() if row.typed and row.runs != "faults"
}
"""Verbs that the console offers. The line takes faults too, but completion and palette do not suggest them."""
SCREENS: dict[str, str] = {
    "stacks": "stacks of stages and core", "logs": "log lines of all processes", "events": "all events",
    "finished": "requests that have ended", "incidents": "faults that were", "history": "the last hour, to go back in",
    "diagnosis": "which stage is stuck, and why",
    "streams": "streams, live checks and their findings", "show": "one request in detail: show REQUEST",
    "trends": "rates, queues, KV use and swaps of the last hour",
    "sort": "sort the table: sort COLUMN; once more reverses it",
    "set": "options of prompts: set NAME VALUE, set NAME default", "engines": "choose another engine",
    "help": "keys and letters", "quit": "leave the console; the engine stays",
}  # fmt: skip
ALIASES = {"q": "quit", "q!": "quit", "quit!": "quit", "explain": "diagnosis"}
"""Other names of screens."""
NAMES = (*VERBS, *SCREENS)
"""Words that a command line may begin with, as completion offers them."""
_TARGETS: dict[Target, str] = {
    "submission": "a new request", "request": "request {0.request}", "stage": "stage {0.stage}",
    "memory": "memory of all stages", "check": "the {0.check} check of all stages", "engine": "the engine",
}  # fmt: skip


def prompt(text: str, options: PromptOptions) -> Submit:
    """Return the submission of a prompt that was typed. Raises UsageError."""
    verb = _built(ROWS["submit"], ["--", text], None, options)
    assert isinstance(verb, Submit)
    return verb


# --- the command line -----------------------------------------------------------------------------------------


def parse(line: str, selected: str | None = None, options: PromptOptions | None = None) -> Verb:
    """Return the verb in `line`; a request that is left out is the selected one. Raises UsageError.

    `options`: those of a prompt, for `submit`.
    """
    row, rest = _row_of_words(words_of_line(line))
    return _built(row, rest, selected, options or PromptOptions())


def words_of_line(line: str) -> list[str]:
    """Return the words of a command line, with quotes as in a shell. Raises UsageError."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r}: {error}") from None


def _built(row: Row, words: list[str], selected: str | None, options: PromptOptions) -> Verb:
    """Return the verb of `row` with the arguments `words`. Raises UsageError."""
    defaults = options.defaults() if row.name == "submit" else {}
    try:
        return build(row.name, grammar.parse(row, words, selected, defaults))
    except click.UsageError as error:
        text = " ".join(error.format_message().split()).rstrip(".")
        raise UsageError(f"{row.name}: {text}; it is written: {grammar.form(row)}") from None
    except ValueError as error:
        raise UsageError(f"{row.name}: {error}") from None


def _row_of_words(words: list[str]) -> tuple[Row, list[str]]:
    """Return the row that `words` begin with, and the words after it. Raises UsageError."""
    for count in (2, 1):
        for row in ROWS.values():
            if row.typed and " ".join(words[:count]) in (row.name, row.words):
                return row, words[count:]
    word = words[0] if words else ""
    near = nearest(word, (*NAMES, *ALIASES)) or f"; the commands are {', '.join(NAMES)}"
    raise UsageError(f"{word!r} is not a command{near}")


def sort_column(word: str, columns: Sequence[str]) -> str:
    """Return the column that `word` names. Raises UsageError."""
    if not columns:
        raise UsageError("sort: this screen has no table that it sorts; those of requests do")
    if word.casefold() in columns:
        return word.casefold()
    near = nearest(word, columns) or f"; the columns are {', '.join(columns)}"
    raise UsageError(f"sort: {word!r} is no column{near}" if word else f"sort: it needs a column{near}")


# --- keys -----------------------------------------------------------------------------------------------------


def of_key(name: str, snapshot: Snapshot, request: str | None, stage: int | None) -> Verb | str:
    """Return the verb of a key on the selection; a string is the beginning of a line that needs more words.

    Raises UsageError where there is nothing to act on.
    """
    row, engine = ROWS[name], snapshot.engine
    values: dict[str, object] = {}
    if row.target == "request":
        if request is None:
            raise UsageError(f"{name} acts on a request, and none is selected")
        values["request"] = request
    elif row.target == "stage":
        if stage is None:
            raise UsageError(f"{name} acts on a stage, and none has the focus; on the main screen Tab goes there")
        values["stage"] = stage
    if name == "pause" and engine.state == "paused":
        name = "resume"
    elif name == "drain":
        values["undo"] = engine.state == "draining"
    elif name == "cordon":
        values["undo"] = any(each.index == stage and each.cordon is not None for each in snapshot.stages)
    if any(not argument.option and argument.name not in values for argument in row.arguments):
        return " ".join([name, *map(str, values.values())])
    return build(name, values)


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
