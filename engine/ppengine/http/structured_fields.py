"""Fields of a body that constrain the text of an answer: OpenAI's `response_format`, and vLLM's names."""

from __future__ import annotations

from typing import Any

import msgspec

from ppengine.http.api_errors import invalid
from ppengine.http.body import Body
from ppengine.http.field_errors import field_error
from ppengine.protocol.structured_outputs import StructuredOutputsParams, json_schema_outputs

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A schema with its name. `strict` changes nothing: every schema is followed."""

    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """Form of an answer, as OpenAI has it."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredFields(Body, kw_only=True):
    """The fields, for the bodies that have them."""

    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def constraint_field(self) -> str | None:
        """The field that constrains the answer; None: there is none. Raises ApiError for more than one."""
        plain = self.response_format is None or self.response_format.type == "text"
        names = [] if plain else ["response_format"]
        names += [name for name in ("structured_outputs", *_GUIDED) if getattr(self, name) is not None]
        if len(names) > 1:
            raise invalid(f"{' and '.join(names)} are given; one of them constrains the answer", names[1])
        if self.guided_whitespace_pattern is not None and names != ["guided_json"]:
            raise invalid("guided_whitespace_pattern needs guided_json", "guided_whitespace_pattern")
        return names[0] if names else None

    def constraint(self) -> StructuredOutputsParams | None:
        """Return the constraint of the answer. Raises ApiError, which names the field."""
        name = self.constraint_field
        if name is None:
            return None
        try:
            if name == "response_format":
                assert self.response_format is not None
                return _of_format(self.response_format)
            if name == "structured_outputs":
                return _of_fields(self.structured_outputs or {})
            fields = {_GUIDED[name]: getattr(self, name), "whitespace_pattern": self.guided_whitespace_pattern}
            return StructuredOutputsParams(**fields)
        except (ValueError, RecursionError) as error:
            raise invalid(f"{name}: {error}", name) from None


def _of_fields(given: dict[str, Any]) -> StructuredOutputsParams:
    try:
        return msgspec.convert(given, StructuredOutputsParams)
    except msgspec.ValidationError as error:
        raise ValueError(field_error(error, given, StructuredOutputsParams).body.message) from None


def _of_format(wanted: ResponseFormat) -> StructuredOutputsParams:
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.type != "json_schema":
        raise ValueError(f"type is {wanted.type[:40]}; it must be text, json_object or json_schema")
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise ValueError('type json_schema needs "json_schema": {"name": ..., "schema": {...}}')
    return json_schema_outputs(wanted.json_schema.schema)
