"""The Diagnosis screen and the export on a real engine: a stopped stage is named, and the suggestion continues it."""

from __future__ import annotations

import json
import zipfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from ppconsole.app import ConsoleApp
from ppconsole.link.engine_link import EngineLink
from ppconsole.screens.confirm import Confirm
from ppconsole.screens.diagnosis_screen import DiagnosisScreen
from ppconsole.view.cells import text_of
from ppengine.common.config import profiles_dir
from ppengine.protocol.inspection import AboutDetail, FaultDetail
from serving import Served, process_state
from test_pilot_real import Rig
from textual.widgets import Button

from profiles import small

SECRET = "zebra parliament"


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    profile = small(
        profiles_dir() / "models" / "tiny",
        name="screens",
        model={"dtype": "float32", "skip_tokenizer": False, "max_model_len": 1024},
        memory={"device_mib": 96, "swap_space_gib": 0.03},
        scheduler={"max_num_seqs": 16},
    )
    with Served(profile) as served:
        yield served


@asynccontextmanager
async def console(engine: Served, size: tuple[int, int] = (120, 50)) -> AsyncIterator[Rig]:
    link = EngineLink(engine.record, find=lambda: engine.record, user="pilot", slow=True)
    async with engine.operator() as op:
        app = ConsoleApp(link, theme="pp-dark")
        async with app.run_test(size=size) as pilot:
            rig = Rig(app, pilot, op)
            await rig.until(lambda: app.model.state.snapshot is not None, "a first snapshot")
            yield rig
            await rig.clear()


def body(rig: Rig) -> str:
    screen = rig.app.screen
    assert isinstance(screen, DiagnosisScreen)
    return "\n".join(text_of(line) for line in screen.body(screen.size.width))


async def test_a_stopped_stage_is_drawn_frozen_and_continued(engine: Served) -> None:
    async with console(engine) as rig:
        name = await rig.running()
        await rig.pilot.press("d")
        await rig.until(lambda: "LAST 64 STEPS  as of" in body(rig) and "R " in body(rig), "the last steps")
        assert "no fault found: serving" in body(rig)
        with engine.stopped("stage1"):
            await rig.until(lambda: "! STAGE 1 stopped" in body(rig), "the stage is named")
            await rig.until(lambda: "frozen at the fault" in body(rig) and "! stage 1 ROOT" in body(rig), "the record")
            text = body(rig)
            assert "╔═ 1 ROOT" in text
            await rig.until(lambda: "──►" in body(rig) or "core waits for stage 1" in body(rig), "who waits for it")
            assert "ppconsole continue 1" in text and str(engine.pids["stage1"]) in text
            shown = rig.app.screen
            await rig.pilot.press("enter")
            await rig.until(lambda: isinstance(rig.app.screen, Confirm), "a dialog")
            dialog = rig.app.screen
            assert rig.app.focused is dialog.query_one("#cancel")
            await rig.until(lambda: not dialog.query_one("#confirm", Button).disabled, "a plan")
            assert process_state(engine.pids["stage1"]) == "T", "a plan does nothing"
            await rig.pilot.press("right", "enter")
            await rig.until(lambda: rig.app.screen is shown, "it is done")
            assert process_state(engine.pids["stage1"]) != "T"
        await rig.until(lambda: "no fault now; this one was healed at" in body(rig), "it is over")
        assert "frozen at the fault" in body(rig)
        before = (await rig.op.detail(name)).output_tokens
        assert len(await rig.op.written(name, before + 5)) > before, "it goes on"
        await rig.pilot.press("escape")
        kept = await rig.op.link.inspect("fault")
        assert isinstance(kept, FaultDetail) and kept.over_wall is not None and kept.verdict.stage == 1
        (stopped,) = [stage for stage in kept.rings.stages if stage.stage == 1]
        assert stopped.pid == engine.pids["stage1"] and {each.ring for each in stopped.threads} >= {"main"}
        steps = {record.step for record in stopped.threads[0].records if record.kind == "step"}
        # It may have been stopped between counting a step and recording it.
        assert len(steps) > 10 and stopped.begun_step - max(steps) in (0, 1)


async def test_an_export_has_everything_and_no_text(engine: Served, tmp_path: Path) -> None:
    async with engine.operator() as op, op.frozen(SECRET, max_tokens=600) as name:
        output = (await op.detail(name)).output_text
        assert len(output.strip()) > 3
        about = await op.link.inspect("about")
        assert isinstance(about, AboutDetail) and about.profile["name"] == "screens" and "torch" in about.versions
        plain, full = tmp_path / "a.zip", tmp_path / "b.zip"
        ran = await op.cli("export", str(plain))
        assert ran.code == 0, ran.err
        assert f"ppconsole replay {plain}" in ran.err
        again = await op.cli("export", str(plain))
        assert again.code == 1 and again.err == f"error: {plain} exists; name a new file, or say --force\n"
        assert (await op.cli("export", str(plain), "--force", "--json")).code == 0
        assert (await op.cli("export", str(full), "--with-text")).code == 0
        texts = {}
        for path in (plain, full):
            with zipfile.ZipFile(path) as archive:
                texts[path] = {part: archive.read(part).decode() for part in archive.namelist()}
        assert set(texts[plain]) >= {"manifest.json", "snapshot.json", "events.jsonl", "audit.jsonl", "rings.json",
                                     "stacks.json", "about.json", "findings.json"}  # fmt: skip
        everything = "".join(texts[plain].values())
        assert SECRET not in everything and output.strip() not in everything
        assert output.strip() in json.loads(texts[full]["requests.jsonl"].splitlines()[-1])["output_text"]
        assert '"verb":"submit"' in texts[plain]["audit.jsonl"] and "op.applied" in texts[plain]["events.jsonl"]
        rings = json.loads(texts[plain]["rings.json"])["stages"]
        assert [stage["pid"] for stage in rings] == [engine.pids[f"stage{k}"] for k in range(len(rings))]
        assert any(record["kind"] == "forward" for record in rings[0]["threads"][0]["records"])
        ran = await op.cli("replay", str(plain))
        assert ran.code == 0 and "stopped" in ran.out, ran.err
