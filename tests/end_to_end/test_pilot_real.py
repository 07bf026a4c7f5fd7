"""Every verb of the console on a real engine, by its keys; its effect is read from the engine, not from the screen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec
import pytest
from pilots import TOKENS, Rig, console
from ppconsole.app import ConsoleApp
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.history import History, segments
from ppconsole.link.kept_finished import KeptFinished
from ppengine.common.config import profiles_dir
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.verbs import Resume, SetMemory
from serving import LASTING_S, Served, process_state
from textual.widgets import Button

from profiles import small

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    profile = small(
        profiles_dir() / "models" / "tiny",
        name="pilot",
        model={"dtype": "float32", "skip_tokenizer": False, "max_model_len": 1024},
        memory={"device_mib": 96, "swap_space_gib": 0.03},
        scheduler={"max_num_seqs": 16, "preemption": "swap"},
    )
    with Served(profile, step_s=LASTING_S) as served:
        yield served


async def test_a_prompt_streams_its_text(engine: Served) -> None:
    async with console(engine) as rig:
        await rig.op.pause()
        await rig.pilot.press("i", *"Once", "space", *"upon", "enter")
        await rig.until(lambda: rig.app.following.request, "the request is followed")
        name = rig.app.following.request
        assert name is not None
        while not (part := await rig.op.detail(name)).output_tokens:
            await rig.op.step()
        assert part.owner == "pilot"
        assert part.state != "finished"
        count = part.output_tokens

        def shown() -> int:
            output = rig.app.model.state.outputs.get(name)
            return output.tokens if output else 0

        await rig.until(lambda: shown() == count, "what is written so far is here")
        mine = rig.app.model.state.outputs[name]
        assert not mine.finished
        assert mine.text
        await rig.op.do(Resume())
        await rig.until(lambda: rig.app.model.state.outputs[name].finished, "it ends", 30)
        tokens, text, reason = await rig.op.output(name)
        assert text.startswith(mine.text)
        assert len(tokens) > count or reason == "stop"
        mine = rig.app.model.state.outputs[name]
        assert (mine.text, mine.tokens, mine.finish_reason) == (text, len(tokens), reason)
        await rig.pilot.press("escape")
        await rig.until(lambda: text.split()[-1] in rig.board("left"), "its end is on the screen")


async def test_preempt_swap_release_and_abort_a_request(engine: Served) -> None:
    async with console(engine) as rig:
        name = await rig.running()
        await rig.do_held("p")
        await rig.op.request(name, lambda request: request.preemptions == 1, "was preempted")
        await rig.do_held("o")
        held = await rig.op.request(name, lambda request: request.state == "held", "is held")
        assert held.blocks == 0
        assert held.swap_blocks > 0
        await rig.select(name)
        await rig.do_held("n")
        back = await rig.op.request(name, lambda request: request.state == "running", "runs again")
        assert back.swap_blocks == 0
        await rig.do_held("o")
        await rig.op.request(name, lambda request: request.state == "held", "is held again")
        await rig.do_held("r")
        await rig.op.request(name, lambda request: request.state != "held", "is let go")
        await rig.do_held("a")
        await rig.op.until(lambda picture: all(each.id != name for each in picture.requests), "it is gone")
        assert (await rig.op.output(name))[2] == "abort"
        told = [event for event in await rig.op.heard() if event.kind == "op.applied" and event.request == name]
        verbs = [event.text.split()[0] for event in told]
        assert verbs == ["submit", "preempt", "swap-out", "swap-in", "swap-out", "release", "abort"], "one line each"
        assert {event.by for event in told[1:]} == {"pilot"}


async def test_all_requests_of_an_owner_are_marked_and_aborted(engine: Served) -> None:
    async with console(engine) as rig, engine.operator("alice") as alice:
        mine = await alice.submit_all([[5, 6, 7, 8]] * 4, max_tokens=TOKENS)
        others = await rig.op.submit_all([[5, 6, 7, 8]] * 4, max_tokens=TOKENS)
        await rig.op.written(others[-1], 3)
        with engine.stopped("stage1"):  # None of them writes while keys are pressed.
            await rig.until(lambda: len(rig.app.model.arranged()) == 8, "all are listed")
            await rig.pilot.press("slash", *"owner:alice", "enter", "asterisk")
            assert "4 marked  /owner" in rig.board("left")
            assert sorted(rig.app.main.selection.marked_ids()) == sorted(mine)
            await rig.ask("a")
            body = rig.board("dialog-body")
            assert "abort 4 of 4 requests" in body and "4 running" in body
            assert "device blocks (" in body and "computed tokens are lost" in body
        await rig.confirm()
        picture = await rig.op.until(lambda picture: not {each.id for each in picture.requests} & set(mine), "ended")
        assert [(await rig.op.output(name))[2] for name in mine] == ["abort"] * 4
        assert {each.id for each in picture.requests} == set(others)
        for name in others:
            before = (await rig.op.detail(name)).output_tokens
            assert len(await rig.op.written(name, min(before + 20, TOKENS))) > before, "the others go on"
        assert [outcome.text for outcome in rig.outcomes] == ["4 of 4 requests"]
        told = [event.text for event in await rig.op.heard() if event.kind == "op.applied"]
        assert [text for text in told if text.startswith("abort")] == ["abort 4 requests: 4 of 4 requests"], "one line"
        await rig.until(lambda: rig.app.main.selection.marked_ids() == (), "the marks went with them")


async def test_a_confirm_that_was_overtaken_reports_the_conflict(engine: Served) -> None:
    async with console(engine) as rig:
        dialog = await rig.ask("colon", *"set-memory 0.5", "enter")
        await rig.op.do(SetMemory(utilization=0.8))
        await rig.pilot.press("right", "enter")
        await rig.until(lambda: "CONFLICT" in rig.board("dialog-body"), "the conflict is told")
        body = rig.board("dialog-body")
        assert "0.8" in body or ".80" in body
        assert (await rig.op.now()).engine.memory_utilization == 0.8, "nothing was done"
        await rig.pilot.press("tab", "enter")
        await rig.until(lambda: not dialog.query_one("#confirm", Button).disabled, "a new plan")
        await rig.confirm()
        await rig.op.until(lambda picture: picture.engine.memory_utilization == 0.5, "the second look was acted on")
        await rig.op.do(SetMemory(utilization=0.9))


async def test_pause_resume_drain_and_undo(engine: Served) -> None:
    async with console(engine) as rig:
        await rig.do("P")
        await rig.op.until(lambda picture: picture.engine.state == "paused", "is paused")
        await rig.until(lambda: rig.app.model.state.snapshot.engine.state == "paused", "the console knows")
        await rig.do("P")
        await rig.op.until(lambda picture: picture.engine.state == "serving", "serves")
        await rig.until(lambda: rig.app.model.state.snapshot.engine.state == "serving", "the console knows")
        await rig.running()
        with engine.stopped("stage1"):
            await rig.ask("D")
            await rig.pilot.press("right", "enter")
            await rig.op.until(lambda picture: picture.engine.state == "draining", "drains")
            await rig.until(lambda: "deferred" in rig.board("dialog-body"), "what it waits for is told")
            await rig.pilot.press("escape")
            await rig.until(lambda: rig.app.model.state.snapshot.engine.state == "draining", "the console knows")
        await rig.do("D")
        await rig.op.until(lambda picture: picture.engine.state == "serving", "takes requests again")


async def test_a_stopped_stage_is_named_and_continued(engine: Served) -> None:
    async with console(engine) as rig:
        name = await rig.running()
        with engine.stopped("stage1"):
            await rig.until(lambda: "STAGE 1 stopped" in rig.board("top"), "the banner names it")
            await rig.pilot.press("tab", "down")
            await rig.do("c")
            assert process_state(engine.pids["stage1"]) != "T"
        await rig.op.until(lambda picture: not picture.verdicts, "the verdict is cleared")
        before = (await rig.op.detail(name)).output_tokens
        assert len(await rig.op.written(name, min(before + 20, TOKENS))) > before, "it goes on"


async def test_a_stage_is_cordoned_checked_and_restarted(engine: Served) -> None:
    async with console(engine) as rig:
        await rig.running()
        await rig.op.pause()  # None of them writes while keys are pressed.
        await rig.pilot.press("tab", "down")
        await rig.do("C")
        picture = await rig.op.until(lambda picture: picture.stages[1].cordon is not None, "stage 1 is cordoned")
        assert picture.stages[1].cordon.by == "pilot" and picture.stages[0].cordon is None
        await rig.until(lambda: "CORDON 1" in rig.board("top"), "the banner says so")
        await rig.do("C")
        await rig.op.until(lambda picture: picture.stages[1].cordon is None, "it is lifted")
        for switch in ("on", "off"):
            line = f"check finite {switch}".replace(" ", " space ").split(" ")
            keys = [key for word in line for key in ((word,) if word == "space" else word)]
            await rig.do("colon", *keys, "enter")
            await rig.op.until(lambda picture, on=switch == "on": picture.engine.checks.finite is on, switch)
        old = engine.pids["stage1"]
        await rig.op.do(Resume())
        name = await rig.running()
        await rig.do_held("x")
        await rig.op.until(lambda picture: picture.engine.state == "serving" and not picture.verdicts, "serves again")
        engine.find_pids()
        assert engine.pids["stage1"] != old
        before = (await rig.op.detail(name)).output_tokens
        assert len(await rig.op.written(name, min(before + 20, TOKENS))) > before, "it goes on"


async def test_details_can_be_read(engine: Served) -> None:
    async with console(engine) as rig:
        name = await rig.running()
        await rig.op.pause()  # or it might end before all has been read
        wanted = {"s": "worker.py", "l": "pilot attached", "e": "submit", "d": "no fault", "enter": "BLOCK TABLE"}
        for key, words in wanted.items():
            await rig.pilot.press(key)
            await rig.until(lambda words=words: words in rig.board("reader-body"), f"{key}: {words}")
            await rig.pilot.press("escape")
        await rig.pilot.press("colon", *f"show {name}", "enter")
        await rig.until(lambda: name in rig.board("reader-title"), "show")
        await rig.pilot.press("escape", "tab", "enter")
        await rig.until(lambda: str(engine.pids["stage0"]) in rig.board("reader-body"), "the stage's process")
        await rig.pilot.press("escape")
        await rig.op.do(Resume())


async def test_requests_that_ended_are_listed_live_and_from_the_record(engine: Served) -> None:
    async with console(engine) as rig:
        names = await rig.op.submit_all([[5, 6, 7], [8, 9]], max_tokens=12)
        ends = [await rig.op.output(name) for name in names]
        await rig.pilot.press("H")
        await rig.until(lambda: all(name in rig.board("reader-body") for name in names), "both are listed")
        await rig.pilot.press("slash", *f"{names[0]}", "enter", "enter")
        await rig.until(lambda: ends[0][1].split()[-1] in rig.board("reader-body"), "its text is still known")
        await rig.pilot.press("escape", "escape", "escape")
        assert rig.app.screen is rig.app.main
        live = await rig.op.link.inspect("finished")
        await rig.op.idle()
        past = History.of_segments(segments([engine_folder(engine.record.id) / "history"]))
        kept = KeptFinished(past.paths).before(time.time())
        past.close()
        wanted = [msgspec.structs.replace(one, ended_s=0.0) for one in live.requests]
        assert [msgspec.structs.replace(one, ended_s=0.0) for one in kept.requests] == wanted and len(wanted) >= 2


async def test_the_console_outlives_the_engine_and_stops_the_next(
    engine: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test of this engine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(engine.runtime))
    app = ConsoleApp(EngineLink(engine.record, user="pilot", slow=True), theme="pp-dark")
    async with app.run_test(size=(100, 30)) as pilot:
        rig = Rig(app, pilot)
        await rig.until(lambda: app.model.state.snapshot is not None, "a first snapshot")
        epoch = app.model.state.epoch
        engine.engine.end()
        await rig.until(lambda: app.model.state.link.state == "ended", "the end is seen")
        await rig.until(lambda: "ENDED" in rig.board("top") and "ended " in rig.board("top"), "and reported")
        assert app.model.grey
        await pilot.press("P")
        assert app.screen is app.main, "no verb without a link"
        await asyncio.to_thread(engine.start)
        await rig.until(lambda: app.model.state.epoch not in (None, epoch), "the new epoch", 40)
        await rig.until(
            lambda: app.model.state.snapshot.engine.state == "serving" and not app.model.grey, "it is live", 40
        )
        assert any(event.kind == "link.new-epoch" for event in app.model.state.events)
        await rig.ask("colon", *"stop", "enter")
        # The engine may be gone before its answer is read: then the dialog stays and says that it cannot know.
        await rig.pilot.press("right", "enter")
        await asyncio.to_thread(engine.ended, 0, "stopped by command")
        assert engine.engine.leftovers() == []
        await rig.until(lambda: app.model.state.link.state == "ended", "the console stays, and says so")
        assert "stopped by pilot" in rig.board("top")
        assert app.is_running
