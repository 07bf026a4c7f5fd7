"""Verbs on backends: their fields, and that no password of a place is shown or written."""

from __future__ import annotations

import re

import msgspec
import pytest
from ppengine.gateway.audit import entry_of
from ppengine.gateway.kept_commands import brief
from ppengine.protocol.backend_fields import without_secrets
from ppengine.protocol.control import Command
from ppengine.protocol.store_verbs import StoreAdd, StorePause
from ppengine.protocol.verbs import build, label_of

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"redis://:{SECRET}@host:6379/0", "redis://host:6379/0"),
        (f"redis://ann:{SECRET}@host:6379/0", "redis://ann@host:6379/0"),
        (f"redis://ann:{SECRET}/x@y:z@host/0", "redis://ann@host/0"),
        (f"s3://bucket/kv?region=eu-1&secret_access_key={SECRET}", "s3://bucket/kv?region=eu-1"),
        (f"s3://bucket/kv?aws_session_token={SECRET}", "s3://bucket/kv"),
        (f"redis://ann:{SECRET}?x@host/0", "redis://..."),
        (f"redis://:x#{SECRET}@host/0", "redis://..."),
        (f"s3://bucket/kv?endpoint=http://ann:{SECRET}@host", "s3://..."),
        ("s3://bucket/kv@2", "s3://bucket/kv@2"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("/data/a:b@c?key=1", "/data/a:b@c?key=1"),
        ("", ""),
    ],
)
def test_a_place_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert without_secrets(url) == shown


def test_the_audit_log_and_events_have_no_password() -> None:
    verb = StoreAdd(backend="cache0", kind="valkey", url=f"redis://ann:{SECRET}@host/0")
    command = Command(id="c", epoch="e", verb=verb, by="ann")
    entry = entry_of(command, "ppconsole", "owner")
    assert entry.args["url"] == "redis://ann@host/0" and entry.args["quota_gib"] == 16.0
    assert brief(command) == "store add cache0 valkey redis://ann@host/0"
    assert brief(Command(id="c", epoch="e", verb=StorePause(backend="cache0"), by="ann")) == "store pause cache0"
    assert label_of(verb) == "store add"
    for text in (repr(verb), repr(command), msgspec.json.encode(entry).decode(), brief(command)):
        assert SECRET not in text
    assert verb.url.count(SECRET) == 1, "the core gets all of it"


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"backend": "Nvme", "kind": "files"}, "backend is 'Nvme'; it must be 1 to 32 small letters"),
        ({"backend": "c", "kind": f"redis://:{SECRET}@host"}, "kind is 'redis://host'; it must be 1 to 32 small"),
        ({"backend": "c", "kind": "files", "url": "/a\nb"}, "url has 4 characters; it must be 0 to 4096 printable"),
        ({"backend": "c", "kind": "files", "quota_gib": 0.0}, "quota_gib is 0.0; it must be above 0"),
        ({"backend": "c", "kind": "files", "timeout_ms": 0}, "timeout_ms is 0; it must be 1 to 600000"),
        ({"backend": "c", "kind": "files", "write": "never"}, "write is 'never'"),
    ],
)
def test_a_wrong_field_is_named_without_a_password(values: dict[str, object], wrong: str) -> None:
    with pytest.raises(ValueError, match=re.escape(wrong)) as error:
        build("store-add", values)
    assert SECRET not in str(error.value)
