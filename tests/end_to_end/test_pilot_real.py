"""Every verb of the console on a real engine, by its keys; its effect is read from the engine, not from the screen."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from engines import Engine, wait_until
from operators import Operator
from ppconsole.app import ConsoleApp
from ppconsole.link.engine import EngineLink
from ppconsole.screens.confirm import Confirm
from ppconsole.view.cells import text_of
from ppconsole.widgets.lines import Lines
from ppengine.config import profiles_dir
from ppengine.protocol.control import Outcome, Resume, SetMemory
from serving import Served, process_state
from textual.pilot import Pilot
from textual.widgets import Button

from profiles import small

TOKENS = 1000
BESIDE = 8
"""Requests that run beside the one that a verb is about, so that it lasts."""


def profile(name: str) -> Any:
    return small(
        profiles_dir() / "models" / "tiny",
        name=name,
        model={"dtype": "float32", "skip_tokenizer": False, "max_model_len": 1024},
        memory={"device_mib": 96, "swap_space_gib": 0.03},
        scheduler={"max_num_seqs": 16, "preemption": "swap"},
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    with Served(profile("pilot")) as served:
        yield served


class Rig:
    """A console under a pilot, and an operator beside it who sees what the engine says."""

    def __init__(self, app: ConsoleApp, pilot: Pilot[int], op: Operator | None = None) -> None:
        self.app, self.pilot, self.op = app, pilot, op
        self.notes: list[str] = []
        tell = app.report

        def report(text: str, *, bad: bool) -> None:
            self.notes.append(text)
            tell(text, bad=bad)

        app.report = report  # type: ignore[method-assign]

    def board(self, name: str) -> str:
        return "\n".join(text_of(row) for row in self.app.screen.query_one(f"#{name}", Lines).rows)

    async def until(self, ready: Callable[[], Any], what: str, seconds: float = 10.0) -> None:
        for _ in range(int(seconds / 0.02)):
            if ready():
                return
            await self.pilot.pause(0.02)
        raise AssertionError(f"not within {seconds:g} s: {what}; told: {self.notes}")

    async def running(self) -> str:
        """Return a request that writes, has most of its way before it, and is the selected one here."""
        names = await self.op.submit_all([[5, 6, 7, 8]] * BESIDE, max_tokens=TOKENS)
        await self.op.written(names[-1], 3)
        await self.select(names[-1])
        return names[-1]

    async def select(self, name: str) -> None:
        self.app.main.requests.choose(name)
        await self.until(lambda: self.app.main.requests.sync([r.id for r in self.app.main.arranged()]) == name, name)

    async def ask(self, *keys: str) -> Confirm:
        """Press the keys of a verb; return its dialog with the engine's plan."""
        if self.op is not None:  # the console must have seen what the operator has, or its revision would be old
            seen = (await self.op.now()).sampled_at
            await self.until(lambda: self.app.state.snapshot.sampled_at >= seen, "the newest picture")
        await self.pilot.press(*keys)
        await self.until(lambda: isinstance(self.app.screen, Confirm), "a dialog")
        dialog = self.app.screen
        assert isinstance(dialog, Confirm)
        assert self.app.focused is dialog.query_one("#cancel"), "the focus is on Cancel"
        await self.until(lambda: not dialog.query_one("#confirm", Button).disabled, "a plan")
        return dialog

    async def do(self, *keys: str) -> None:
        """Ask, then confirm and see the dialog close."""
        await self.ask(*keys)
        await self.confirm()

    async def do_held(self, *keys: str) -> None:
        """Do, with the requests held in place for as long as the keys take."""
        with self.op.engine.stopped("stage1"):
            await self.ask(*keys)
        await self.confirm()

    async def confirm(self) -> None:
        await self.pilot.press("right", "enter")
        await self.until(lambda: self.app.screen is self.app.main, "the end of the verb")

    async def clear(self) -> None:
        """Abort what is left, so that the next test finds an idle engine."""
        await self.op.abort(*[request.id for request in (await self.op.now()).requests])
        await self.op.idle()


@asynccontextmanager
async def console(engine: Served) -> AsyncIterator[Rig]:
    link = EngineLink(engine.record, find=lambda: engine.record, user="pilot")
    async with engine.operator() as op:
        app = ConsoleApp(link, theme="pp-dark")
        async with app.run_test(size=(132, 40)) as pilot:
            rig = Rig(app, pilot, op)
            await rig.until(lambda: app.state.snapshot is not None, "a first snapshot")
            yield rig
            await rig.clear()


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
            output = rig.app.state.outputs.get(name)
            return output.tokens if output else 0

        await rig.until(lambda: shown() == count, "what is written so far is here")
        mine = rig.app.state.outputs[name]
        assert not mine.finished
        assert mine.text
        await rig.op.do(Resume())
        await rig.until(lambda: rig.app.state.outputs[name].finished, "it ends", 30)
        tokens, text, reason = await rig.op.output(name)
        assert text.startswith(mine.text)
        assert len(tokens) > count or reason == "stop"
        mine = rig.app.state.outputs[name]
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


async def test_memory_changes_as_the_plan_said(engine: Served) -> None:
    async with console(engine) as rig:
        before = (await rig.op.now()).engine
        await rig.running()
        await rig.pilot.press("m", *"0.5")
        await rig.until(lambda: "binding" in rig.board("memory-plan"), "the plan while typing")
        dialog = await rig.ask("enter")
        plan = dialog._answer
        assert isinstance(plan, Outcome)
        await rig.confirm()
        after = await rig.op.until(  # the new utilization is shown from when it was asked for
            lambda picture: (picture.engine.memory_utilization, picture.engine.state) == (0.5, "serving"),
            "half the memory",
        )
        assert after.engine.memory_revision == before.memory_revision + 1
        assert {stage.kv_blocks.mapped for stage in after.stages} == {plan.figures["blocks_after"]}
        await rig.do("colon", *"set-memory 0.9", "enter")
        await rig.op.until(lambda picture: picture.engine.memory_utilization == 0.9, "all the memory")


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
        await rig.until(lambda: rig.app.state.snapshot.engine.state == "paused", "the console knows")
        await rig.do("P")
        await rig.op.until(lambda picture: picture.engine.state == "serving", "serves")
        await rig.until(lambda: rig.app.state.snapshot.engine.state == "serving", "the console knows")
        await rig.running()
        with engine.stopped("stage1"):
            await rig.ask("D")
            await rig.pilot.press("right", "enter")
            await rig.op.until(lambda picture: picture.engine.state == "draining", "drains")
            await rig.until(lambda: "deferred" in rig.board("dialog-body"), "what it waits for is told")
            await rig.pilot.press("escape")
            await rig.until(lambda: rig.app.state.snapshot.engine.state == "draining", "the console knows")
        await rig.do("D")
        await rig.op.until(lambda picture: picture.engine.state == "serving", "takes requests again")


async def test_a_stopped_stage_is_named_and_continued(engine: Served) -> None:
    async with console(engine) as rig:
        name = await rig.running()
        with engine.stopped("stage1"):
            await rig.until(lambda: "STAGE 1 stopped" in rig.board("top"), "the banner names it", 5.0)
            await rig.pilot.press("tab", "down")
            await rig.do("c")
            assert process_state(engine.pids["stage1"]) != "T"
        await rig.op.until(lambda picture: not picture.verdicts, "the verdict is cleared")
        before = (await rig.op.detail(name)).output_tokens
        assert len(await rig.op.written(name, min(before + 20, TOKENS))) > before, "it goes on"


async def test_a_stage_is_cordoned_checked_and_started_anew(engine: Served) -> None:
    async with console(engine) as rig:
        name = await rig.running()
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
        await rig.do("x")
        await rig.op.until(lambda picture: picture.engine.state == "serving" and not picture.verdicts, "serves again")
        engine.pids = engine.engine.find_processes(5)
        assert engine.pids["stage1"] != old
        assert len(await rig.op.written(name, TOKENS)) == TOKENS, "nothing of it was lost"


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


async def test_the_console_outlives_the_engine_and_stops_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    first = Served(profile("again"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(first.runtime))
    app = ConsoleApp(EngineLink(first.record, user="pilot", slow=True), theme="pp-dark")
    second = None
    try:
        async with app.run_test(size=(100, 30)) as pilot:
            rig = Rig(app, pilot)
            await rig.until(lambda: app.state.snapshot is not None, "a first snapshot")
            epoch = app.state.epoch
            for pid in (*first.pids.values(), first.engine.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await rig.until(lambda: app.state.link.state == "lost", "the loss is seen")
            await rig.until(lambda: "link lost" in rig.board("top"), "and told")
            assert app.grey
            await pilot.press("P")
            assert app.screen is app.main, "no verb without a link"
            second = Engine(first.runtime, ["ppengine.supervisor", str(first.runtime / "profile.yaml")])
            second.find_processes(5)
            await rig.until(lambda: app.state.epoch not in (None, epoch), "the new epoch", 40)
            await rig.until(lambda: app.state.snapshot.engine.state == "serving" and not app.grey, "it is live", 40)
            assert any(event.kind == "link.new-epoch" for event in app.state.events)
            await rig.ask("colon", *"stop", "enter")
            # The engine may be gone before its answer is read: then the dialog stays and says that it cannot know.
            await rig.pilot.press("right", "enter")
            assert second.wait() == 0
            wait_until(second.nothing_left, "all of it is gone")
            await rig.until(lambda: app.state.link.state == "lost", "the console stays, and says so")
            assert app.is_running
    finally:
        if second is not None:
            second.end()
        first.remove()
