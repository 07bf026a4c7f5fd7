"""Read the YAML of a profile: plain values, sections and lists alone, with limits on size, depth and number.

Aliases, tags, dates and a key that is given twice are errors: YAML would expand, guess or drop them.
"""

from __future__ import annotations

from typing import Any

import yaml

from ppengine.protocol.error_text import one_line, shown

BYTES_MOST = 16 * 1024
"""Bytes of a file: ten times those of a long profile."""
DEPTH_MOST = 8
NODES_MOST = 1000
"""Values, keys and sections together."""
TEXT_MOST = 4096
"""Characters of one value."""
_INTEGERS = range(-(2**63), 2**63)


class YamlError(ValueError):
    """A text that is no YAML of ours. One line with the place and what would be right."""


def read_yaml(data: bytes) -> Any:
    """Return the value in UTF-8 `data`. Raises YamlError."""
    if len(data) > BYTES_MOST:
        raise YamlError(f"it has more than {BYTES_MOST} bytes, the most that is read")
    try:
        return yaml.load(data.decode("utf-8"), _Loader)  # noqa: S506 - a SafeLoader with less
    except UnicodeDecodeError as error:
        raise YamlError(f"byte {data[error.start]:#04x} at offset {error.start} is not UTF-8") from None
    except yaml.MarkedYAMLError as error:
        raise YamlError(f"{_place(error.problem_mark)}{error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise YamlError(one_line(str(error))) from None


class _Loader(yaml.SafeLoader):
    """A SafeLoader that refuses a node before anything is made of it."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose one node within the limits. Raises YamlError."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        place = _place(event.start_mark)
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise YamlError(f"{place}anchors and aliases are not read; write the value out")
        if event.tag is not None and event.tag != "!":
            raise YamlError(f"{place}tag {shown(event.tag)} is not read; write a plain value")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > TEXT_MOST:
            raise YamlError(f"{place}a value of {len(event.value)} characters; at most {TEXT_MOST} are read")
        self._nodes += 1
        self._depth += 1
        if self._nodes > NODES_MOST:
            raise YamlError(f"{place}more than {NODES_MOST} values and keys")
        if self._depth > DEPTH_MOST:
            raise YamlError(f"{place}more than {DEPTH_MOST} levels of nesting")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a section. Raises YamlError for a key that is no text, or is given twice."""
        made: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            place, key = _place(key_node.start_mark), self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise YamlError(f"{place}key {shown(key)} is no text")
            if key in made:
                raise YamlError(f"{place}key {shown(key)} is given twice; leave one of them out")
            made[key] = self.construct_object(value_node, deep=deep)
        return made

    def construct_yaml_map(self, node: yaml.MappingNode) -> Any:
        """Return a section at once: without anchors there are no cycles that would need two passes."""
        return self.construct_mapping(node, deep=True)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return a whole number of 64 bits. Raises YamlError for a larger one."""
        try:
            value: int = super().construct_yaml_int(node)
        except ValueError:  # Python reads no decimal number above 4,300 digits.
            value = _INTEGERS.stop
        if value not in _INTEGERS:
            raise YamlError(f"{_place(node.start_mark)}{shown(node.value, 40)} is no whole number of 64 bits")
        return value


def _place(mark: yaml.Mark | None) -> str:
    return "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "


def _limit() -> None:
    """Leave the constructors of plain values alone: a date is a text, `<<` a key, any other tag an error."""
    for tag, construct in (("map", _Loader.construct_yaml_map), ("int", _Loader.construct_yaml_int)):
        _Loader.add_constructor(f"tag:yaml.org,2002:{tag}", construct)
    unread = ("timestamp", "merge", "value")
    _Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in unread]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_limit()
