"""A console whose key is a viewer's: verbs that the engine would refuse are not offered, and their keys say why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import snapshots
from fake_gateway import FakeGateway
from ppconsole.app import ConsoleApp
from ppconsole.link.attachment import Timing
from ppconsole.link.engine_link import EngineLink
from ppconsole.screens.confirm import Confirm
from ppconsole.view import commands
from ppengine.protocol.recording import LinkState
from ppengine.protocol.verb_table import ROWS, Role
from test_tui_console import Rig, console

SOON = Timing(ping_s=0.05)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@asynccontextmanager
async def attached(role: Role) -> AsyncIterator[tuple[FakeGateway, Rig]]:
    """Yield a gateway that gives every console `role`, and a console on it."""
    with FakeGateway(snapshot=snapshots.snapshot(2, 6)) as fake:
        fake.role = role
        app = ConsoleApp(EngineLink(fake.record, timing=SOON), theme="pp-dark")
        async with app.run_test(size=(80, 24)) as pilot:
            rig = Rig(app, pilot, app.source, None)  # type: ignore[arg-type]
            await rig.until(lambda: app.model.state.snapshot is not None)
            app.tick()
            yield fake, rig


async def settled(rig: Rig, done: Callable[[], bool]) -> None:
    """Wait for the gateway, painting as the clock does."""
    async with asyncio.timeout(20):
        while not done():
            await asyncio.sleep(0.05)
            rig.app.paint()


async def test_a_viewer_is_offered_no_verb_and_a_key_says_why() -> None:
    async with attached("viewer") as (fake, rig):
        assert " VIEWER " in rig.board("top") and " RW " not in rig.board("top")
        foot = rig.board("foot")
        assert "filter" in foot and not any(word in foot for word in ("prompt", "abort", "preempt", "memory", "pause"))
        await rig.pilot.press("a", "m", "i")
        texts = [note.text for note in rig.app.notes]
        assert texts == [
            "you are viewer here; abort needs operator", "you are viewer here; set-memory needs operator",
            "you are viewer here; prompt needs operator",
        ]  # fmt: skip
        assert rig.app.screen is rig.app.main and not rig.app.main.line.is_open
        await rig.pilot.press("colon", *"drain --undo", "enter")
        assert "you are viewer here; drain needs operator" in rig.screen()
        await rig.pilot.press("escape", "question_mark")
        keys = rig.board("reader-body")
        await rig.pilot.press("pagedown")
        keys = (keys + rig.board("reader-body")).partition(" STAGES")[0]
        assert "filter; Esc clears it" in keys and "command line" in keys
        assert not any(row.key.help in keys for row in ROWS.values() if row.key) and "write a prompt" not in keys
        assert not fake.commands


async def test_a_viewer_is_not_told_to_write_a_prompt() -> None:
    async with attached("viewer") as (fake, rig):
        assert "writes a prompt" not in rig.screen() and rig.app.main.line.input.placeholder == ""
        fake.snapshot.requests = []
        fake.snapshot.requests_total = 0
        await settled(rig, lambda: "no requests" in rig.screen())
        assert "writes a prompt" not in rig.screen()


async def test_verbs_come_with_the_role_and_go_with_it_while_the_console_is_attached() -> None:
    async with attached("viewer") as (fake, rig):
        fake.role = "operator"
        await settled(rig, lambda: " RW " in rig.board("top"))
        assert "preempt" in rig.board("foot")
        dialog = await rig.confirm("a")
        assert isinstance(dialog, Confirm)
        fake.role = "viewer"
        await settled(rig, lambda: "you are viewer here; abort needs operator" in rig.board("dialog-body"))
        assert dialog.query_one("#confirm").disabled


async def test_a_screen_of_its_own_verbs_offers_them_by_role_too() -> None:
    picture = snapshots.halted(2, 1)
    picture.verdicts[0].suggest = "ppconsole continue 1"
    async with console(picture) as rig:
        rig.source.send(LinkState(state="live", role="viewer"))
        await rig.pilot.press("v", "1")
        assert "ledger" not in rig.board("reader-foot")
        assert "you are viewer here; check ledger needs operator" in rig.screen()
        assert "\n  1 ledger" not in rig.board("reader-body")
        await rig.pilot.press("escape", "d", "enter")
        assert "you are viewer here; continue needs operator" in rig.screen()
        assert "continue" not in rig.board("reader-foot")
        assert "you are viewer here; continue needs operator" in rig.board("reader-body")
        rig.source.send(LinkState(state="live"))
        rig.app.paint()
        assert "continue" not in rig.board("reader-foot"), "a state without a role leaves it as it is"


def test_a_viewer_completes_no_verb() -> None:
    assert set(commands.names_for("viewer")) == {*commands.SCREENS, "store ls"}
    assert "stop" not in commands.names_for("operator") and "stop" in commands.names_for("admin")
    assert "abort" in commands.names_for("operator")
