"""A constraint on the text of an output: a JSON schema, a regular expression, choices or a grammar."""

from __future__ import annotations

import json as json_text
from typing import Any, Literal

import msgspec

from ppengine.protocol.kinds import check_kind

MOST_CHARACTERS = 131_072
"""Characters of a schema, an expression, a grammar, or all choices."""
MOST_CHOICES = 4096
MOST_DEPTH = 64
"""Objects and lists inside each other in a schema."""
MOST_PARTS = 8_192
"""Objects and lists of a schema: the core looks at each."""
MOST_WHITESPACE = 1000
"""Characters of `whitespace_pattern`."""
ANY_OBJECT = '{"type":"object"}'
GrammarKind = Literal["json", "regex", "choice", "grammar"]


class Grammar(msgspec.Struct, array_like=True, frozen=True):
    """A constraint in the form in which it is compiled. Equal ones are compiled once."""

    kind: GrammarKind
    text: str
    """Choices are a JSON list of texts."""
    whitespace: str | None = None
    """Regular expression of white space in JSON; None: up to 24 characters, empty: none."""


class StructuredOutputsParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The text that an output must be, with the names that vLLM users know. Give exactly one of the first five.

    Raises ValueError (or msgspec.ValidationError on the wire), with the name of the field.
    """

    json: str | dict[str, Any] | None = None
    """JSON schema, as a text or an object; a text afterwards."""
    regex: str | None = None
    """Regular expression of the whole text, with the syntax of Rust's `regex`: without look-around."""
    choice: list[str] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Lark or GBNF."""
    json_object: bool | None = None
    """True: any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without white space between its parts."""
    whitespace_pattern: str | None = None
    """Regular expression of white space between the parts of JSON."""
    disable_additional_properties: bool = False
    """Must be false: a schema says it itself, with `additionalProperties`."""
    structural_tag: str | None = None
    """Must be None."""

    def __post_init__(self) -> None:
        """Check kinds, sizes and combinations."""
        for field in _FIELDS:
            if field.name != "json":
                check_kind(field.name, getattr(self, field.name), field.type)
        if self.structural_tag is not None or self.disable_additional_properties:
            name = "disable_additional_properties" if self.structural_tag is None else "structural_tag"
            raise ValueError(f"{name} is not supported; use json, regex, choice, grammar or json_object")
        if self.json is not None:
            msgspec.structs.force_setattr(self, "json", _schema_text(self.json))
        given = [name for name in _FORMS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            many = f"{' and '.join(given)} are given" if given else f"none of {', '.join(_FORMS)} is given"
            raise ValueError(f"{many}; give exactly one")
        _check_sizes(self)

    @property
    def compiled_form(self) -> Grammar:
        """The grammar to compile."""
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.choice is not None:
            return Grammar("choice", json_text.dumps(self.choice, ensure_ascii=False))
        if self.grammar is not None:
            return Grammar("grammar", self.grammar)
        whitespace = "" if self.disable_any_whitespace else self.whitespace_pattern
        return Grammar("json", ANY_OBJECT if self.json is None else str(self.json), whitespace)


def json_schema_outputs(schema: str | dict[str, Any]) -> StructuredOutputsParams:
    """Return the constraint that an output is JSON of `schema`. Raises ValueError."""
    return StructuredOutputsParams(json=schema)


def _schema_text(schema: object) -> str:
    """Return a schema as a text, checked for size and depth: only the grammar process knows its keywords."""
    if not isinstance(schema, (str, dict)):
        raise ValueError(f"json is {type(schema).__name__}; it must be a JSON schema, as a text or an object")
    try:
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        if len(text) > MOST_CHARACTERS:
            raise ValueError(f"json has {len(text)} characters; at most {MOST_CHARACTERS} are taken")
        if (parts := text.count("{") + text.count("[")) > MOST_PARTS:
            raise ValueError(f"json has {parts} objects and lists; at most {MOST_PARTS} are taken")
        found = msgspec.json.decode(text)
    except RecursionError:
        raise ValueError(f"json is nested too deeply; at most {MOST_DEPTH} levels are taken") from None
    except (msgspec.MsgspecError, TypeError, UnicodeError, OverflowError) as error:
        raise ValueError(f"json is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"json is {msgspec.json.encode(found)[:40].decode(errors='replace')}; give a schema object")
    level, depth = [found], 0
    while level := [inner for outer in level for inner in _inside(outer)]:
        depth += 1
        if depth > MOST_DEPTH:
            raise ValueError(f"json has more than {MOST_DEPTH} levels; give a flatter schema, or use $ref")
    return text


def _inside(value: object) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in parts if isinstance(part, (dict, list))]


def _check_sizes(params: StructuredOutputsParams) -> None:
    for name, most in (
        ("regex", MOST_CHARACTERS), ("grammar", MOST_CHARACTERS), ("whitespace_pattern", MOST_WHITESPACE)
    ):  # fmt: skip
        text = getattr(params, name)
        if text is not None and not 1 <= len(text) <= most:
            raise ValueError(f"{name} has {len(text)} characters; it must have 1 to {most}")
    choices = params.choice
    if choices is None:
        return
    if not 1 <= len(choices) <= MOST_CHOICES or sum(map(len, choices)) > MOST_CHARACTERS:
        raise ValueError(
            f"choice has {len(choices)} texts with {sum(map(len, choices))} characters; "
            f"it must have 1 to {MOST_CHOICES} with at most {MOST_CHARACTERS}"
        )
    if not all(choices):
        raise ValueError("choice has an empty text; every choice needs at least one character")


_FIELDS = msgspec.structs.fields(StructuredOutputsParams)
_FORMS = ("json", "regex", "choice", "grammar", "json_object")
