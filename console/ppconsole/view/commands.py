"""Verbs of the console: from the command line (`:set-memory 0.5`), to words, and to the CLI line that does the same."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from ppengine.protocol.control import (
    Abort,
    Continue,
    Cordon,
    Drain,
    Pause,
    Preempt,
    Release,
    RestartStage,
    Resume,
    SetCheck,
    SetMemory,
    Stop,
    Submit,
    SwapIn,
    SwapOut,
    Verb,
)
from ppengine.protocol.snapshot import Snapshot

from ppconsole.model.safe import clean


class UsageError(ValueError):
    """A command line that cannot be understood; the text says what would be right."""


class Usage(NamedTuple):
    """How a verb is written and what it does."""

    form: str
    text: str


VERBS: dict[str, Usage] = {
    "abort": Usage("abort REQUEST", "end a request and free its blocks"),
    "preempt": Usage("preempt REQUEST [--mode recompute|swap] [--hold]", "take a request's blocks"),
    "swap-out": Usage("swap-out REQUEST [--no-hold]", "move its blocks to the host and hold it there"),
    "swap-in": Usage("swap-in REQUEST", "bring its blocks back and let it run"),
    "release": Usage("release REQUEST", "end a hold; the scheduler does the rest"),
    "set-memory": Usage("set-memory UTILIZATION", "change the memory of the KV cache while requests run"),
    "pause": Usage("pause [--mode wait|keep|abort]", "stop scheduling"),
    "resume": Usage("resume", "undo pause"),
    "drain": Usage("drain [--undo]", "refuse new requests, finish those that are here"),
    "continue": Usage("continue STAGE", "wake a stage that was stopped by a signal"),
    "check": Usage("check ledger|strict|finite|shadow on|off [--share S]", "switch a live check in all stages"),
    "restart-stage": Usage("restart-stage STAGE", "start a stage anew; requests are recomputed, none is lost"),
    "cordon": Usage("cordon --stage K [--undo]", "begin no request and leave a stage alone, to look at it"),
    "stop": Usage("stop", "stop the engine and all its processes"),
    "submit": Usage("submit PROMPT", "send a prompt"),
}
SCREENS: dict[str, str] = {
    "stacks": "stacks of stages and core", "logs": "log lines of all processes", "events": "all events",
    "diagnosis": "which stage is stuck, and why", "explain": "the same",
    "streams": "streams, live checks and their findings", "show": "one request in detail: show REQUEST",
    "help": "keys and letters", "quit": "leave the console",
}  # fmt: skip


def parse(line: str, selected: str | None = None) -> Verb:
    """Return the verb in `line`; a request that is left out is the selected one. Raises UsageError."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r}: {error}") from None
    if not words or words[0] not in VERBS:
        word = words[0] if words else ""
        raise UsageError(f"{word!r} is not a command; the commands are {', '.join((*VERBS, *SCREENS))}")
    name, rest = words[0], words[1:]
    if name == "submit":
        return Submit(prompt=" ".join(rest))
    options, plain = _options(name, rest)
    return _of_engine(name, plain, options) or _of_request(name, plain, options, selected)


_ALLOWED: dict[str, dict[str, tuple[str, ...] | None]] = {
    "preempt": {"--mode": ("recompute", "swap"), "--hold": ()},
    "swap-out": {"--no-hold": ()},
    "pause": {"--mode": ("wait", "keep", "abort")},
    "drain": {"--undo": ()},
    "cordon": {"--stage": None, "--undo": ()},
    "check": {"--share": None},
}
"""Options of a verb and what each may be: nothing at all, one of these, or (None) what the engine takes."""


def _options(name: str, words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return options and plain words. Raises UsageError for an option or a value that the verb does not have."""
    allowed = _ALLOWED.get(name, {})
    options: dict[str, str] = {}
    plain: list[str] = []
    queue = [part for word in words for part in (word.split("=", 1) if word.startswith("--") else [word])]
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            plain.append(word)
            continue
        if word not in allowed:
            raise UsageError(f"{name} has no option {word}; it is written: {VERBS[name].form}")
        choices = allowed[word]
        value = queue.pop(0) if choices != () and queue else ""
        if choices and value not in choices:
            raise UsageError(f"{word} is {value!r}; it must be one of {', '.join(choices)}")
        options[word] = value
    return options, plain


_ON_STAGE: dict[str, type[Continue | RestartStage]] = {"continue": Continue, "restart-stage": RestartStage}


def _of_engine(name: str, plain: list[str], options: dict[str, str]) -> Verb | None:
    """Return a verb on the engine or a stage; None for verbs on requests."""
    if name in ("set-memory", *_ON_STAGE):
        value = _only(name, plain)
        try:
            return SetMemory(utilization=float(value)) if name == "set-memory" else _ON_STAGE[name](stage=int(value))
        except ValueError:
            raise UsageError(f"{value!r} is not a number; it is written: {VERBS[name].form}") from None
    if name == "check":
        return _check(plain, options)
    if name == "cordon":
        return _cordon(plain, options)
    if name not in ("pause", "resume", "drain", "stop"):
        return None
    if plain:
        raise UsageError(f"{name} takes no {plain[0]!r}; it is written: {VERBS[name].form}")
    if name == "pause":
        mode = options.get("--mode", "wait")
        return Pause(mode="keep" if mode == "keep" else "abort" if mode == "abort" else "wait")
    if name == "drain":
        return Drain(undo="--undo" in options)
    return Resume() if name == "resume" else Stop()


def _check(plain: list[str], options: dict[str, str]) -> Verb:
    """Return the switch of a check."""
    if len(plain) != 2:
        raise UsageError(f"check takes two words, not {len(plain)}; it is written: {VERBS['check'].form}")
    words = {"check": plain[0], "mode": plain[1], "share": options.get("--share")}
    try:
        return msgspec.convert(words, SetCheck, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"check {shlex.join(plain)}: {error}; it is written: {VERBS['check'].form}") from None


def _cordon(plain: list[str], options: dict[str, str]) -> Verb:
    """Return the cordon of a stage, or its end."""
    stage = options.get("--stage", "")
    if plain or not stage.isdecimal():
        raise UsageError(f"cordon needs --stage and a number; it is written: {VERBS['cordon'].form}")
    return Cordon(stage=int(stage), undo="--undo" in options)


def _of_request(name: str, plain: list[str], options: dict[str, str], selected: str | None) -> Verb:
    """Return a verb on a request."""
    request = _only(name, plain or ([selected] if selected else []))
    if name == "preempt":
        mode = options.get("--mode")
        return Preempt(
            request=request,
            mode="swap" if mode == "swap" else "recompute" if mode == "recompute" else None,
            hold="--hold" in options,
        )
    if name == "swap-out":
        return SwapOut(request=request, hold="--no-hold" not in options)
    if name == "swap-in":
        return SwapIn(request=request)
    return Release(request=request) if name == "release" else Abort(request=request)


def _only(name: str, words: list[str]) -> str:
    """Return the one argument. Raises UsageError."""
    if len(words) != 1:
        raise UsageError(f"{name} takes one argument, not {len(words)}; it is written: {VERBS[name].form}")
    return words[0]


ON_REQUEST = ("preempt", "swap-out", "swap-in", "release", "abort")
"""Verbs whose key acts on the selected request."""


def on_request(name: str, request: str) -> Verb:
    """Return the verb of a key on `request`, with its defaults."""
    return _of_request(name, [request], {}, None)


def on_engine(name: str, snapshot: Snapshot, stage: int | None) -> Verb | None:
    """Return the verb of a key on the engine as it is: pause or resume, drain or cordon or its undo, continue, restart.

    None where no stage is given and none is stopped by a signal, or dead, or one has to be chosen.
    """
    state = snapshot.engine.state
    if name == "pause":
        return Resume() if state == "paused" else Pause()
    if name == "drain":
        return Drain(undo=state == "draining")
    if name == "cordon":
        placed = {each.index for each in snapshot.stages if each.cordon is not None}
        return None if stage is None else Cordon(stage=stage, undo=stage in placed)
    wanted = "dead" if name == "restart-stage" else "stopped"
    halted = [each.index for each in snapshot.stages if each.state == wanted] if stage is None else [stage]
    return _ON_STAGE[name](stage=halted[0]) if halted else None


def target_of(verb: Verb) -> str:
    """Return what the verb acts on, in words."""
    match verb:
        case Abort() | Preempt() | SwapOut() | SwapIn() | Release():
            return f"request {clean(verb.request)}"
        case Continue() | RestartStage() | Cordon():
            return f"stage {verb.stage}"
        case SetMemory():
            return "memory of all stages"
        case SetCheck():
            return f"the {verb.check} check of all stages"
        case Submit():
            return "a new request"
        case _:
            return "the engine"


def request_of(verb: Verb) -> str | None:
    """Return the id of the request that the verb acts on, if it is one of those."""
    return verb.request if isinstance(verb, Abort | Preempt | SwapOut | SwapIn | Release) else None


def revision_of(verb: Verb, snapshot: Snapshot) -> int | None:
    """Return the revision to guard the verb with: of its request, or of memory; None where there is none."""
    request = request_of(verb)
    if request is not None:
        return next((each.revision for each in snapshot.requests if each.id == request), None)
    return snapshot.engine.memory_revision if isinstance(verb, SetMemory) else None


def words_of(verb: Verb) -> list[str]:
    """Return the verb as words of the CLI."""
    match verb:
        case Preempt():
            mode = ["--mode", verb.mode] if verb.mode else []
            return ["preempt", *mode, *(["--hold"] if verb.hold else []), verb.request]
        case SwapOut():
            return ["swap-out", *([] if verb.hold else ["--no-hold"]), verb.request]
        case Abort() | SwapIn() | Release():
            return [name_of(verb), verb.request]
        case SetMemory():
            return ["set-memory", f"{verb.utilization:g}"]
        case SetCheck():
            share = [] if verb.share is None else ["--share", f"{verb.share:g}"]
            return ["check", verb.check, verb.mode, *share]
        case Pause():
            return ["pause", "--mode", verb.mode]
        case Drain():
            return ["drain", *(["--undo"] if verb.undo else [])]
        case Continue() | RestartStage():
            return [name_of(verb), str(verb.stage)]
        case Cordon():
            return ["cordon", "--stage", str(verb.stage), *(["--undo"] if verb.undo else [])]
        case Submit():
            return ["submit", verb.prompt or ""]
        case _:
            return [name_of(verb)]


def name_of(verb: Verb) -> str:
    """Return the verb's name on the wire and in the CLI."""
    return str(verb.__struct_config__.tag)


def cli_line(verb: Verb, engine: str) -> str:
    """Return the shell line that does the same."""
    return shell_line(words_of(verb), engine)


def shell_line(words: Sequence[str], engine: str) -> str:
    """Return what to type for `words` of the CLI about an engine; empty: about the only one."""
    named = ["-e", engine] if engine else []
    return shlex.join(clean(word) for word in ("ppconsole", *named, *words))


def complete(line: str, snapshot: Snapshot | None) -> str | None:
    """Return `line` completed to the first command, option or request id that begins with its last word."""
    head, space, last = line.rpartition(" ")
    if not space:
        options = [*VERBS, *SCREENS]
    else:
        verb = head.split(" ", 1)[0]
        options = [*_ALLOWED.get(verb, {})]
        if head.endswith("--mode"):
            options = list(_ALLOWED.get(verb, {}).get("--mode") or ())
        elif head.endswith("--stage"):
            options = [str(stage.index) for stage in snapshot.stages] if snapshot else []
        elif snapshot is not None and ("REQUEST" in VERBS.get(verb, Usage("", "")).form or verb == "show"):
            options += [request.id for request in snapshot.requests if request.state != "finished"]
        elif verb == "check" and "--" not in last:
            words = head.split(" ")[1:]
            options = ["on", "off"] if words else ["ledger", "strict", "finite", "shadow"]
        elif snapshot is not None and verb in _ON_STAGE:
            options += [str(stage.index) for stage in snapshot.stages]
    found = next((option for option in options if option.startswith(last) and option != last), None)
    return None if found is None or not line else f"{head}{space}{clean(found)}"
