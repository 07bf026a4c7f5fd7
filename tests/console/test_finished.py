"""Requests that have ended: the screen with its order and filter, and the list of a past from its recordings."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
import snapshots
from cli_helpers import Cli
from fake_source import FakeSource
from kept_engines import kept_engine, picture
from ppconsole.app import ConsoleApp
from ppconsole.link.ended import EndedSource
from ppconsole.link.history import History
from ppconsole.link.kept_finished import KeptFinished
from ppconsole.link.replay import ReplaySource
from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.model.endings import clock_text
from ppconsole.model.request_fields import FINISHED_FIELDS, LETTERS
from ppconsole.screens.finished_screen import FinishedScreen
from ppconsole.screens.request_screen import RequestScreen
from ppconsole.view import finished_table
from ppconsole.view.wording import FINISHED
from ppconsole.widgets.prompt import PromptLine
from ppengine.protocol.discovery import ended_engines
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.inspection import FinishedDetail
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.recording import Recorder
from ppengine.protocol.snapshot import Event, Latency
from ppengine.protocol.tiers import PromptSources
from test_tui_console import Clock, Rig, console

BEGIN = 1_700_000_000.0


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()


def ended(number: int, **changes: object) -> FinishedInfo:
    """The request that ended `number` times ten seconds ago; each third was aborted before its first token."""
    lost = number % 3 == 2
    fields: dict[str, object] = {
        "id": f"r-{number}", "owner": ("bob", "alice")[number % 2], "wall": BEGIN - 10 * number,
        "ended_s": 10.0 * number, "took_s": 1.0 + number % 7, "prompt_tokens": 100 + number * 37 % 90,
        "output_tokens": 0 if lost else 5 + number, "reason": "abort" if lost else "length",
        "queue_s": 0.01 * number, "ttft_s": None if lost else 0.1 * (number * 7 % 50), "itl_ms": None if lost else 20.0,
        "preemptions": int(number == 4),
    }  # fmt: skip
    return FinishedInfo(**(fields | changes))  # type: ignore[arg-type]


def listed(rig: Rig) -> list[str]:
    """The ids on the screen, from the top."""
    rows = rig.board("reader-body").splitlines()[2:]
    return [line[2:].split()[0] for line in rows if line.startswith(("  r-", "> r-"))]


def reports(rig: Rig) -> list[str]:
    return [note.text for note in rig.app.notes]


async def open_finished(rig: Rig, count: int = 40, **changes: object) -> None:
    rig.source.details["finished"] = FinishedDetail(requests=[ended(number) for number in range(count)], **changes)
    await rig.pilot.press("H")
    await rig.until(lambda: isinstance(rig.app.screen, FinishedScreen) and bool(listed(rig)))


# --- the screen -----------------------------------------------------------------------------------------------


async def test_the_screen_has_the_columns_of_the_command_and_the_newest_first() -> None:
    times = Quantiles(p50=0.12, p90=0.4, p99=1.5, count=9)
    async with console(snapshots.snapshot(latency=Latency(ttft_s=times))) as rig:
        await open_finished(rig)
        lines = rig.board("reader-body").splitlines()
        assert lines[0].startswith("  p50 p90 p99 TTFT 120ms 400ms 1.5s") and lines[0].rstrip().endswith("1-20 of 40")
        shown = [title for title in FINISHED.values() if title != "ITL99"]
        assert lines[1].replace("▲", " ").split() == shown, "all of them but one at 80 columns"
        assert lines[3].split() == ["r-1", "alice", "10s", "2.0s", "137", "6", "10ms", "700ms", "20ms", "0", "length"]
        assert lines[4].split()[6:] == ["20ms", "-", "-", "0", "abort"], "it had no token"
        await rig.pilot.press("G")
        assert rig.board("reader-body").splitlines()[-1].startswith("> r-39")


async def test_every_column_sorts_and_turns_round() -> None:
    async with console(size=(120, 36)) as rig:
        await open_finished(rig)
        columns = [each.key for each in finished_table.COLUMNS if each.key in FINISHED_FIELDS]
        for key in [*columns[columns.index("ended") + 1 :], *columns[: columns.index("ended") + 1]]:
            await rig.pilot.press("S", "R" if key == rig.app.screen._order.column else LETTERS[key])
            head, order = rig.board("reader-body").splitlines()[1], rig.app.screen._order
            assert order.column == key and FINISHED[key][:3] in head
            assert head.count("▲") + head.count("▼") == 1
        assert listed(rig)[:3] == ["r-0", "r-1", "r-2"]
        await rig.pilot.press("R")
        assert listed(rig)[:3] == ["r-39", "r-38", "r-37"]
        await rig.pilot.press("colon", *"sort ttft", "enter")
        assert listed(rig)[0] == "r-7", "4.9 s"
        await rig.pilot.press("R")
        assert listed(rig)[0] == "r-0", "0 s; those without a first token are the last ones"


async def test_a_click_on_a_title_sorts_and_on_a_row_selects() -> None:
    async with console() as rig:
        await open_finished(rig)
        at = rig.board("reader-body").splitlines()[1].index("OUT")
        for arrow, first in (("OUT▼", "r-39"), ("OUT▲", "r-2")):
            await rig.pilot.click("#reader-body", offset=(at, 1))
            assert arrow in rig.board("reader-body") and listed(rig)[0] == first
        await rig.pilot.click("#reader-body", offset=(5, 4))
        assert rig.board("reader-body").splitlines()[4].startswith(">")


async def test_the_filter_speaks_the_language_of_the_command() -> None:
    async with console() as rig:
        await open_finished(rig)
        await rig.pilot.press("slash", *"ttft>1s owner:ali")
        assert "ttft>1s" in rig.board("reader-foot")
        assert "FINISHED 11/40  /ttft>1s owner:ali" in rig.board("reader-title")
        await rig.pilot.press(*" r-1 ou>")
        assert "no field 'ou'; did you mean out?" in rig.board("reader-foot")
        await rig.pilot.press("enter")
        assert rig.app.screen.query_one(PromptLine).is_open and "no field 'ou'" in rig.board("note")
        await rig.pilot.press("backspace", "enter")
        assert "/ttft>1s owner:ali r-1 ou  live" in rig.board("reader-title")
        await rig.pilot.press("slash")
        assert rig.app.screen.query_one(PromptLine).input.value == "ttft>1s owner:ali r-1 ou"
        await rig.pilot.press("enter", "escape")
        assert "FINISHED 40 " in rig.board("reader-title"), "the filter goes first"
        await rig.pilot.press("slash", *"no-such", "enter")
        assert "no request matches the filter" in rig.board("reader-body")
        await rig.pilot.press("escape", "escape")
        assert rig.app.screen is rig.app.main
        for key in ("q", "H"):
            await rig.pilot.press("H", "slash", *"r-1", "enter", key)
            assert rig.app.screen is rig.app.main, "these leave at once"


async def test_enter_opens_the_details_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console(size=(100, 70)) as rig:
        await open_finished(rig)
        await rig.pilot.press("down", "enter")
        await rig.until(lambda: "is not kept: no request r-1" in rig.board("reader-body"))
        for part in ("r-1", "alice", "137 tokens", "6 tokens", "700ms", "20ms a token", "2.0s", "length"):
            assert part in rig.screen()
        assert "preempt" not in rig.board("reader-foot"), "no verb acts on it any more"
        known = snapshots.detail(snapshots.request(0))
        known = msgspec.structs.replace(known, id="r-1", state="finished", output_text="and they lived")
        rig.source.details["request"] = known
        await rig.pilot.press("escape", "enter")
        await rig.until(lambda: "and they lived" in rig.board("reader-body"))
        rig.source.details["request"] = msgspec.structs.replace(known, state="running")
        await rig.pilot.press("escape", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, RequestScreen) and rig.app.screen._detail is not None)
        assert "and they lived" not in rig.board("reader-body"), "a later request has its id"
        copied: list[str] = []
        monkeypatch.setattr(rig.app, "copy_to_clipboard", copied.append)
        await rig.pilot.press("escape", "slash", *"out>3 !alice", "enter", "y")
        assert copied == ["ppconsole -e opt@n0 finished --filter 'out>3 !alice'"]


# --- one request by its id ------------------------------------------------------------------------------------

SOURCES = PromptSources(device=16, backends={"nvme0": 100}, computed=21)
HTTP = {"client": "team-a", "queue_s": 0.25, "ttft_s": 0.7, "itl_ms": 21.0, "itl_p50_ms": 20.0, "itl_p99_ms": 44.0}


async def search(rig: Rig, text: str, *infos: FinishedInfo) -> None:
    """Type `text` behind `/` on the main screen of an engine in which `infos` have ended."""
    rig.source.details["finished"] = FinishedDetail(requests=[*infos, *(ended(number) for number in range(3))])
    await rig.pilot.press("slash", *text, "enter")


async def test_the_id_of_a_client_finds_its_request_after_the_end() -> None:
    async with console(size=(100, 40)) as rig:
        one = ended(1, id="chatcmpl-Trace-42-c0de", reason="stop", **HTTP)
        await search(rig, "trace-42", one, ended(2, id="cmpl-other-9"))
        await rig.until(lambda: "is not kept" in rig.board("reader-body"))
        assert isinstance(rig.app.screen, RequestScreen) and "chatcmpl-Trace-42-c0de" in rig.board("reader-title")
        parts = (
            "team-a", "/v1/chat/completions", "stop", "137 tokens", "6 tokens", "250ms", "700ms", "21ms a token",
            "20ms 44ms",
        )  # fmt: skip
        for part in parts:
            assert part in rig.board("reader-body"), part
        await rig.pilot.press("escape")
        assert rig.app.screen is rig.app.main and "/trace-42" in rig.board("left")


async def test_an_id_of_several_ended_requests_lists_them() -> None:
    async with console() as rig:
        several = [ended(number, id=f"cmpl-abc-{number}") for number in range(3)]
        await search(rig, "abc", *several, ended(4, id="cmpl-xyz"))
        await rig.until(lambda: isinstance(rig.app.screen, FinishedScreen) and "cmpl-abc-2" in rig.board("reader-body"))
        assert 'FINISHED 3/7  /"abc"' in rig.board("reader-title") and "cmpl-xyz" not in rig.board("reader-body")


async def test_a_live_request_and_a_condition_are_filters_alone() -> None:
    async with console() as rig:
        await search(rig, rig.source.picture.requests[0].id)
        await rig.pilot.press("escape", "slash", *"blk>99999", "enter")
        await rig.pilot.pause()
        assert rig.app.screen is rig.app.main and "finished" not in rig.source.inspected


async def test_a_request_that_ends_while_it_is_shown_keeps_its_figures() -> None:
    async with console(size=(100, 40)) as rig:
        one = ended(1, id=rig.source.picture.requests[0].id, reason="stop", **HTTP)
        await rig.pilot.press("enter")
        await rig.until(lambda: "BLOCK TABLE" in rig.board("reader-body"))
        rig.source.details["finished"] = FinishedDetail(requests=[one])
        rig.source.details["request"] = QueryFailed("NOT_FOUND", f"no request {one.id}")
        rig.app.screen.start_load()
        await rig.until(lambda: "20ms 44ms" in rig.board("reader-body") and "team-a" in rig.board("reader-body"))
        assert "stop" in rig.board("reader-body") and "BLOCK TABLE" not in rig.board("reader-body")


async def test_an_id_that_nothing_has_is_reported() -> None:
    async with console() as rig:
        await search(rig, "no-such")
        await rig.until(lambda: any("no request with no-such in its id is live" in text for text in reports(rig)))
        assert rig.app.screen is rig.app.main


async def test_a_request_beyond_the_list_is_found_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console(size=(100, 40)) as rig:
        folder = engine_folder(rig.source.picture.engine.id) / "history"
        segment(folder, BEGIN, monkeypatch)
        segment(folder, BEGIN + 60.0, monkeypatch)
        await search(rig, "R-45")
        await rig.until(lambda: "is not kept" in rig.board("reader-body"))
        assert "r-45" in rig.board("reader-title")
        await rig.pilot.press("escape", "H")
        await rig.until(lambda: bool(listed(rig)))
        await rig.pilot.press("slash", *"r-11", "enter")
        await rig.until(lambda: isinstance(rig.app.screen, RequestScreen) and "r-115" in rig.board("reader-title"))


async def test_the_command_line_opens_an_ended_request_by_the_id_of_its_client() -> None:
    async with console(size=(80, 40)) as rig:
        one = ended(1, id="chatcmpl-trace-42-0123456789ab", reason="stop", sources=SOURCES, **HTTP)
        rig.source.details["finished"] = FinishedDetail(requests=[one, ended(2, id="chatcmpl-trace-7-0123456789ab")])
        for text in ("trace-42", "...42-0123456789ab", "chatcmpl-trace-4"):
            await rig.pilot.press("colon", *f"show {text}", "enter")
            await rig.until(lambda: "20ms 44ms" in rig.board("reader-body"))
            assert "chatcmpl-trace-42-0123456789ab" in rig.board("reader-title")
            assert "prompt 137: device 16 · nvme0 100 · computed 21" in rig.board("reader-body")
            assert "abort" not in rig.board("reader-foot"), "no verb acts on it any more"
            await rig.pilot.press("escape")
        await rig.pilot.press("colon", *"show chatcmpl-trace", "enter")
        await rig.until(lambda: "chatcmpl-trace is ambiguous" in " ".join(rig.board("reader-body").split()))


async def test_the_details_of_a_request_that_nothing_has_say_how_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console(size=(80, 24)) as rig:
        segment(engine_folder(rig.source.picture.engine.id) / "history", BEGIN, monkeypatch)
        oldest = ended(30)
        rig.source.details["finished"] = FinishedDetail(requests=[ended(1), oldest])
        await rig.pilot.press("colon", *"show no-such", "enter")
        list_since, record_since = clock_text(oldest.wall), clock_text(BEGIN)
        words = (
            f"no request no-such; the engine keeps the newest 1,000 that ended (those since {list_since}), "
            f"its record begins at {record_since}"
        )
        for _ in range(2):
            await rig.until(lambda: words in " ".join(rig.board("reader-body").split()))
            rig.app.screen.start_load()
            await rig.pilot.pause()


async def test_new_ends_come_in_at_the_top_and_a_selection_stays() -> None:
    async with console() as rig:
        await open_finished(rig)
        await rig.pilot.press("down", "down")
        new = [ended(0, id="r-new", wall=BEGIN + 1), *(ended(number) for number in range(40))]
        rig.source.details["finished"] = FinishedDetail(requests=new)
        rig.app.screen.start_load()
        await rig.until(lambda: "r-new" in listed(rig))
        assert rig.board("reader-body").splitlines()[5].startswith("> r-2"), "the selected one, a row further down"
        await rig.pilot.press("R", "R")
        assert rig.board("reader-body").splitlines()[2].startswith("> r-new"), "a new order begins at the top"


async def test_a_lost_link_keeps_the_list_and_says_so() -> None:
    async with console() as rig:
        await open_finished(rig)
        rig.source.details["finished"] = LinkLost("the gateway gave no answer", sent=True)
        rig.app.screen.start_load()
        await rig.until(lambda: "the gateway gave no answer" in rig.board("reader-body"))
        assert listed(rig)[0] == "r-0"


async def test_without_any_end_the_screen_says_so() -> None:
    async with console() as rig:
        rig.source.details["finished"] = FinishedDetail(requests=[])
        await rig.pilot.press("colon", *"finished", "enter")
        await rig.until(lambda: "no request has ended" in rig.board("reader-body"))
        await rig.pilot.press("enter", "down", "S", "o", "R", "slash", "x", "enter")
        assert "no request has ended" in rig.board("reader-body")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_latencies_are_shown_at_every_width(width: int) -> None:
    order = FinishedScreen(ConsoleApp(FakeSource(None)))._order
    head = finished_table.rows([ended(1)], order, None, width, 0, 5)[0]
    text = "".join(part for part, _ in head.segs)
    assert all(title in text for title in ("QUEUE", "TTFT", "ITL", "REASON")) and len(text) <= width


# --- the past -------------------------------------------------------------------------------------------------


def segment(
    folder: Path, begin: float, monkeypatch: pytest.MonkeyPatch, *, old: bool = False, name: str = "r-{}"
) -> Path:
    """Write a minute in which a request ended every ten seconds; `old`: by an engine that wrote no figures."""
    folder.mkdir(parents=True, exist_ok=True)
    now, path = [begin], folder / f"{int(begin * 1e3):015d}.rec"
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: begin)
        recorder = Recorder(path, engine="e", name="inc", packed=True, clock=lambda: now[0])
    for second in range(60):
        now[0] = begin + second
        recorder.write(picture(second))
        if second % 10 == 5:
            info = ended(second // 10, wall=now[0], ended_s=0.0, id=name.format(int(now[0] - BEGIN)))
            recorder.write(Event(seq=1, wall=now[0], kind="request.finished", text="x", finished=None if old else info))
    recorder.close()
    return path


def minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: bool) -> list[Path]:
    return [segment(tmp_path / "h", BEGIN + at, monkeypatch, **options) for at in (0.0, 60.0, 120.0)]


def test_the_record_has_the_ends_up_to_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptFinished(minutes(tmp_path, monkeypatch))
    for _ in range(2):  # the second time from memory
        found = kept.before(BEGIN + 80.0)
        assert [one.id for one in found.requests] == ["r-75", "r-65", *(f"r-{at}" for at in range(55, 0, -10))]
        assert [one.ended_s for one in found.requests[:2]] == [5.0, 15.0]
        assert (found.since, found.unread) == (BEGIN, 0)
    assert len(kept.before(BEGIN + 999.0).requests) == 18
    assert kept.before(BEGIN - 1.0).requests == []


def test_a_thousand_are_enough_and_older_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = minutes(tmp_path, monkeypatch)
    monkeypatch.setattr("ppconsole.link.kept_finished.FINISHED_MOST", 8)
    kept = KeptFinished(paths)
    found = kept.before(BEGIN + 999.0)
    assert len(found.requests) == 8 and found.since is None and paths[0] not in kept._files


def test_files_of_an_older_engine_and_damaged_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = minutes(tmp_path, monkeypatch, old=True)
    new = segment(tmp_path / "h", BEGIN + 180.0, monkeypatch)
    new.write_bytes(new.read_bytes()[:-200])
    (broken := tmp_path / "h" / "999999999999999.rec").write_bytes(b"no recording")
    found = KeptFinished([*paths, new, broken]).before(BEGIN + 999.0)
    assert found.unread == 18 and 0 < len(found.requests) <= 6


def test_a_look_that_takes_too_long_ends_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptFinished(minutes(tmp_path, monkeypatch))
    assert kept.before(BEGIN + 999.0, read_s=0.0).requests == []
    ticks = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    found = kept.before(BEGIN + 999.0, read_s=2.5)
    assert len(found.requests) == 12 and found.since == BEGIN + 60.0
    assert len(kept.before(BEGIN + 999.0, read_s=2.5).requests) == 18


async def test_in_a_past_the_list_follows_the_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = History.of_segments(minutes(tmp_path, monkeypatch))
    source = ReplaySource(past, begin=BEGIN + 80.0, paused=True)
    app = ConsoleApp(source, read_only=True, clock=Clock(), theme="pp-dark")
    async with app.run_test(size=(100, 30)) as pilot:
        rig = Rig(app, pilot, source, Clock())  # type: ignore[arg-type]
        await rig.until(lambda: app.model.state.snapshot is not None)
        app.tick()
        await rig.pilot.press("H")
        await rig.until(lambda: isinstance(app.screen, FinishedScreen) and listed(rig)[:1] == ["r-75"])
        since = time.strftime("%H:%M:%S", time.localtime(BEGIN))
        assert "those that ended before are not kept" in rig.board("reader-body") and since[:2] != ""
        await rig.pilot.press("right")
        app.screen.start_load()
        await rig.until(lambda: listed(rig)[:1] == ["r-85"])
        await rig.pilot.press("escape", "slash", *"r-95", "enter")
        await rig.until(lambda: any("no request with r-95" in text for text in reports(rig)))
        await rig.pilot.press("escape", "slash", *"R-25", "enter")
        await rig.until(lambda: isinstance(app.screen, RequestScreen) and "r-25" in rig.board("reader-title"))
        await rig.pilot.press("escape", "escape", "H")
        await rig.until(lambda: isinstance(app.screen, FinishedScreen) and listed(rig)[:1] == ["r-85"])
        await rig.pilot.press("enter")
        await rig.until(lambda: "is not kept: this recording has no request" in rig.board("reader-body"))
        assert "r-85" in rig.screen()


async def test_an_engine_that_has_ended_has_its_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_engine()
    engine = ended_engines()[0]
    begin = engine.end.wall - 59.0
    segment(engine_folder(engine.record.id) / "history", begin, monkeypatch)
    source = EndedSource(engine)
    detail = await source.inspect("finished")
    assert isinstance(detail, FinishedDetail) and len(detail.requests) == 6
    await source.close()


def test_the_command_lists_the_requests_of_an_engine_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept_engine()
    engine = ended_engines()[0]
    segment(engine_folder(engine.record.id) / "history", engine.end.wall - 59.0, monkeypatch)
    done = Cli(capsys, tmp_path)("-e", "inc", "finished", "--filter", "reason:length")
    assert done.out.splitlines()[0].split() == list(FINISHED.values()) and len(done.out.splitlines()) == 5
    assert "those that ended before are not kept" in done.err
