"""The line at the bottom on every screen: modes, options of prompts, completion, filter and search; targets of keys."""

from __future__ import annotations

import copy

import pytest
import snapshots
from ppconsole.link.settings import Settings
from ppconsole.model.request_fields import LETTERS
from ppconsole.model.sorting import BY_ARRIVAL
from ppconsole.screens.confirm import Confirm
from ppconsole.screens.detail_screens import EventsScreen, HelpScreen, LogsScreen, OptionsScreen, StageScreen
from ppconsole.screens.request_screen import RequestScreen
from ppconsole.view.cells import text_of
from ppconsole.widgets.lines import Lines
from ppconsole.widgets.prompt import Completer, PromptLine
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event
from ppengine.protocol.verbs import Abort, Continue, RestartStage, Submit, SwapIn
from test_tui_console import console
from textual import events


def line(rig):
    """Return the line at the bottom of the present screen."""
    return rig.app.screen.query_one(PromptLine)


def searched(rig):
    """Return the rows of the reader that match."""
    reader = rig.app.screen
    return reader._places(reader.body(reader.size.width))


def label(rig):
    return str(line(rig).query_one("#prompt-label").content)


@pytest.mark.parametrize(
    ("key", "name", "placeholder", "foot"),
    [
        ("i", "PROMPT", "write a prompt", "send"), ("slash", "FILTER", "!word excludes", "keep"),
        ("colon", "COMMAND", "Tab completes", "run"),
    ],
)  # fmt: skip
async def test_the_mode_shows_at_the_very_key(monkeypatch, key, name, placeholder, foot):
    async with console() as rig:
        monkeypatch.setattr(rig.app, "tick", lambda: None)  # no second comes any more
        rig.app._next.stop()
        assert "prompt" in rig.board("foot") and line(rig).input.placeholder == "i writes a prompt"
        await rig.pilot.press(key)
        assert label(rig).startswith(name) and placeholder in line(rig).input.placeholder
        assert f" {foot} " in rig.board("foot")
        await rig.pilot.press("escape")
        assert label(rig).startswith("PROMPT") and f" {foot} " not in rig.board("foot")
        assert line(rig).input.placeholder == "i writes a prompt"


async def test_a_colon_begins_a_command_on_the_prompt_line_too():
    async with console() as rig:
        await rig.pilot.press("i", *":set max-tokens=12", "enter")
        assert rig.app.settings.prompt.summary() == "12 tok · T 0.8" and rig.source.acted() == []
        await rig.pilot.press(*":", "enter", *"hi", "enter")
        assert line(rig).is_open, "for the next prompt"
        await rig.pilot.press(*" :q", "enter", "backslash", *":q", "enter", "backslash", *"q", "enter")
        await rig.until(lambda: len(rig.source.acted()) == 4)
        assert [verb.prompt for verb in rig.source.acted()] == ["hi", " :q", ":q", "\\q"]
        await rig.pilot.press(*":abort r-0001", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        assert rig.app.screen.verb == Abort(request="r-0001")
        await rig.pilot.press("escape", *":strems", "enter")
        assert line(rig).error.endswith("did you mean streams?") and line(rig).input.value == ":strems"
        await rig.pilot.press("ctrl+u", *":quit", "enter")
        await rig.until(lambda: not rig.app.is_running)


async def test_set_changes_shows_and_resets_the_options_of_prompts():
    async with console() as rig:
        assert label(rig) == "PROMPT 256 tok · T 0.8 › "
        await rig.pilot.press("colon", *"set max-tokens 64", "enter", "colon", *"set temperature 0", "enter")
        await rig.pilot.press("colon", *"set top_p=0.9", "enter", "colon", *"set stop 'the end' END", "enter")
        rig.app.paint()
        assert label(rig) == "PROMPT 64 tok · T 0 · top-p 0.9 · stop 'the end' 'END' › "
        wanted = SamplingParams(max_tokens=64, temperature=0.0, top_p=0.9, stop=["the end", "END"])
        await rig.pilot.press("i", *"hi", "enter", "escape", "colon", *"submit there --top-p 1", "enter")
        await rig.until(lambda: len(rig.source.acted()) == 2)
        other = SamplingParams(max_tokens=64, temperature=0.0, stop=["the end", "END"])
        assert rig.source.acted() == [Submit(prompt="hi", sampling=wanted), Submit(prompt="there", sampling=other)]
        await rig.pilot.press("colon", *"set", "enter")
        assert isinstance(rig.app.screen, OptionsScreen)
        rows = [text_of(row).split() for row in rig.app.screen.query_one("#reader-body", Lines).rows]
        assert ["*", "max-tokens", "64", "256"] in [row[:4] for row in rows]
        assert ["seed", "-", "-"] in [row[:3] for row in rows]
        await rig.pilot.press("colon", *"set max-tokens default", "enter", "escape")
        assert rig.app.settings.prompt.summary().startswith("256 tok · T 0 ")
        await rig.pilot.resize_terminal(64, 24)
        await rig.pilot.pause()
        assert label(rig) == "PROMPT › ", "no room"


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("max-tokens 0", "max_tokens is 0; it must be at least 1"),
        ("max-tokens many", "'many' is no whole number"),
        ("max-tokens", "set max-tokens VALUE"),
        ("max-tokens=", "set max-tokens VALUE"),
        ("max-tokens=many", "'many' is no whole number"),
        ("min-tokens 300", "it must be 0 to max_tokens (256)"),
        ("ignore-eos maybe", "it must be on, off or default"),
        ("colour red", "'colour' is not an option of a prompt; the options are max-tokens"),
        ("seed 1 2", "seed takes one value, not 2"),
        ("stop 'a", "No closing quotation"),
    ],
)
async def test_a_wrong_option_changes_nothing(typed, says):
    async with console() as rig:
        await rig.pilot.press("colon", *f"set {typed}", "enter")
        assert says in line(rig).error
        assert rig.app.settings.prompt.summary() == "256 tok · T 0.8"


def test_options_are_kept_for_the_next_start(tmp_path):
    path = tmp_path / "ppconsole" / "console.json"
    settings = Settings(path)
    changes = (["max-tokens", "400"], ["min-tokens", "300"], ["max-tokens", "500"], ["stop-token-ids", "2,5"],
               ["ignore-eos", "on"], ["stop", "a b", "c"], ["priority", "-2"], ["temperature", "0.25"])  # fmt: skip
    for words in changes:
        settings.set_prompt(settings.prompt.changed(words))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    again = Settings(path)
    assert again.problem == "" and again.prompt == settings.prompt
    assert dict(again.prompt.chosen) == {
        "min-tokens": 300, "max-tokens": 500, "stop-token-ids": [2, 5], "ignore-eos": True, "stop": ["a b", "c"],
        "priority": -2, "temperature": 0.25,
    }  # fmt: skip
    assert [each.name for each in path.parent.iterdir()] == ["console.json"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": 5}', b'{"prompt": {"max-tokens": 0}}', b'{"prompt": {"nothing": 1}}',
     b'{"prompt": {"seed": {"a": 1}}}', b'{"prompt": {"temperature": [[]]}}', b"[" * 100_000],
)  # fmt: skip
async def test_a_corrupt_file_is_reported_once_and_the_defaults_hold(tmp_path, content):
    path = tmp_path / "console.json"
    path.write_bytes(content)
    settings = Settings(path)
    assert str(path) in settings.problem and settings.prompt.summary() == "256 tok · T 0.8"
    async with console(settings=settings) as rig:
        rig.app.tick()
        assert [note.bad for note in rig.app.notes] == [True]
        await rig.pilot.press("colon", *"set seed 3", "enter")
    assert Settings(path).problem == ""


async def test_a_file_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "ppconsole").write_text("a file in the place of the folder")
    settings = Settings(tmp_path / "ppconsole" / "console.json")
    async with console(settings=settings) as rig:
        await rig.pilot.press("colon", *"set seed 3", "enter")
        assert any("not kept for the next start" in note.text for note in rig.app.notes)
        assert rig.app.settings.prompt.summary().endswith("seed 3")


async def test_tab_shows_the_candidates_and_goes_through_them():
    async with console() as rig:
        await rig.pilot.press("colon", *"st", "tab")
        assert rig.board("foot").split() == ["stop", "store", "stacks", "streams"]
        await rig.pilot.press("tab", "tab", "tab")
        assert line(rig).input.value == "stacks"
        await rig.pilot.press("shift+tab", "shift+tab", "shift+tab")
        assert line(rig).input.value == "streams"
        await rig.pilot.press("x")
        assert " run " in rig.board("foot"), "typing ends the completion"
        await rig.pilot.press("escape", "colon", *"set max", "tab", "3", "enter")
        assert rig.app.settings.prompt.summary() == "3 tok · T 0.8"


async def test_the_arrows_keep_each_line_as_it_was_left():
    async with console() as rig:
        for text in ("set seed 3", "set seed 4"):
            await rig.pilot.press("colon", *text, "enter")
        await rig.pilot.press("colon", *"mark", "up", "backspace", "5", "up", "down")
        assert line(rig).input.value == "set seed 5"
        await rig.pilot.press("down", "down")
        assert line(rig).input.value == "mark"
        await rig.pilot.press("up", "enter", "colon", "up")
        assert line(rig).input.value == "set seed 5" and rig.app.settings.prompt.summary().endswith("seed 5")
        await rig.pilot.press("up")
        assert line(rig).input.value == "set seed 4", "an edit of an old line is a new line"


async def test_a_mistyped_command_is_answered_with_the_nearest_one():
    async with console() as rig:
        await rig.pilot.press("colon", *"strems", "enter")
        assert line(rig).error.endswith("did you mean streams?")


@pytest.mark.parametrize("typed", ["q", "q!", "quit", "quit!"])
async def test_the_console_is_left_by_command(typed):
    async with console() as rig:
        await rig.pilot.press("l", "colon", *typed, "enter")
        await rig.until(lambda: not rig.app.is_running)
        assert rig.app.return_code == 0


async def test_esc_clears_a_filter_on_the_main_screen():
    async with console() as rig:
        await rig.pilot.press("slash", *"eve", "enter")
        assert "REQ 2/8" in rig.board("left")
        await rig.pilot.press("escape")
        assert "REQ 8 " in rig.board("left") and rig.app.model.state.filter == ""
        await rig.pilot.press("escape")
        assert rig.app.screen is rig.app.main


def head(rig):
    """The row of the request table's titles."""
    return next(row for row in rig.board("left").splitlines() if row.startswith("  REQ"))


async def test_every_column_that_sorts_shows_its_arrow():
    async with console(size=(120, 36)) as rig:
        for letter, wanted in {
            "i": "REQ 8▲", "o": "OWNER▲", "s": "STAT▲", "g": "AGE▼", "n": "IN▼", "u": "OUT▼", "b": "BLK▼",
            "w": "SWP▼", "y": "WHY▲", "a": "REQ 8 ", "I": "REQ 8 ", "escape": "REQ 8 ",
        }.items():  # fmt: skip
            await rig.pilot.press("S", letter)
            if letter == "I":  # no letter of the menu, which stays
                await rig.pilot.press("escape")
            assert wanted in head(rig)
            assert ("▲" in head(rig) or "▼" in head(rig)) == (wanted != "REQ 8 "), "by arrival no column is marked"
        await rig.pilot.press("S", "i", "R")
        assert "REQ 8▼" in head(rig)
        await rig.pilot.press("S", "i")
        assert "REQ 8▲" in head(rig), "the letter of the sorted column reverses it"
        await rig.pilot.press("S", "R")
        assert "REQ 8▼" in head(rig)
        await rig.pilot.press("S", "down", "down", "enter")
        assert "STAT▲" in head(rig), "the menu begins at the sorted column"


async def test_two_keys_sort_by_any_column_at_every_size():
    for size in ((60, 16), (80, 24), (200, 50)):
        async with console(size=size) as rig:
            await rig.pilot.press("S")
            columns = rig.app.main.sort_columns()
            for column in columns:
                assert f"{LETTERS[column]} {column} " in rig.board("dialog-body").replace("▲", " "), (size, column)
            assert len({LETTERS[column] for column in columns}) == len(columns)
            assert rig.app.screen.query_one("#dialog").size.height <= size[1] - 2
            await rig.pilot.press("t")
            assert rig.app.model.state.order.column == "ttft" and rig.app.screen is rig.app.main


async def test_the_letter_may_come_in_the_same_packet_as_the_key_of_the_menu():
    async with console() as rig:
        for key in ("S", "b"):
            rig.app.post_message(events.Key(key, key))
        await rig.until(lambda: rig.app.model.state.order.column == "blk")
        assert rig.app.screen is rig.app.main


async def test_sort_takes_each_field_and_names_a_hidden_column():
    async with console() as rig:
        for index, request in enumerate(rig.source.picture.requests):
            request.ttft_s = 0.5 * index if index != 3 else None
        await rig.pilot.press("colon", *"sort tt", "tab")
        assert line(rig).input.value == "sort ttft "
        await rig.pilot.press("enter")
        assert "WHY  TTFT▼" in head(rig), "this screen is too narrow for the column"
        assert [request.id for request in rig.app.model.arranged()][::7] == ["r-0007", "r-0003"], "unknown is last"
        await rig.pilot.press("colon", *"sort TTFT", "enter")
        assert "WHY  TTFT▲" in head(rig)
        assert [request.id for request in rig.app.model.arranged()][::7] == ["r-0000", "r-0003"], "either way round"
        await rig.pilot.press("colon", *"sort arrival", "enter")
        assert "TTFT" not in head(rig)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("sort tfft", "sort: 'tfft' is no column; did you mean ttft?"),
        ("sort", "sort: it needs a column; the columns are arrival, id, owner"),
    ],
)
async def test_a_column_that_is_none_is_refused_with_the_nearest(text, says):
    async with console() as rig:
        await rig.pilot.press("colon", *text, "enter")
        assert says in line(rig).error
        assert rig.app.model.state.order == BY_ARRIVAL
        await rig.pilot.press("escape", "e", "colon", *"sort age", "enter")
        assert "no table that it sorts" in line(rig).error


async def test_verbs_act_on_the_request_and_the_stage_that_are_open():
    async with console(snapshots.halted()) as rig:
        rig.app.main.selection.requests.choose("r-0003")
        await rig.pilot.press("enter", "down")
        assert isinstance(rig.app.screen, RequestScreen) and "abort" in rig.board("reader-foot")
        await rig.pilot.press("slash", *"tokens", "enter", "slash", "enter")
        assert "/tokens 2/" in rig.board("reader-title")
        dialog = await rig.confirm("n")
        assert dialog.verb == SwapIn(request="r-0003"), "its key comes before the next match"
        await rig.pilot.press("escape")
        rig.source.commands.clear()
        dialog = await rig.confirm("a")
        assert dialog.verb == Abort(request="r-0003")
        await rig.pilot.press("escape", "+")
        assert line(rig).input.value == "priority r-0003 " and "COMMAND" in rig.screen()
        await rig.pilot.press("escape", "colon", *"abort", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, Confirm))
        assert rig.app.screen.verb == Abort(request="r-0003")
        await rig.pilot.press("escape", "escape", "tab", "down", "enter")
        assert isinstance(rig.app.screen, StageScreen) and "continue 1" in rig.board("reader-foot")
        rig.source.commands.clear()
        dialog = await rig.confirm("c")
        assert dialog.verb == Continue(stage=1)
        await rig.pilot.press("escape", "escape", "l")
        assert isinstance(rig.app.screen, LogsScreen) and "restart 1" in rig.board("reader-foot")
        rig.source.commands.clear()
        dialog = await rig.confirm("x")
        assert dialog.verb == RestartStage(stage=1)


async def test_x_acts_on_the_focused_stage_and_on_nothing_else():
    picture = snapshots.halted()
    picture.stages[1].state, picture.verdicts[0].suggest = "dead", "run: ppconsole continue 1"
    async with console(picture) as rig:
        assert "restart" not in rig.board("foot")
        await rig.pilot.press("x")
        assert rig.app.screen is rig.app.main and not rig.source.commands, "a request has the focus"
        assert any("restart-stage acts on a stage" in note.text for note in rig.app.notes)
        await rig.pilot.press("tab")
        assert "restart 0" in rig.board("foot")
        await rig.pilot.press("down")
        assert "restart 1" in rig.board("foot")
        dialog = await rig.confirm("x")
        assert dialog.verb == RestartStage(stage=1)
        await rig.pilot.press("escape", "d")
        assert "⏎ continue 1 " in rig.board("reader-foot"), "the suggested fix, by its name"


async def test_c_without_a_stage_in_focus_acts_on_the_one_that_is_halted():
    picture = snapshots.halted()
    halted = [stage for stage in picture.stages if stage.state == "stopped"]
    assert [stage.index for stage in halted] == [1]
    async with console(picture) as rig:
        assert not rig.app.main.selection.on_stages
        assert (await rig.confirm("c")).verb == Continue(stage=1)
        await rig.pilot.press("escape", "tab")
        assert (await rig.confirm("c")).verb == Continue(stage=0), "the stage in focus comes first"
        await rig.pilot.press("escape", "tab")
        for states in (("stopped", "stopped"), ("idle", "idle")):
            rig.source.commands.clear()
            picture = copy.deepcopy(picture)
            for stage, state in zip(picture.stages[:2], states, strict=True):
                stage.state = state
            rig.source.send(picture)
            rig.app.tick()
            await rig.pilot.press("c")
            assert rig.app.screen is rig.app.main and not rig.source.commands
            assert any("continue acts on a stage, and none has the focus" in n.text for n in rig.app.notes)


async def test_logs_are_searched():
    async with console() as rig:
        await rig.pilot.press("l")
        await rig.until(lambda: "is slow" in rig.board("reader-body"))
        await rig.pilot.press("slash")
        assert label(rig).startswith("SEARCH") and "next" not in rig.board("reader-foot")
        await rig.pilot.press(*"step 1840")
        assert "/step 1840 1/10" in rig.board("reader-title")
        await rig.pilot.press("enter", "n")
        assert "/step 1840 2/10" in rig.board("reader-title")
        await rig.pilot.press("N", "N")
        assert "/step 1840 10/10" in rig.board("reader-title")
        marked = [seg for row in rig.app.screen.query_one("#reader-body", Lines).rows for seg in row.segs if seg[1]]
        assert ("step 1840", "chip.name") in marked and ("step 1840", "chip.warn") in marked
        await rig.pilot.press("slash", *"nowhere", "enter")
        assert any("'nowhere' is not here" in note.text for note in rig.app.notes)
        await rig.pilot.press("slash", "escape")
        assert "/" not in rig.board("reader-title") and isinstance(rig.app.screen, LogsScreen)
        await rig.pilot.press("colon", *"events", "enter")
        assert isinstance(rig.app.screen, EventsScreen)


async def test_warnings_alone_are_one_key_away_under_load():
    async with console(size=(80, 24)) as rig:
        for seq, kind in ((900, "stage.lost"), *((seq, "request.finished") for seq in range(901, 950))):
            rig.source.send(Event(seq=seq, wall=1.7e9, kind=kind, text=f"r-1 stop, {seq} tokens", request="r-1"))
        rig.app.tick()
        tail = rig.board("left")
        assert "949 tokens" in tail and "requests ended: " in tail and "900 tokens" in tail
        await rig.pilot.press("e")
        assert "949 tokens" in rig.board("reader-body") and "900 tokens" not in rig.board("reader-body")
        await rig.pilot.press("W")
        assert "900 tokens" in rig.board("reader-body") and "949 tokens" not in rig.board("reader-body")
        assert "EVENTS: WARNINGS AND ERRORS" in rig.board("reader-title")
        await rig.pilot.press("escape")
        assert "WARN " in rig.board("left") and "W errors alone" in rig.screen() and "900 tokens" in rig.board("left")
        assert "949 tokens" not in rig.board("left") and "requests ended: " not in rig.board("left")
        await rig.pilot.press("W")
        assert "ERR  " in rig.board("left") and "W all events" in rig.screen()
        await rig.pilot.press("W")
        assert "949 tokens" in rig.board("left") and "ERR  " not in rig.board("left")


async def test_a_text_is_found_that_is_broken_over_two_rows_of_an_event():
    async with console(size=(60, 16)) as rig:
        text = f"{'a stage went away and came back, ' * 3}then two words"
        rig.source.send(Event(seq=900, wall=1.7e9, kind="stage.lost", text=text))
        rig.app.tick()
        await rig.pilot.press("e", "slash", *"came back")
        rows = rig.board("reader-body").splitlines()
        assert any("then two words" in line for line in rows), "the end of a long event is shown"
        assert "/came back 1/1" in rig.board("reader-title")
        await rig.pilot.press("escape", "slash", *text[40:100])
        assert not any(text[40:100] in line for line in rig.board("reader-body").splitlines())
        assert len(searched(rig)) == 1


async def test_a_replay_is_never_live_and_never_stale():
    async with console(live=False, title="recording of sample") as rig:
        assert "REPLAY" in rig.board("top").split() and "live" not in rig.board("top")
        rig.clock.now += 60
        rig.app.tick()
        assert "stale" not in rig.screen() and not rig.app.screen.query_one("#left", Lines)._faded
        await rig.pilot.press("l")
        assert "REPLAY" in rig.board("reader-title") and "stale" not in rig.screen()
        from ppengine.protocol.recording import LinkState

        rig.source.send(LinkState(state="recorded", text="end of the recording"))
        rig.app.tick()
        assert "REPLAY end" in rig.board("reader-title")
        rig.source.send(LinkState(state="lost", text="a.ppr is cut short"))
        await rig.pilot.press("escape")
        assert "the replay ends here: a.ppr is cut short" in rig.board("top")


async def test_help_on_a_name_opens_its_entries_and_a_wrong_one_is_refused():
    async with console() as rig:
        await rig.pilot.press("colon", *"help I>O", "enter")
        assert isinstance(rig.app.screen, HelpScreen)
        assert "HELP: I>O" in rig.board("reader-title")
        assert "steps not begun > sends not done" in rig.board("reader-body")
        await rig.pilot.press("escape", "colon", *"help abort", "enter")
        assert "COMMAND" in rig.board("reader-body") and "--owner" in rig.board("reader-body")
        await rig.pilot.press("escape", "colon", *"help I>Q", "enter")
        assert rig.app.screen is rig.app.main
        assert "'I>Q' is neither a command" in line(rig).error


async def test_no_word_that_has_not_begun_is_suggested() -> None:
    """`priority r-1 ` wants a number: another id in grey read as if it were typed."""
    completer = Completer(lambda line: [f"{line}r-0002"])
    assert await completer.get_suggestion("priority r-0001 ") is None
    assert await completer.get_suggestion("priority ") is None
    assert await completer.get_suggestion("priority r") == "priority rr-0002"
