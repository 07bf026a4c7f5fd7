"""The verb table: every message has its row, and every argument of a row fits the field of its message."""

from __future__ import annotations

import subprocess
import sys
import typing

import msgspec
import pytest
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verb_table import ROWS
from ppengine.protocol.verbs import (
    MANY_MOST,
    MESSAGES,
    Abort,
    Many,
    Preempt,
    Priority,
    Submit,
    SwapOut,
    Verb,
    build,
    label_of,
    name_of,
)


def test_every_verb_has_a_row_and_every_row_a_verb():
    assert {message.__struct_config__.tag for message in typing.get_args(Verb)} == set(ROWS) == set(MESSAGES)


def field_of(name, argument):
    """Return the message's field that an argument fills."""
    outer, _, inner = argument.field.rpartition(".")
    kind = MESSAGES[name]
    if outer:
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == outer)
    return next(field for field in msgspec.structs.fields(kind) if field.name == inner)


@pytest.mark.parametrize(("name", "argument"), [(row.name, each) for row in ROWS.values() for each in row.arguments])
def test_an_argument_fits_its_field(name, argument):
    field = field_of(name, argument)
    if argument.choices:
        kinds = (field.type, *typing.get_args(field.type))
        (literal,) = (kind for kind in kinds if typing.get_origin(kind) is typing.Literal)
        assert argument.choices == typing.get_args(literal)
    if argument.default is not None:
        assert argument.default == field.default
    if argument.kind == "flag":
        assert field.default is argument.negates
    if not argument.option:
        assert field.required or argument.optional or field.type == (str | None) or field.default == "on"


def test_every_message_can_be_written_by_its_row():
    unwritten = {("submit", "prompt_token_ids"), ("submit", "request"), ("submit", "abort_on_detach")}
    unwritten |= {("submit", "sampling"), ("many", "verbs"), ("many", "revisions")}
    unwritten |= {("submit", "cache_salt")}  # a secret: command lines are seen by other users, and kept by shells
    for name, message in MESSAGES.items():
        written = {argument.field for argument in ROWS[name].arguments}
        fields = {(name, field.name) for field in msgspec.structs.fields(message) if field.name not in written}
        assert fields <= unwritten, name


def test_values_that_are_left_out_are_the_messages_defaults():
    assert build("swap-out", {"request": "r", "hold": False}) == SwapOut(request="r")
    assert build("swap-out", {"request": "r", "hold": True}) == SwapOut(request="r", hold=False)
    assert build("preempt", {"request": "r", "mode": None}) == Preempt(request="r")
    made = build("submit", {"prompt": "x", "seed": 3, "stop": ("a",), "stop_token_ids": ()})
    assert made == Submit(prompt="x", sampling=SamplingParams(seed=3, stop=["a"]))
    with pytest.raises(ValueError, match="priority is 2147483648; it must be -2147483647 to 2147483647"):
        build("priority", {"request": "r", "priority": 2**31})
    with pytest.raises(ValueError, match="max_tokens is 0"):
        build("submit", {"prompt": "x", "max_tokens": 0})


def test_many_verbs_are_a_thousand_of_one_kind_on_requests_that_differ():
    assert Many(verbs=[Abort(request=f"r{number}") for number in range(MANY_MOST)], revisions=[1] * MANY_MOST)
    for verbs, revisions, text in (
        ([], [], "0 requests in one command; it must be 1 to 1000"),
        ([Abort(request=f"r{number}") for number in range(1001)], [], "1001 requests in one command"),
        ([Abort(request="a"), SwapOut(request="b")], [], "the verbs are abort, swap-out; they must be of one kind"),
        (
            [SwapOut(request="a"), SwapOut(request="b", hold=False)],
            [],
            "not the same swap-out",
        ),
        ([Abort(request="a"), Abort(request="b")], [1], "1 revisions for 2 requests"),
        ([Abort(request="a"), Abort(request="b"), Abort(request="a")], [], "request a is there twice"),
    ):
        with pytest.raises(ValueError, match=text):
            Many(verbs=verbs, revisions=revisions)
    raw = msgspec.msgpack.encode({"type": "many", "verbs": [{"type": "abort", "request": "a"}] * 2})
    with pytest.raises(msgspec.ValidationError, match="request a is there twice"):
        msgspec.msgpack.decode(raw, type=Verb)
    many = Many(verbs=[Priority(request="a", priority=2)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(many), type=Verb) == many
    assert (name_of(many), label_of(many), label_of(Abort(request="a"))) == ("many", "priority", "abort")


def test_the_table_costs_the_standard_library_alone():
    code = "import sys, ppengine.protocol.verb_table; sys.exit('msgspec' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
