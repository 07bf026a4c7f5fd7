"""The filter language: parsing never crashes, errors say what would be right, a filter is a plain predicate."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ppconsole.model.filters import FilterError, quoted
from ppconsole.model.reduce import set_filter
from ppconsole.model.request_fields import FIELDS, request_filter
from ppconsole.model.rows import visible_requests
from ppconsole.model.state import ConsoleState
from ppengine.protocol.snapshot import EngineInfo, RequestInfo, Snapshot, Why

TEXTS = {
    "id": lambda request: request.id, "owner": lambda request: request.owner, "stat": lambda request: request.state,
}  # fmt: skip
FIGURES = {
    "age": lambda request: request.age_s, "in": lambda request: request.prompt_tokens,
    "out": lambda request: request.output_tokens, "blk": lambda request: request.blocks,
    "swp": lambda request: request.swap_blocks, "hit": lambda request: request.cached_tokens,
    "pre": lambda request: request.preemptions, "pri": lambda request: request.priority,
}  # fmt: skip
UNITS = {"age": {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}}
COUNTS = {"": 1, "k": 1000, "M": 10**6}
SIGNS = {
    ":": operator.eq, "=": operator.eq, "!=": operator.ne, ">": operator.gt, ">=": operator.ge, "<": operator.lt,
    "<=": operator.le,
}  # fmt: skip


def request(**changes):
    fields = {
        "id": "r-19aa", "owner": "alice", "state": "waiting", "age_s": 400.0, "prompt_tokens": 1000,
        "output_tokens": 2, "blocks": 41, "swap_blocks": 0,
    }  # fmt: skip
    return RequestInfo(**(fields | changes))


def passes(text, **changes):
    return request_filter(text).matches(request(**changes))


def test_the_examples_of_the_handbook():
    for text in (
        "stat:wait owner:alice", "id:r-19", "blk>40", "age>5m", "in>=1000", "in>=1k", "out<3", "alice", "ALICE", "19a",
        "pri<1 pri>-1", "!bob", "!owner:bob", "stat=waiting", "stat!=running", "owner=alice", "age<1h", "age>=400s",
        "", "  ", "why:need", '"alice"', "STAT:WAIT", "blk:41", "in=1000", "in!=999", "done>=0", "fill>=0",
    ):  # fmt: skip
        assert passes(text, why=Why(code="blocks", text="I need 4"), computed_tokens=501), text
    for text in (
        "stat:run", "stat=wait", "owner=alic", "blk>41", "age>7m", "out>2", "!alice", "bob", "wait", "pri<0", "why:no",
        "alice bob", "!stat:wait", "done>60%", "id:19",
    ):  # fmt: skip
        assert not passes(text, computed_tokens=501), text


def test_quotes_keep_spaces_and_signs():
    assert passes('owner:"a b"', owner="a b c") and not passes('owner:"a b"', owner="ab")
    assert passes('"a:b"', owner="xa:by") and passes('"x y"', owner="x y") and passes('!"!a"', owner="a")
    assert passes('owner=""', owner="") and not passes('owner=""')
    assert passes("owner=" + quoted('a"b'), owner='a"b')


def test_an_unknown_figure_fulfils_no_comparison():
    nothing = {"prompt_tokens": 0, "output_tokens": 0}
    assert not any(passes(f"done{sign}5", **nothing) for sign in SIGNS)
    assert passes("!done>5", **nothing)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ownr:bob", "ownr:bob: no field 'ownr'; did you mean owner? the fields are id owner state age in out blk swp"),
        ("zzz=1", "zzz=1: no field 'zzz'; the fields are id owner"),
        ("blk>", "blk> needs a value: blk>40"),
        ("owner:", "owner: needs a value: owner:value or owner=value"),
        ("age>x", "age>x: 'x' is no number with one of the units ms s m h d"),
        ("age>5y", "'5y' is no number"),
        ("blk>nan", "'nan' is no number with one of the units k m g"),
        ("owner>3", "owner is a text and has no >: owner:value or owner=value"),
        ("!", "! negates the word behind it"),
        ("!!", "! negates the word behind it"),
        (":x", ":x lacks its field; the fields are id"),
        ('owner:"a b', 'the quotes in owner:"a b are open'),
    ],
)
def test_a_wrong_filter_says_what_would_be_right(text, says):
    with pytest.raises(FilterError) as error:
        request_filter(f"alice {text}")
    assert says in str(error.value) and "\n" not in str(error.value)


@given(st.text(alphabet=st.sampled_from('abkl id:owner"!<>=:5m% \t\n\0é'), max_size=30) | st.text(max_size=40))
@example('""')
@example('!""')
@example('""""')
@settings(max_examples=400, deadline=None)
def test_parsing_never_crashes(text):
    try:
        found = request_filter(text)
    except FilterError as error:
        assert str(error)
    else:
        assert found.matches(request()) in (True, False)


REQUESTS = st.builds(
    request, id=st.text(max_size=6), owner=st.text(max_size=6), state=st.sampled_from(["waiting", "running", "held"]),
    age_s=st.integers(0, 90_000).map(float), prompt_tokens=st.integers(0, 3000), output_tokens=st.integers(0, 9),
    blocks=st.integers(0, 60), priority=st.integers(-5, 5),
)  # fmt: skip
PLAIN = st.tuples(st.just("plain"), st.text(max_size=4))
TEXT = st.tuples(st.just("text"), st.sampled_from(sorted(TEXTS)), st.sampled_from([":", "=", "!="]),
                 st.text(max_size=4) | st.sampled_from(["wait", "held", "run"]))  # fmt: skip
FIGURE = st.sampled_from(sorted(FIGURES)).flatmap(
    lambda name: st.tuples(
        st.just("figure"), st.just(name), st.sampled_from(sorted(SIGNS)), st.integers(-5, 3000),
        st.sampled_from(sorted(UNITS.get(name, COUNTS))),
    )
)  # fmt: skip
TERMS = st.lists(st.tuples(st.booleans(), PLAIN | TEXT | FIGURE), max_size=4)


def written(negated, term):
    match term:
        case "plain", value:
            body = quoted(value)
        case "text", name, sign, value:
            body = f"{name}{sign}{quoted(value)}"
        case _, name, sign, value, unit:
            body = f"{name}{sign}{value}{unit}"
    return "!" * negated + body


def holds(term, row):
    match term:
        case "plain", value:
            return value.casefold() in row.id.casefold() or value.casefold() in row.owner.casefold()
        case "text", name, sign, value:
            one, two = TEXTS[name](row).casefold(), value.casefold()
            return one.startswith(two) if sign == ":" else SIGNS[sign](one, two)
        case _, name, sign, value, unit:
            return SIGNS[sign](FIGURES[name](row), value * UNITS.get(name, COUNTS)[unit])


@given(TERMS, st.lists(REQUESTS, max_size=5))
@settings(max_examples=300, deadline=None)
def test_a_filter_is_the_predicate_that_it_reads_like(terms, rows):
    found = request_filter(" ".join(written(*term) for term in terms if term[1] != ("plain", "")))
    for row in rows:
        wanted = all(holds(term, row) != negated for negated, term in terms if term != ("plain", ""))
        assert found.matches(row) == wanted


def test_every_field_has_a_value_of_every_request_and_a_help():
    for field in FIELDS.values():
        assert field.help and field.read(request()) is not ...
    assert set(TEXTS) | set(FIGURES) < set(FIELDS)


def test_a_wrong_filter_keeps_the_last_good_one():
    engine = EngineInfo(
        id="e", name="e", epoch="1", state="serving", model="m", pipeline_parallel_size=1, tensor_parallel_size=1,
        executor="local", memory_utilization=0.5, memory_revision=0, uptime_s=1.0, step=1,
    )  # fmt: skip
    state = ConsoleState(snapshot=Snapshot(engine=engine, requests=[request(id="a", blocks=1), request(id="b")]))
    state = set_filter(state, "blk>40")
    assert [row.id for row in visible_requests(state)] == ["b"]
    typing = set_filter(state, "blk>40 out<")
    assert (typing.filter, typing.filter_error) == ("blk>40 out<", "out< needs a value: out>40")
    assert [row.id for row in visible_requests(typing)] == ["b"]
    assert set_filter(typing, "").filter_error == "" and len(visible_requests(set_filter(typing, ""))) == 2
    assert replace(typing, filter="x").wanted.text == "blk>40"
