"""The constraint of an output: from a body, or from Python, to the grammar that is compiled."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from ppengine.http.api_errors import ApiError
from ppengine.http.chat_fields import ChatRequest
from ppengine.http.request_fields import CompletionRequest, decode
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import Grammar, StructuredOutputsParams, json_schema_outputs

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = msgspec.json.encode(SCHEMA).decode()


def sampling(**fields: Any) -> SamplingParams:
    return decode(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest).sampling()


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json", '{"type":"object"}')),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
         Grammar("json", TEXT)),
        ({"structured_outputs": {"json": TEXT}}, Grammar("json", TEXT)),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, Grammar("json", TEXT, "")),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": " ?"}},
         Grammar("json", '{"type":"object"}', " ?")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("grammar", 'start: "a"')),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " "}, Grammar("json", TEXT, " ")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["é", "b"]}, Grammar("choice", '["é", "b"]')),
        ({"guided_grammar": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"')),
    ],
)  # fmt: skip
def test_each_name_makes_one_constraint(fields: dict[str, Any], grammar: Grammar) -> None:
    wanted = sampling(**fields).structured_outputs
    assert wanted is not None and wanted.compiled_form == grammar
    wire = msgspec.msgpack.encode(SamplingParams(structured_outputs=wanted))
    assert msgspec.msgpack.decode(wire, type=SamplingParams).structured_outputs == wanted


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None}])
def test_without_a_constraint_there_is_none(fields: dict[str, Any]) -> None:
    assert sampling(**fields).structured_outputs is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format", "type is structural_tag; it must be"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "needs .json_schema.: "),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format", "object"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not supported"),
        ({"structured_outputs": {"json": "{", "regex": "a"}}, "structured_outputs", "json is no JSON"),
        ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structured_outputs", "json and regex are given; give"),
        ({"structured_outputs": {"x": 1}}, "structured_outputs", "unknown field x; the fields are json, regex, "),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs", "s: regex is 5; it must be a text"),
        ({"structured_outputs": {}}, "structured_outputs", "none of json, regex, .* give exactly one"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "unknown field regexp; did you mean regex"),
        ({"guided_json": "[1]"}, "guided_json", "json is .1.; give a schema object"),
        ({"guided_json": nested(65)}, "guided_json", "more than 64 levels"),
        ({"guided_json": "[" * 5000}, "guided_json", "nested too deeply|no JSON"),
        ({"guided_json": {"const": "x" * 131_072}}, "guided_json", "at most 131072 are taken"),
        ({"guided_regex": ""}, "guided_regex", "regex has 0 characters; it must have 1 to"),
        ({"guided_choice": []}, "guided_choice", "choice has 0 texts"),
        ({"guided_choice": [""]}, "guided_choice", "choice has an empty text"),
        ({"guided_choice": ["a"], "guided_regex": "b"}, "guided_choice", "guided_regex and guided_choice are given"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "needs guided_json"),
        ({"guided_regex": "a", "bad_words": ["b"]}, "bad_words", "together they may leave no token"),
        ({"guided_regex": "a", "allowed_token_ids": [1]}, "allowed_token_ids", "together they may leave no token"),
    ],
)  # fmt: skip
def test_a_bad_constraint_names_the_field(fields: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ApiError, match=says) as caught:
        sampling(**fields)
    assert caught.value.status == 400 and caught.value.body.param == param


def test_a_chat_has_the_same_fields() -> None:
    body = {"messages": [], "response_format": {"type": "json_object"}}
    assert decode(json.dumps(body).encode(), ChatRequest).sampling().structured_outputs is not None


def test_python_gives_a_schema_as_text_or_object() -> None:
    assert json_schema_outputs(SCHEMA) == json_schema_outputs(TEXT)
    assert json_schema_outputs(nested(63)).json is not None
    with pytest.raises(ValueError, match="structured_outputs is dict; it must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"json": SCHEMA})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="json is list; it must be a JSON schema"):
        StructuredOutputsParams(json=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="regex is 5; it must be a text"):
        StructuredOutputsParams(regex=5)  # type: ignore[arg-type]
