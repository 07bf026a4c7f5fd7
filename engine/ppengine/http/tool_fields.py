"""Functions that a model may call, as requests have them."""

from __future__ import annotations

import contextlib
import re
from typing import Any, Literal

import msgspec

from ppengine.http.api_errors import invalid
from ppengine.http.reply.certain_calls import ArgumentsParser, CallListParser
from ppengine.http.reply.tool_parsers import Functions, ToolParser

TOOLS_MOST = 1024
"""Most functions of a request."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class Function(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call. `parameters` is the JSON schema of its arguments, which are an object."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether the arguments must fit the schema. They do if the call is certain; else the model alone decides."""


class Tool(msgspec.Struct, kw_only=True):
    """A tool that the model may use."""

    type: str
    function: Function | None = None


class NamedFunction(msgspec.Struct):
    """The function that must be called."""

    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The tool that must be used."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class CalledFunction(msgspec.Struct, kw_only=True):
    """The function of a call, and its arguments in JSON."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model has made before."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call as templates expect it: the arguments are an object if their JSON is one."""
        arguments = self.function.arguments or {}
        if isinstance(arguments, str):
            # Without an object the model is shown the text that it wrote.
            with contextlib.suppress(msgspec.MsgspecError, RecursionError, UnicodeError):
                arguments = msgspec.json.decode(arguments, type=dict[str, Any])
        made = {"type": "function", "function": {"name": self.function.name, "arguments": arguments}}
        return made if self.id is None else {"id": self.id, **made}


def functions_of(tools: list[Tool] | None, choice: ToolChoice | None) -> list[Function]:
    """Return the functions that the model may call: none, all, or the one that it must. Raises ApiError."""
    functions = []
    for number, tool in enumerate(tools or []):
        if tool.type != "function":
            text = f"tools[{number}] is of type {tool.type}; give a function: this server runs no tools"
            raise invalid(text, "tools")
        if tool.function is None:
            raise invalid(f"tools[{number}].function is missing", "tools")
        if _NAME.fullmatch(tool.function.name) is None:
            right = "1 to 128 letters, digits, '_', '.' and '-'"
            raise invalid(f"tools[{number}] has the name {tool.function.name!r:.150}; it must be {right}", "tools")
        functions.append(tool.function)
    names = [one.name for one in functions]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid(f"tools has two functions {twice}; each needs a name of its own", "tools")
    if len(names) > TOOLS_MOST:
        raise invalid(f"tools has {len(names)} functions; at most {TOOLS_MOST} are taken", "tools")
    if choice == "required" and not functions:
        raise invalid("tool_choice asks for a call, and tools has no function", "tool_choice")
    if not isinstance(choice, NamedTool):
        return [] if choice == "none" else functions
    wanted = choice.function.name
    if wanted not in names:
        raise invalid(f"tool_choice names the function {wanted[:130]}, which is not in tools", "tool_choice")
    return [one for one in functions if one.name == wanted]


def call_schema(functions: list[Function], choice: ToolChoice | None, *, parallel: bool) -> dict[str, Any] | None:
    """Return the JSON schema of an output that must be calls; None if the model is free to write anything.

    `functions` are those of `functions_of`. A named function has its arguments alone, `required` a list of calls.
    """
    if isinstance(choice, NamedTool):
        return _certain_arguments(functions[0])
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            # With an id of its own, `#/$defs/...` of a schema is looked up in it.
            "properties": {
                "name": {"const": one.name},
                "arguments": {"$id": f"urn:ppconsole:{number}"} | _certain_arguments(one),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for number, one in enumerate(functions)
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}} | ({} if parallel else {"maxItems": 1})


def certain_parser(choice: ToolChoice | None) -> type[ToolParser] | None:
    """Return the parser of an output that must be calls; None if the model is free to write anything."""
    if isinstance(choice, NamedTool):
        return ArgumentsParser
    return CallListParser if choice == "required" else None


def for_template(functions: list[Function]) -> list[dict[str, Any]] | None:
    """Return the functions as templates expect them; None without any."""
    return [{"type": "function", "function": msgspec.to_builtins(one)} for one in functions] or None


def schemas(functions: list[Function]) -> Functions:
    """Return the schema of the parameters by name."""
    return {one.name: _arguments_schema(one) for one in functions}


def _arguments_schema(function: Function) -> dict[str, Any]:
    return function.parameters or {"type": "object", "properties": {}}


def _certain_arguments(function: Function) -> dict[str, Any]:
    """Return the schema of arguments that a call must have: an object. Raises ApiError for another type."""
    schema = {"type": "object"} | _arguments_schema(function)
    if schema["type"] != "object":
        shown = f"parameters of the function {function.name} have the type {schema['type']!r:.40}"
        raise invalid(f"{shown}; arguments are an object", "tools")
    return schema
