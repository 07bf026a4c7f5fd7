"""Verbs of the console: from the command line (`:set-memory 0.5`) and from keys, to words, and to the same CLI line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import click
from ppengine.protocol.control import Outcome
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verb_table import ROWS, Role, Row, Target, covers
from ppengine.protocol.verbs import Many, Submit, Verb, build, row_of

from ppconsole.model import choosing, grammar, memory_change
from ppconsole.model.filters import FilterError
from ppconsole.model.prompt_options import PromptOptions
from ppconsole.model.request_names import whole_in
from ppconsole.model.safe import clean
from ppconsole.model.usage_text import usage_text
from ppconsole.view.completion import nearest


class UsageError(ValueError):
    """A command line that cannot be understood, or a key without a target; the text says what would be right."""


class Asked(NamedTuple):
    """A verb, and how its requests were chosen."""

    verb: Verb
    choice: choosing.Choice = choosing.NAMED


class Usage(NamedTuple):
    """How a verb is written and its effect."""

    form: str
    text: str
    row: Row


VERBS: dict[str, Usage] = {
    row.words: Usage(grammar.form(row), row.help, row) for row in ROWS.values() if row.typed and row.runs != "faults"
}
"""Verbs that the console offers, by the words that they begin with.

The line takes faults too, but completion and palette do not suggest them.
"""
SCREENS: dict[str, str] = {
    "stacks": "stacks of stages and core", "logs": "log lines of all processes", "events": "all events",
    "finished": "requests that have ended", "incidents": "faults that were", "history": "the last hour, to go back in",
    "diagnosis": "which stage is stuck, and why",
    "streams": "streams, live checks and their findings",
    "topology": "places, their neighbours, cards and links",
    "clients": "API keys and routes of the HTTP port",
    "tiers": "host cache and backends of KV blocks", "show": "one request in detail: show REQUEST",
    "mark": "mark the requests that a filter matches: mark FILTER",
    "trends": "rates, queues, KV use and swaps of the last hour",
    "sort": "sort the table: sort COLUMN; once more reverses it",
    "set": "options of prompts: set NAME VALUE, set NAME default", "engines": "choose another engine",
    "help": "keys and letters; help NAME: one column, letter or command", "quit": "leave the console; the engine stays",
}  # fmt: skip
ALIASES = {"q": "quit", "q!": "quit", "quit!": "quit", "explain": "diagnosis"}
"""Other names of screens."""
_LIST_STORES = "store ls"
LINES = {_LIST_STORES: "tiers", "store": "tiers"}
"""Whole lines that open a screen."""
NAMES = (*VERBS, *SCREENS)
"""Words that a command line may begin with, as completion offers them."""


def names_for(role: Role) -> tuple[str, ...]:
    """Return the words that a command line may begin with, without the verbs that `role` does not cover."""
    return (*(name for name, usage in VERBS.items() if covers(role, usage.row.role)), _LIST_STORES, *SCREENS)


_TARGETS: dict[Target, str] = {
    "submission": "a new request", "request": "request {0.request}", "requests": "{count} requests",
    "stage": "stage {0.stage}",
    "memory": "memory of all stages", "check": "the {0.check} check of all stages",
    "client": "client {0.client}", "backend": "backend {0.backend}", "engine": "the engine",
}  # fmt: skip


def prompt(text: str, options: PromptOptions) -> Submit:
    """Return the submission of a prompt that was typed. Raises UsageError."""
    verb = _built(ROWS["submit"], ["--", text], (), options, None).verb
    assert isinstance(verb, Submit)
    return verb


# --- the command line -----------------------------------------------------------------------------------------


def asked(
    line: str, targets: Sequence[str] = (), options: PromptOptions | None = None, snapshot: Snapshot | None = None
) -> Asked:
    """Return the verb in `line`, and how its requests were chosen. Raises UsageError.

    `targets`: the requests of a verb that names and chooses none. `options`: those of a prompt, for `submit`.
    Options such as `--owner` choose among the requests of `snapshot`.
    """
    row, rest = _row_of_words(words_of_line(line))
    return _built(row, rest, targets, options or PromptOptions(), snapshot)


def words_of_line(line: str) -> list[str]:
    """Return the words of a command line, with quotes as in a shell. Raises UsageError."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r}: {error}") from None


def _built(
    row: Row, words: list[str], targets: Sequence[str], options: PromptOptions, snapshot: Snapshot | None
) -> Asked:
    """Return the verb of `row` with the arguments `words`. Raises UsageError."""
    defaults = options.defaults() if row.name == "submit" else {}
    try:
        values = grammar.parse(row, words, defaults)
        if row.target != "request":
            return Asked(build(row.name, memory_change.resolved(values, snapshot)))
        requests, choice = _chosen(values, targets, snapshot)
        return Asked(_on_requests(row.name, values, requests), choice)
    except click.UsageError as error:
        raise UsageError(f"{row.words}: {usage_text(error)}; it is written: {grammar.form(row)}") from None
    except (ValueError, LookupError) as error:
        raise UsageError(f"{row.words}: {error}") from None


def _chosen(
    values: dict[str, Any], targets: Sequence[str], snapshot: Snapshot | None
) -> tuple[list[str], choosing.Choice]:
    """Take the words that choose requests out of `values`; return the requests, and how they were chosen."""
    ids, choice = choosing.take(values)
    if choice.filter and snapshot is not None:
        ids = [request.id for request in choosing.matching(snapshot, choice.filter)]
    elif snapshot is not None:
        ids = list(dict.fromkeys(whole_in(each, snapshot) for each in ids))
    if not ids and not targets:
        raise choosing.nothing()
    if not ids and len(targets) > 1:  # only marks are several
        choice = choosing.MARKED
    return ids or list(targets), choice


def _on_requests(name: str, values: dict[str, Any], requests: Sequence[str]) -> Verb:
    """Return the verb `name` on one request, or on many. Raises ValueError for values that it refuses."""
    verbs = [build(name, {**values, "request": each}) for each in requests]
    return verbs[0] if len(verbs) == 1 else Many(verbs=verbs)  # type: ignore[arg-type]


def matching(text: str, snapshot: Snapshot) -> list[str]:
    """Return the live requests that a filter matches. Raises UsageError."""
    if not text.strip():
        raise UsageError("mark needs a filter: mark owner:alice age>5m")
    try:
        return [request.id for request in choosing.matching(snapshot, text)]
    except (FilterError, LookupError) as error:
        raise UsageError(f"mark: {error}") from None


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


def of_key(
    name: str, snapshot: Snapshot, requests: Sequence[str], stage: int | None, client: str | None = None,
    backend: str | None = None,
) -> Verb | str:  # fmt: skip
    """Return the verb of a key on the selection; a string is the beginning of a line that needs more words.

    Raises UsageError where there is nothing to act on.
    """
    row, engine = ROWS[name], snapshot.engine
    values: dict[str, Any] = {}
    if row.target == "request":
        if not requests:
            raise UsageError(f"{name} acts on a request, and none is selected")
        return _key_on_requests(row, requests)
    elif row.target == "stage":
        if stage is None and name == "continue":
            stage = _only_halted(snapshot)
        if stage is None:
            raise UsageError(f"{name} acts on a stage, and none has the focus; on the main screen Tab goes there")
        values["stage"] = stage
    elif row.target == "client":
        if not client:
            raise UsageError(f"{name} acts on a client, and none is selected")
        values["client"] = client
    elif row.target == "backend" and name != "store-add":
        if not backend:
            raise UsageError(f"{row.words} acts on a backend, and none is selected")
        values["backend"] = backend
        if name == "store-pause" and _is_paused(snapshot, backend):
            name = "store-resume"
    if name == "pause" and engine.state == "paused":
        name = "resume"
    elif name == "drain":
        values["undo"] = engine.state == "draining"
    elif name == "cordon":
        values["undo"] = any(each.index == stage and each.cordon is not None for each in snapshot.stages)
    if any(not argument.option and argument.name not in values for argument in row.arguments):
        return " ".join([row.words, *map(str, values.values())])
    return build(name, values)


def _is_paused(snapshot: Snapshot, name: str) -> bool:
    backends = [] if snapshot.tiers is None else snapshot.tiers.backends
    return any(each.name == name and each.state == "paused" for each in backends)


def _only_halted(snapshot: Snapshot) -> int | None:
    """Return the stage that is halted; None where none is, or several are."""
    halted = {stage.index for stage in snapshot.stages if stage.state == "stopped"}
    return halted.pop() if len(halted) == 1 else None


def _key_on_requests(row: Row, requests: Sequence[str]) -> Verb | str:
    if any(not argument.option and argument.kind != "request" for argument in row.arguments):
        return shlex.join([row.name, *requests])
    try:
        return _on_requests(row.name, {}, requests)
    except ValueError as error:
        raise UsageError(f"{row.name}: {error}") from None


# --- a verb on many requests ----------------------------------------------------------------------------------


def requests_of(verb: Verb) -> list[str]:
    """Return the requests that a verb names."""
    named = getattr(verb, "request", None)
    return verb.requests if isinstance(verb, Many) else [named] if named is not None else []


def guarded(verb: Verb, snapshot: Snapshot) -> Verb:
    """Return a verb on many requests with their revisions in `snapshot`; one that has changed since is a conflict."""
    if not isinstance(verb, Many):
        return verb
    known = {request.id: request.revision for request in snapshot.requests}
    return Many(verbs=verb.verbs, revisions=[known.get(request) for request in verb.requests])


def without_conflicts(verb: Verb, plan: Outcome) -> Verb | None:
    """Return a verb on many requests without those that its plan excludes; None if none is left."""
    if not isinstance(verb, Many) or not plan.conflicts:
        return verb
    undone = {conflict.request for conflict in plan.conflicts}
    revisions = verb.revisions or [None] * len(verb.verbs)
    left = [pair for pair in zip(verb.verbs, revisions, strict=True) if pair[0].request not in undone]
    return Many(verbs=[one for one, _ in left], revisions=[revision for _, revision in left]) if left else None


# --- a verb in words ------------------------------------------------------------------------------------------


def effect_of(verb: Verb) -> str:
    """Return the effect of a verb in one line; of many verbs, that of each."""
    return row_of(verb.verbs[0] if isinstance(verb, Many) else verb).help


def target_of(verb: Verb) -> str:
    """Return what the verb acts on, in words."""
    requests = requests_of(verb)
    if isinstance(verb, Many) and len(requests) == 1:
        return clean(f"request {requests[0]}")
    return clean(_TARGETS[row_of(verb).target].format(verb, count=len(requests)))


def revision_of(verb: Verb, snapshot: Snapshot) -> int | None:
    """Return the revision to guard the verb with: of its request, or of memory; None where there is none."""
    if not row_of(verb).has_revision:
        return None
    request = getattr(verb, "request", None)
    if request is None:
        return snapshot.engine.memory_revision
    return next((each.revision for each in snapshot.requests if each.id == request), None)


def shell_words(verb: Verb, reason: str = "") -> list[str]:
    """Return the words of the CLI that do the same. `reason`: of an override; empty without one."""
    words = grammar.words_of(verb)
    end = words.index("--") if "--" in words else len(words)
    return [*words[:end], *(["--override", "--reason", reason] if reason else []), *words[end:]]


def cli_line(verb: Verb, engine: str, reason: str = "") -> str:
    """Return the shell line that does the same. `reason`: of an override; empty without one."""
    return shell_line(shell_words(verb, reason), engine)


def shell_line(words: Sequence[str], engine: str) -> str:
    """Return the shell line of `words` of the CLI about an engine; empty: about the only one."""
    named = ["-e", engine] if engine else []
    return shlex.join(clean(word) for word in ("ppconsole", *named, *words))
