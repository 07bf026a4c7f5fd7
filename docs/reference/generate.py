"""Writes the reference pages from the code: `python docs/reference/generate.py`; `--check` only compares.

The CLI's page comes from click, the profile's and the JSON's from msgspec structs and their docstrings.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
import msgspec
from ppconsole.cli import exits, ppconsole, vllm_flags
from ppconsole.cli.environment import VARIABLES
from ppconsole.model.thresholds import AlarmConfig, OnIncident, Threshold
from ppengine.common.config import Profile
from ppengine.common.tier_config import BackendConfig
from ppengine.common.yaml_reader import BYTES_MOST, DEPTH_MOST, NODES_MOST
from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused
from ppengine.protocol.kinds import range_text
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event, Snapshot
from ppengine.protocol.structured_outputs import StructuredOutputsParams

HERE = Path(__file__).resolve().parent
COLUMNS = 96
_HEAD = "<!-- Made by `python docs/reference/generate.py`. Change the code's docstrings and run it again. -->\n\n"


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    made = {
        "cli.md": cli_page(),
        "config.md": config_page(),
        "environment.md": environment_page(),
        "exit-codes.md": exit_page(),
        "profile.md": profile_page(),
        "status-json.md": json_page(),
    }
    return {name: _HEAD + text.rstrip("\n") + "\n" for name, text in made.items()}


def cli_page() -> str:
    """Return the help of the group and of every command, as the terminal shows it."""
    group = click.Context(ppconsole, info_name="ppconsole", terminal_width=COLUMNS, max_content_width=COLUMNS)
    parts = ["# Commands", f"```\n{ppconsole.get_help(group)}\n```"]
    for name in ppconsole.list_commands(group):
        command = ppconsole.get_command(group, name)
        assert command is not None, name
        context = click.Context(command, parent=group, info_name=name, terminal_width=COLUMNS)
        context.max_content_width = COLUMNS
        text = "\n".join(line.rstrip() for line in command.get_help(context).split("\n"))
        parts += [f"## `{name}`", f"```\n{text}\n```"]
        if isinstance(command, click.Group):
            parts += [part for word in command.list_commands(context) for part in _inner(command, word, context)]
    return "\n\n".join([*parts, _vllm_flags()])


def _vllm_flags() -> str:
    """Return the flags of `vllm serve` with their counterparts, one a row."""
    flags = sorted({*vllm_flags.KEYS, *vllm_flags.OTHERS})
    rows = [[f"`{flag}`", vllm_flags.counterpart(flag)] for flag in flags if flag.startswith("--")]
    head = "## Flags of `vllm serve`\n\n`ppconsole serve` refuses them with these words.\n\n"
    return head + _table(("flag", "in `ppconsole serve`"), rows)


def _inner(group: click.Group, name: str, parent: click.Context) -> list[str]:
    """Return heading and help of a command inside a group."""
    command = group.commands[name]
    context = click.Context(command, parent=parent, info_name=name, terminal_width=COLUMNS)
    context.max_content_width = COLUMNS
    text = "\n".join(line.rstrip() for line in command.get_help(context).split("\n"))
    return [f"### `{group.name} {name}`", f"```\n{text}\n```"]


def environment_page() -> str:
    """Return the environment variables that ppconsole reads."""
    rows = [[f"`{name}`", f"{meaning}."] for name, meaning in VARIABLES]
    return "# Environment variables\n\n" + _table(("variable", "meaning"), rows)


def config_page() -> str:
    """Return the keys of the console's `config.toml`."""
    intro = (
        "# Keys of config.toml\n\n`$XDG_CONFIG_HOME/ppconsole/config.toml` is read when a console or"
        "\n`ppconsole watch --thresholds` begins. An unknown key is an error that lists the known ones.\n"
    )
    parts = [intro, _struct(AlarmConfig, "Top level", defaults=True)]
    parts.append(_struct(Threshold, "`thresholds`", defaults=True, prefix="thresholds[]."))
    parts.append(_struct(OnIncident, "`on_incident`", defaults=True, prefix="on_incident."))
    return "\n".join(parts)


def exit_page() -> str:
    """Return the exit codes of the CLI with the error codes and outcomes of an engine that lead to each."""
    names = {value: name for name, value in vars(exits).items() if name.isupper() and isinstance(value, int)}
    rows = []
    for value, name in sorted(names.items()):
        errors = ", ".join(f"`{code}`" for code, exit_code in exits.OF_CODE.items() if exit_code == value)
        states = ", ".join(f"`{state}`" for state, exit_code in exits.OF_STATE.items() if exit_code == value)
        rows.append([str(value), name.lower().replace("_", " "), errors, states])
    return "# Exit codes\n\n" + _table(("code", "meaning", "error codes of the engine", "ends of a verb"), rows)


def profile_page() -> str:
    """Return the keys of a profile, section by section, and the sampling parameters of a request."""
    intro = (
        "# Profile keys\n\nA profile is a YAML file. `ppconsole serve PROFILE --set a.b=c` replaces one key."
        "\nAn unknown key is an error that names the nearest known one. A value out of its range, a key"
        "\nthat is given twice, and an alias or a tag of YAML are errors, too."
        f"\nA file has at most {BYTES_MOST} bytes, {NODES_MOST} keys and values, and {DEPTH_MOST} levels.\n"
    )
    parts = [intro, _struct(Profile, "Top level", defaults=True)]
    for name, kind in typing.get_type_hints(Profile).items():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            parts.append(_struct(kind, f"`{name}`", defaults=True, prefix=f"{name}."))
    parts.append(_struct(BackendConfig, "`tiers.backends`", defaults=True, prefix="tiers.backends.NAME."))
    parts.append(_struct(SamplingParams, "`SamplingParams`", defaults=True))
    parts.append(_struct(StructuredOutputsParams, "`structured_outputs`", defaults=True))
    return "\n".join(parts)


def json_page() -> str:
    """Return the fields of `status --json`, of events and of the answers of verbs."""
    intro = (
        "# JSON\n\n`ppconsole status --json` prints a `Snapshot`, `events --json` one `Event` a line, and"
        "\na verb with `--json` its `Outcome`, `Refused` or (with `--no-wait`) `Accepted`."
        "\nFields may be added; none is removed. Unknown is `null`, never 0.\n"
    )
    seen: dict[type[msgspec.Struct], None] = {}
    for root in (Snapshot, Event, Accepted, Deferred, Outcome, Refused):
        _collect(root, seen)
    return "\n".join([intro, *(_struct(kind, f"`{kind.__name__}`", defaults=False) for kind in seen)])


def _collect(kind: type[msgspec.Struct], seen: dict[type[msgspec.Struct], None]) -> None:
    """Add a struct and those of its fields to `seen`, in the order of a reader."""
    if kind in seen:
        return
    seen[kind] = None
    for hint in typing.get_type_hints(kind).values():
        for inner in _structs_in(hint):
            _collect(inner, seen)


def _structs_in(hint: Any) -> list[type[msgspec.Struct]]:
    if isinstance(hint, type) and not get_args(hint):
        return [hint] if issubclass(hint, msgspec.Struct) else []
    return [found for part in get_args(hint) for found in _structs_in(part)]


def _struct(kind: type[msgspec.Struct], title: str, *, defaults: bool, prefix: str = "") -> str:
    """Return one struct as a heading, its docstring and a table of its fields."""
    hints, docs = typing.get_type_hints(kind, include_extras=True), _attribute_docs(kind)
    rows = []
    for field in msgspec.structs.fields(kind):
        row = [f"`{prefix}{field.encode_name}`", _type_text(hints[field.name])]
        if defaults and _structs_in(hints[field.name]):
            anchor = f"{prefix}{field.encode_name}".replace(".", "")
            row = [f"[`{field.encode_name}`](#{anchor})", "section", ""]
        elif defaults:
            row.append(_default_text(field))
        rows.append([*row, docs.get(field.name, "")])
    titles = ("key", "type", "default", "meaning") if defaults else ("field", "type", "meaning")
    body = f"## {title}\n\n{_flowed(inspect.getdoc(kind) or '')}\n\n"
    return body + (_table(titles, rows) if rows else "No fields.\n")


def _attribute_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes, in one line each."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for one, two in zip(body.body, body.body[1:], strict=False):
        named = isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        if named and isinstance(two, ast.Expr) and isinstance(two.value, ast.Constant):
            found[one.target.id] = " ".join(str(two.value.value).split())
    return found


def _type_text(hint: Any) -> str:
    """Return a type as JSON users say it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner = get_args(parts[0])
        text = f"list of {_type_text(get_args(inner[0])[0])}" if inner else _type_text(parts[0])
        return f"{text} ({range_text(hint)})"
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(_type_text(part) for part in parts)
    if origin in (list, tuple):
        return f"list of {_type_text(parts[0])}"
    if origin is dict:
        return f"map of {_type_text(parts[1])}"
    if hint is type(None):
        return "null"
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"
    return {int: "integer", float: "number", str: "text", bool: "true or false"}.get(hint, str(hint))


def _default_text(field: msgspec.structs.FieldInfo) -> str:
    """Return a default as YAML writes it."""
    if field.required:
        return "required"
    if field.default is msgspec.NODEFAULT:
        return "`[]`"
    return "`null`" if field.default is None else f"`{msgspec.json.encode(field.default).decode()}`".replace('"', "")


def _flowed(text: str) -> str:
    """Return a docstring with its paragraphs filled to the width of the page."""
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    return "\n\n".join(textwrap.fill(each, COLUMNS, break_on_hyphens=False) for each in paragraphs)


def _table(titles: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |\n" for line in lines)


def main() -> int:
    """Write the pages, or compare with those that are there."""
    stale = [name for name, text in pages().items() if not _is(HERE / name, text)]
    if "--check" in sys.argv[1:]:
        print("\n".join(f"docs/reference/{name} is stale" for name in stale))
        return int(bool(stale))
    for name in stale:
        (HERE / name).write_text(pages()[name])
    return 0


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text() == text


if __name__ == "__main__":
    sys.exit(main())
