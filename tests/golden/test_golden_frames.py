"""Frames of this protocol version and of earlier ones mean today what they meant when they were written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from ppengine.protocol import frames
from ppengine.protocol.control import ToGateway
from write_frames import FOLDER, make, meaning, read

VERSIONS = range(frames.PROTOCOL_MIN, frames.PROTOCOL + 1)


def kept(before: Any, now: Any) -> bool:
    """Return whether every field of `before` has the same value now; others may have been added."""
    if isinstance(before, dict):
        return isinstance(now, dict) and all(name in now and kept(value, now[name]) for name, value in before.items())
    if isinstance(before, list):
        # Messages that are written as lists may get fields at their end.
        return isinstance(now, list) and len(now) >= len(before) and all(map(kept, before, now))
    return bool(before == now) and type(before) is type(now)


def test_a_changed_field_is_found() -> None:
    before = {"a": 1, "b": [1, {"c": "x"}], "d": None}
    assert kept(before, {**before, "new": 2}) and kept(before, {**before, "b": [1, {"c": "x", "e": 0}, 3]})
    for changed in ({"a": 2}, {"a": 1.0}, {"b": [1]}, {"b": [1, {}]}, {"d": 0}):
        assert not kept(before, {**before, **changed}), changed
    assert not kept(before, {"a": 1, "b": before["b"]})


@pytest.mark.parametrize("version", VERSIONS)
def test_frames_of_each_version_are_read_as_before(version: int) -> None:
    messages, meanings = read(version)
    assert [one.name for one in messages] == list(meanings) and len(messages) >= 37
    for one in messages:
        assert kept(meanings[one.name], meaning(one)), one.name
        assert frames.decode_header(one.header).proto <= version


@pytest.mark.parametrize("version", VERSIONS)
def test_a_verb_of_each_version_is_written_without_a_field_that_its_engines_refuse(version: int) -> None:
    """Verbs forbid unknown fields. So a newer one is left out unless it is set."""
    for one in read(version)[0]:
        if one.name.startswith("to-gateway command "):
            now = frames.encode(frames.Codec(ToGateway).decode(one.body))
            verbs = [msgspec.msgpack.decode(body)["verb"].keys() for body in (now, one.body)]
            assert verbs[0] <= verbs[1], one.name


def test_each_version_has_the_messages_of_the_one_before() -> None:
    for version in VERSIONS[1:]:
        assert {one.name for one in read(version - 1)[0]} <= {one.name for one in read(version)[0]}


def test_the_present_version_is_written_as_it_is_kept() -> None:
    """After a change of the protocol: `python tests/golden/write_frames.py`, or first another version number."""
    messages, _ = read(frames.PROTOCOL)
    assert {one.name: one.body for one in make()} == {one.name: one.body for one in messages}


def test_no_version_is_missing_or_left_over() -> None:
    names = {path.name for path in FOLDER.glob("protocol-*")}
    assert names == {f"protocol-{version}.{kind}" for version in VERSIONS for kind in ("bin", "json")}
