"""A line that is refused is given back: its text, the cursor at its end, and the reason above it."""

from __future__ import annotations

import asyncio

import pytest
from ppconsole.link.source import LinkLost
from ppconsole.screens.confirm import Confirm
from ppconsole.screens.streams_screen import StreamsScreen
from ppconsole.widgets.prompt import PromptLine
from ppengine.protocol.control import Conflict, Outcome, Refused
from ppengine.protocol.verbs import Abort, Submit
from test_tui_console import console
from textual import events

REFUSED = Refused(id="1", code="INVALID", text="memory utilization is 7; it must be above 0 and at most 1")
"""An answer to `set-memory 7`."""
TOO_LONG = Refused(id="1", code="INVALID", text="the prompt has 2048 tokens, a sequence 1024 at most")


def line(rig) -> PromptLine:
    """Return the line at the bottom of the present screen."""
    return rig.app.screen.query_one(PromptLine)


def shown(rig) -> list[str]:
    """Return the lowest rows of the terminal, from the messages on."""
    rows = [row.rstrip() for row in rig.screen().splitlines()]
    return rows[-2 - len(rig.board("note").splitlines()) :]


async def typed(rig, text: str) -> None:
    """Enter a command."""
    await rig.pilot.press("colon", *text, "enter")


async def planned(rig, text: str) -> Confirm:
    """Enter a command and return its dialog with the answer."""
    await typed(rig, text)
    await rig.until(lambda: isinstance(rig.app.screen, Confirm))
    await rig.until(lambda: "asking the engine" not in rig.board("dialog-body") != "")
    assert isinstance(rig.app.screen, Confirm)
    return rig.app.screen


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("strems", "did you mean streams?"),
        ("priority r-0001 x", "'x' is no whole number; it is written:"),
        ("set-memory", "Missing argument"),
        ("set max-tokens many", "'many' is no whole number"),
        ("abort --filter ownr:x", "no field 'ownr'; did you mean owner?"),
        ("abort 'r-0001", "No closing quotation"),
        ("mark ownr:x", "no field 'ownr'; did you mean owner?"),
        ("sort tfft", "did you mean ttft?"),
        ("help I>Q", "'I>Q' is neither a command"),
        ("show", "show: it needs a request"),
        ("show r-000", "show: r-000 is ambiguous"),
    ],
)
async def test_a_wrong_command_stays_in_the_line_until_it_is_right(text, says):
    async with console() as rig:
        await typed(rig, text)
        assert line(rig).is_open and line(rig).mode == "command" and says in line(rig).error
        assert line(rig).input.value == text and line(rig).input.cursor_position == len(text)
        *error, field, keys = shown(rig)
        assert says in " ".join(row[2:] for row in error) and error[0].startswith("! ")
        assert field.startswith(f"COMMAND : {text}") and keys.startswith("⏎ run")
        assert not rig.app.model.lines["command"][1:] and list(rig.app.notes) == []
        await rig.pilot.press("x", "backspace", "left")
        assert says in line(rig).error, "while the text is corrected"
        await rig.pilot.press("ctrl+u", "ctrl+k")
        assert shown(rig)[0].startswith("COMMAND : a verb"), "the error goes with the text"
        await rig.pilot.press("up")
        assert line(rig).input.value == text, "which is in the history"
        await rig.pilot.press("escape")
        assert not line(rig).is_open and rig.source.commands == []


@pytest.mark.parametrize("keys", [(), ("H",)], ids=["main", "finished"])
async def test_a_wrong_filter_stays_in_the_line_until_it_is_right(keys):
    async with console() as rig:
        await rig.pilot.press(*keys, "slash", *"ownr:alice")
        says = "no field 'ownr'; did you mean owner?"
        assert says in shown(rig)[-1], "while it is typed, in place of the keys"
        await rig.pilot.press("enter")
        assert line(rig).is_open and line(rig).mode == "filter" and line(rig).input.value == "ownr:alice"
        *error, field, foot = shown(rig)
        assert says in " ".join(row[2:] for row in error) and field.startswith("FILTER / ownr:alice")
        assert says not in foot and list(rig.app.notes) == []
        await rig.pilot.press(*["left"] * 7, "e")
        assert line(rig).input.value == "owner:alice" and line(rig).error == ""
        await rig.pilot.press("enter")
        assert not line(rig).is_open
        await rig.pilot.press("slash", "escape", "slash", *"ownr:x", "enter", "escape")
        assert not line(rig).is_open and says not in rig.screen()


async def test_a_correction_runs():
    async with console() as rig:
        await typed(rig, "set max-tokens many")
        await rig.pilot.press(*["backspace"] * 4, *"12", "enter")
        assert not line(rig).is_open and line(rig).error == ""
        assert rig.app.settings.prompt.summary() == "12 tok · T 0.8"


async def test_esc_closes_a_line_that_was_refused_and_its_error_goes():
    async with console() as rig:
        await typed(rig, "strems")
        await rig.pilot.press("escape", "colon")
        assert line(rig).input.value == line(rig).error == rig.board("note") == ""


@pytest.mark.parametrize("size", [(80, 24), (60, 16), (120, 36)])
async def test_the_error_is_the_lowest_message_and_has_room(size):
    async with console(size=size) as rig:
        rig.app.report("an older message of one line", bad=False)
        await typed(rig, "sort foo")
        *rows, field, _ = shown(rig)
        assert len(rows) <= (2 if size[1] < 20 else 3) and "sort: 'foo' is no column" in "\n".join(rows)
        assert all(len(row) <= size[0] for row in rows) and field == "COMMAND : sort foo"
        rig.app.report("a message after it", bad=True)
        assert "sort: 'foo' is no column" in "\n".join(shown(rig)), "the error stays"


async def test_a_reader_gives_its_line_back_too():
    async with console() as rig:
        await rig.pilot.press("e")
        await typed(rig, "sort age")
        assert line(rig).is_open and "no table that it sorts" in line(rig).error
        assert shown(rig)[-2] == "COMMAND : sort age"
        await rig.pilot.press("escape")
        assert "no table" not in rig.screen() and "COMMAND" not in rig.screen()


async def test_the_line_of_prompts_gives_a_command_back():
    async with console() as rig:
        await rig.pilot.press("i", *":strems", "enter")
        assert line(rig).mode == "prompt" and line(rig).input.value == ":strems" and line(rig).error
        await rig.pilot.press("backspace", "backspace", *"ams", "enter")
        assert isinstance(rig.app.screen, StreamsScreen)
        await rig.pilot.press("escape")
        assert line(rig).is_open and line(rig).input.value == line(rig).error == ""


async def test_what_came_behind_enter_in_one_packet_does_not_hide_the_error():
    """A link that is slow brings several lines at once: the second colon is not a key then."""
    async with console() as rig:
        for key in (*":strems", "\r", *":sort age", "\r"):
            named = {":": "colon", "\r": "enter", " ": "space"}.get(key, key)
            rig.app.post_message(events.Key(named, key))
        await rig.until(lambda: rig.app.model.state.order.column == "age")
        await rig.pilot.pause()
        assert not line(rig).is_open and rig.app.model.lines["command"] == ["strems", ":sort age"]
        assert any("'strems' is not a command" in note.text for note in rig.app.notes)


async def test_esc_on_a_plan_that_is_refused_opens_the_line_again():
    async with console(plans={"set-memory": REFUSED}) as rig:
        await planned(rig, "set-memory 7")
        assert "INVALID  memory utilization is 7" in rig.board("dialog-body")
        await rig.pilot.press("escape")
        assert rig.app.screen is rig.app.main and line(rig).is_open and line(rig).input.value == "set-memory 7"
        assert line(rig).error == f"set-memory refused: INVALID: {REFUSED.text}" and list(rig.app.notes) == []
        rig.source.plans.clear()
        await rig.pilot.press("backspace", *"0.5", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        await rig.until(lambda: "does it" in rig.board("dialog-body"))
        await rig.pilot.press("escape")
        assert not line(rig).is_open, "a plan that was cancelled is not wanted"
        assert [note.text for note in rig.app.notes] == ["set-memory: cancelled; nothing was done"]


async def test_a_refusal_after_the_confirm_opens_the_line_by_esc_alone():
    async with console(answers={"abort": Refused(id="1", code="NOT_FOUND", text="it has ended")}) as rig:
        await planned(rig, "abort r-0001")
        await rig.pilot.press("tab", "enter")
        await rig.until(lambda: "refused: NOT_FOUND" in rig.board("dialog-body"))
        assert isinstance(rig.app.screen, Confirm)
        await rig.pilot.press("escape")
        assert line(rig).input.value == "abort r-0001" and line(rig).error.endswith("NOT_FOUND: it has ended")


async def test_a_refusal_that_comes_after_the_dialog_opens_nothing_and_says_how_the_line_comes_back():
    """The operator presses keys of the screen by then."""
    answers = {"abort": Refused(id="1", code="NOT_FOUND", text="it has ended")}
    async with console(answers=answers, release=asyncio.Event()) as rig:
        await planned(rig, "abort r-0001")
        await rig.pilot.press("tab", "enter", "escape")
        assert rig.app.screen is rig.app.main and not line(rig).is_open
        rig.source.release.set()
        await rig.until(lambda: any("refused" in note.text for note in rig.app.notes))
        assert not line(rig).is_open
        assert "abort refused: NOT_FOUND: it has ended (↑ after : brings it back)" in [
            note.text for note in rig.app.notes
        ]
        await rig.pilot.press("colon", "up")
        assert line(rig).input.value == "abort r-0001"


@pytest.mark.parametrize("text", ["submit 'tell me'", "abort r-0001"])
async def test_a_refusal_that_comes_after_its_screen_was_left_is_a_message(text):
    async with console(answers={"submit": TOO_LONG, "abort": TOO_LONG}, release=asyncio.Event()) as rig:
        await rig.pilot.press("e")
        if text.startswith("abort"):
            await planned(rig, text)
            await rig.pilot.press("tab", "enter", "escape")
        else:
            await typed(rig, text)
        await rig.pilot.press("escape")
        assert rig.app.screen is rig.app.main and rig.source.acted()
        rig.source.release.set()
        says = f"refused: INVALID: {TOO_LONG.text} (↑ after : brings it back)"
        await rig.until(lambda: any(note.text.endswith(says) for note in rig.app.notes))
        await rig.pilot.press("colon", "up")
        assert line(rig).input.value == text


async def test_a_plan_that_cannot_be_asked_for_opens_the_line_again():
    async with console(plans={"abort": LinkLost("the gateway is gone", sent=False)}) as rig:
        await typed(rig, "abort r-0001")
        await rig.until(lambda: "nothing was done" in rig.board("dialog-body"))
        await rig.pilot.press("escape")
        assert line(rig).input.value == "abort r-0001"
        assert line(rig).error == "abort: nothing was done: the gateway is gone"


async def test_a_plan_that_excludes_every_request_opens_the_line_again():
    undone = [Conflict(request=each, code="NOT_FOUND", text=f"no request {each}") for each in ("r-a", "r-b")]
    answer = Outcome(id="1", op="o1", state="planned", text="0 of 2", plan=["nothing to do"], conflicts=undone)
    async with console(plans={"many": answer}) as rig:
        await planned(rig, "abort r-a r-b")
        await rig.pilot.press("escape")
        assert line(rig).input.value == "abort r-a r-b"
        assert line(rig).error == "abort: not r-a: no request r-a; not r-b: no request r-b"


async def test_a_verb_of_a_key_has_no_line_to_give_back():
    async with console(plans={"abort": Refused(id="1", code="NOT_FOUND", text="it has ended")}) as rig:
        dialog = await rig.confirm("a")
        assert dialog.verb == Abort(request="r-0000")
        await rig.pilot.press("escape")
        assert not line(rig).is_open and [note.text for note in rig.app.notes] == ["abort: cancelled; nothing was done"]


async def test_a_verb_without_a_link_stays_in_the_line():
    async with console() as rig:
        rig.clock.now += 3
        await typed(rig, "abort r-0001")
        assert line(rig).input.value == "abort r-0001" and line(rig).error.startswith("abort: ")
        rig.clock.now -= 3
        await rig.pilot.press("enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))


@pytest.mark.parametrize("answer", [TOO_LONG, LinkLost("the gateway is gone", sent=False)])
async def test_a_prompt_that_is_not_taken_comes_back(answer):
    async with console(answers={"submit": answer}, release=asyncio.Event()) as rig:
        await rig.pilot.press("i", *"tell me", "enter")
        assert line(rig).is_open and line(rig).input.value == ""
        rig.source.release.set()
        await rig.until(lambda: line(rig).error != "")
        assert line(rig).input.value == "tell me" and line(rig).error.startswith("prompt")
        await rig.pilot.press("!", "enter")
        await rig.until(lambda: len(rig.source.acted()) == 2)
        assert [verb.prompt for verb in rig.source.acted()] == ["tell me", "tell me!"]


async def test_a_prompt_that_is_not_taken_leaves_the_next_one_alone():
    async with console(answers={"submit": TOO_LONG}, release=asyncio.Event()) as rig:
        await rig.pilot.press("i", *"tell me", "enter", *"then")
        rig.source.release.set()
        await rig.until(lambda: any(TOO_LONG.text in note.text for note in rig.app.notes))
        assert line(rig).input.value == "then" and line(rig).error == ""
        assert [note.text for note in rig.app.notes] == [f"prompt refused: INVALID: {TOO_LONG.text} (↑ brings it back)"]
        await rig.pilot.press("up")
        assert line(rig).input.value == "tell me"
        await rig.pilot.press("down")
        assert line(rig).input.value == "then", "nor do the arrows lose it"


async def test_a_prompt_whose_fate_is_unknown_is_not_offered_twice():
    async with console(answers={"submit": LinkLost("gone", sent=True)}) as rig:
        await rig.pilot.press("i", *"tell me", "enter")
        await rig.until(lambda: any("outcome unknown" in note.text for note in rig.app.notes))
        assert line(rig).input.value == ""


async def test_a_submission_by_command_that_is_refused_opens_nothing():
    async with console(answers={"submit": TOO_LONG}) as rig:
        await typed(rig, "submit 'tell me'")
        await rig.until(lambda: any("(↑ after : brings it back)" in note.text for note in rig.app.notes))
        assert not line(rig).is_open
        (verb,) = rig.source.acted()
        assert isinstance(verb, Submit) and verb.prompt == "tell me"


async def test_the_palette_opens_the_line_for_a_command_that_lacks_words():
    async with console() as rig:
        rig.app.navigation.begin_command("mark", needs_words=False)
        assert line(rig).input.value == "mark" and line(rig).error == "mark needs a filter: mark owner:alice age>5m"
