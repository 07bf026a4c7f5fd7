"""Reasoning and tool calls in text that grows: any pieces of it give the same events, and no character is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.http.reply.growing_parser import GrowingParser
from ppengine.http.reply.reasoning_splitter import TAGS, ReasoningSplitter, begins_inside
from ppengine.http.reply.reply_events import Event, joined, settled
from ppengine.http.reply.reply_form import PARSERS, ReplyForm, form_of
from ppengine.http.reply.reply_reader import ReplyFactory

FUNCTIONS = {
    "get": {},
    "get_weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}}},
}
PARIS = '{"city": "Paris \\"\\u00e9\\" {[", "days": [1, -2.5e3, true, null, {}]}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
GLM45 = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris <b>\"é\"\n</b></arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value><arg_key>any</arg_key><arg_value>no JSON</arg_value></tool_call>"
)  # fmt: skip
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<b>\n\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
LIST = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}}}, {{"arguments": {{}}, "name": "get"}}]'
GET = ("get", '{"a": 1}')
WEATHER = ("get_weather", PARIS)


def events_of(parser: GrowingParser, pieces: list[str]) -> list[Event]:
    return joined([event for piece in pieces for event in parser.push(piece)] + parser.end())


def calls_of(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    """Return the content and the complete calls of a whole reply."""
    content, calls = "", list[tuple[str, str]]()
    for event in joined(settled(events)):
        if event.kind == "text":
            content += event.text
        elif event.kind == "call":
            calls.append((event.text, ""))
        elif event.kind == "arguments":
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return content, calls


GOOD = [
    ("hermes", HERMES, "", [WEATHER]),
    ("hermes", f"I look.\n{HERMES}\n{HERMES}\n", "I look.", [WEATHER, WEATHER]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": 7, "name": "get"}</tool_call> Done', " Done", [GET]),
    ("hermes", '<tool_call>{"name": "get"}', "", [("get", "{}")]),
    ("hermes", "a < b and <tool_ca", "a < b and <tool_ca", []),
    ("llama3", LLAMA, "", [WEATHER]),
    ("llama3", f"\n<|python_tag|>{LLAMA}; {LLAMA}", "", [WEATHER, WEATHER]),
    ("llama3", f"Well, {LLAMA}", f"Well, {LLAMA}", []),
    ("mistral", LIST, "", [WEATHER, ("get", "{}")]),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]get[CALL_ID]x1[ARGS]{{}}", "", [WEATHER, ("get", "{}")]),
    ("glm4", f"get_weather\n{PARIS}\nget\n{{}}", "", [WEATHER, ("get", "{}")]),
    ("glm4", "get_weather is a function", "get_weather is a function", []),
    ("glm45", GLM45, "", [("get_weather", '{"city": "Paris <b>\\"é\\"\\n</b>", "days": 3, "any": "no JSON"}')]),
    ("glm45", "<tool_call>get\n</tool_call>\nThere.", "\nThere.", [("get", "{}")]),
    ("qwen3_coder", CODER, "", [("get_weather", '{"city": "Paris\\n<b>\\n", "days": 3}')]),
    ("qwen3_coder", "I look.\n<tool_call><function=get></function>", "I look.", [("get", "{}")]),
]  # fmt: skip
BAD = [
    ("hermes", "<tool_call>{'name': 'get'}</tool_call>"),
    ("hermes", '<tool_call>{"name": "delete_all", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 1'),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 01}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a": 1}, "name": "get"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a": ' + "[" * 100),
    ("hermes", '<tool_call>{"name": "get", "arguments": {"a": ' + "1" * 100 + "}}"),
    ("llama3", '{"name": "Ann", "parameters": {}}'),
    ("mistral", "[TOOL_CALLS]nothing{}"),
    ("glm4", "get_weather\n[]"),
    ("qwen3_coder", "<tool_call><function=get>\n<parameter=a>1</function></tool_call>"),
    ("glm45", "<tool_call>get<arg_key>a</arg_key><arg_value>x"),
    ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>x</tool_call>"),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), GOOD)
def test_calls_are_found(name: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found = calls_of(events_of(PARSERS[name](FUNCTIONS), [text]))
    assert found == (content, calls)
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in found[1])


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_malformed_call_comes_back_as_content(name: str, text: str) -> None:
    assert calls_of(events_of(PARSERS[name](FUNCTIONS), [text])) == (text, [])


@pytest.mark.parametrize(("name", "text"), BAD)
def test_any_pieces_of_a_malformed_call_give_the_same_events(name: str, text: str) -> None:
    """Arguments up to the first wrong character are given out, also if all came with it."""
    whole, single = (events_of(PARSERS[name](FUNCTIONS), pieces) for pieces in ([text], list(text)))
    assert whole == single


def test_a_good_call_behind_a_malformed_one_is_found() -> None:
    content, calls = calls_of(events_of(PARSERS["hermes"](FUNCTIONS), [f'<tool_call>{{"name": {HERMES}']))
    assert (content, calls) == ('<tool_call>{"name": ', [WEATHER])


@pytest.mark.parametrize("name", PARSERS)
def test_arguments_are_given_out_as_they_come(name: str) -> None:
    text = next(text for one, text, _, calls in GOOD if one == name and calls)
    parser = PARSERS[name](FUNCTIONS)
    events = [parser.push(char) for char in text]
    assert sum(any(event.kind == "arguments" for event in some) for some in events) > 10
    shown = "".join(event.text for some in events for event in some if event.kind == "text")
    assert not shown.strip(), "no character of a call is content"


MAKERS: dict[str, Callable[[], GrowingParser]] = {
    **{name: lambda kind=kind: kind(FUNCTIONS) for name, kind in PARSERS.items()},  # type: ignore[misc]
    "outside": lambda: ReasoningSplitter(TAGS["think"], inside=False),
    "inside": lambda: ReasoningSplitter(TAGS["think"], inside=True),
    "brackets": lambda: ReasoningSplitter(TAGS["mistral"], inside=False),
}
WORDS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "get", "get_weather", "city", '{"name": "get", ', '"arguments": ', '"parameters": ', "{}", "}",
    "]", "[", ";", ",", " ", "\n", "[ARGS]", "[CALL_ID]", '"', "\\", "\\u12", "1e", "<think>", "</think>", "x", "é",
    "<", "{", "[THINK]", "[/THINK]", HERMES, GLM45, LLAMA, LIST, CODER,
    "<function=", ">", "<parameter=", "</parameter>", "</function>",
]  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=150, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=12), cuts=st.lists(st.integers(0, 400), max_size=30))
def test_any_pieces_give_the_same_events_and_no_character_is_lost(name: str, words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    places = [0, *sorted({cut for cut in cuts if cut < len(text)}), len(text)]
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    whole, cut, single = (events_of(MAKERS[name](), some) for some in ([text], pieces, list(text)))
    assert whole == cut == single
    assert "".join(event.source for event in whole) == text
    assert "".join(event.source for event in settled(whole)) == text


def test_reasoning_is_split_from_the_reply() -> None:
    def split(text: str, name: str = "think", *, inside: bool = False) -> list[tuple[str, str]]:
        return [event[:2] for event in events_of(ReasoningSplitter(TAGS[name], inside=inside), [text])]

    assert split("<think>\nWell.\n</think>\n\nYes.") == [("reasoning", "Well."), ("text", "Yes.")]
    assert split("Well.</think>Yes.", inside=True) == [("reasoning", "Well."), ("text", "Yes.")]
    assert split("No <think>\n") == [("text", "No <think>\n")]
    assert split("<think>Well, ") == [("reasoning", "Well, ")]
    assert split("[THINK]Well: <think>[/THINK]Yes.", "mistral") == [("reasoning", "Well: <think>"), ("text", "Yes.")]
    assert split("[THINK]Well.[/THINK]") == [("text", "[THINK]Well.[/THINK]")]


def test_a_template_says_how_its_model_writes() -> None:
    for template, name in (
        ("<tool_call>{{ tool_call | tojson }}</tool_call>", "hermes"), ("<tool_call><arg_key>", "glm45"),
        ("<tool_call>\n<function=", "qwen3_coder"),
        ("Environment: ipython", "llama3"), ("[TOOL_CALLS]", "mistral"), ("<|observation|>", "glm4"),
    ):  # fmt: skip
        assert form_of(template, "auto", "auto") == ReplyForm(tool_parser=PARSERS[name])
    assert form_of("{% if enable_thinking %}<think>", "auto", "auto") == ReplyForm(reasoning=TAGS["think"])
    both = form_of("{{ '[THINK]' }}{{ '[TOOL_CALLS]' }}", "auto", "auto")
    assert both == ReplyForm(tool_parser=PARSERS["mistral"], reasoning=TAGS["mistral"])
    assert both.special == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    assert form_of(None, "auto", "auto") == ReplyForm() == form_of("<tool_call><think>", "none", "none")
    assert form_of(None, "mistral", "think").special == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>")


def test_a_reader_joins_reasoning_and_one_call() -> None:
    form = form_of(None, "hermes", "think")
    made = ReplyFactory(
        form=form, inside=begins_inside("<|assistant|><think>\n", "", TAGS["think"]), functions=FUNCTIONS,
        parallel=False,
    )  # fmt: skip
    reader = made.reader()
    assert not made.plain
    text = f"Look: {HERMES}</think>\n{HERMES}\n{HERMES}"
    events = joined([event for char in text for event in reader.push(char, 1)] + reader.push("", last=True))
    assert events[0][:2] == ("reasoning", f"Look: {HERMES}")
    assert calls_of(events) == ("", [WEATHER]) and reader.calls == 1
    assert len(f"Look: {HERMES}") <= reader.reasoning_tokens <= len(f"Look: {HERMES}</think>\n")
    assert (reader.finish_reason("stop"), reader.finish_reason("length")) == ("tool_calls", "length")
    assert ReplyFactory(form=form_of(None, "hermes", "none"), inside=False, functions={}, parallel=True).plain


@pytest.mark.parametrize(("name", "form"), [("mistral", r"[A-Za-z0-9]{9}"), ("hermes", r"call_[A-Za-z0-9]{24}")])
def test_calls_have_ids_that_templates_take(name: str, form: str) -> None:
    made = ReplyFactory(form=form_of(None, name, "none"), inside=False, functions=FUNCTIONS, parallel=True)
    ids = {made.call_id() for _ in range(50)}
    assert len(ids) == 50 and all(re.fullmatch(form, one) for one in ids)
