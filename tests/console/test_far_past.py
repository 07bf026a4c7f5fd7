"""The past of an engine on another host: lists, whole copies, and every way in which copying ends early."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway
from kept_engines import kept_engine, kept_incident, minute
from link_helpers import FAST, Seen
from ppconsole.app import ConsoleApp
from ppconsole.link import far_past
from ppconsole.link import find as finding
from ppconsole.link.contexts import Context, Contexts, write_contexts
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.far_past import FarPast
from ppconsole.link.incident_source import IncidentSource
from ppconsole.link.last_hour import LastHour
from ppconsole.link.source import LinkLost, QueryFailed
from ppconsole.screens.diagnosis_screen import DiagnosisScreen
from ppengine.gateway.past_desk import PastDesk
from ppengine.protocol.control import Failed
from ppengine.protocol.discovery import EngineRecord, keep_record
from ppengine.protocol.kept_files import engine_folder, state_dir
from ppengine.protocol.past_files import PART_BYTES, ListPast, PastFile, PastListed, PastPart, ReadPast
from test_tui_console import Clock, Rig

MINUTES = 3
Question = ListPast | ReadPast


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGateway]:
    """An engine with an incident, three minutes of history, and an earlier engine of its name."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    monkeypatch.setattr(far_past, "_BACK_S", 0.3)
    with FakeGateway() as gateway:
        keep_record(gateway.record)
        folder = engine_folder(gateway.id)
        for number in range(MINUTES):
            minute(folder / "history", time.time() - 60.0 * (MINUTES - number), gateway.name)
        kept_incident(folder, 2)
        kept_incident(kept_engine("dead01", gateway.name), 1, age_s=110.0)
        gateway.past = PastDesk(folder, gateway.id, gateway.name).answer
        yield gateway


def elsewhere(fake: FakeGateway) -> EngineRecord:
    """Return the record of the engine as a console on another host has it."""
    return msgspec.structs.replace(fake.record, pid=0, run_dir="", address="tcp://10.0.0.5:7400")


@asynccontextmanager
async def linked(fake: FakeGateway) -> AsyncIterator[FarPast]:
    link, seen = EngineLink(elsewhere(fake), timing=FAST), Seen()
    await link.start(seen.take)
    try:
        await link.attached(60)
        yield FarPast(link)
    finally:
        await link.close()


def nothing(done: int, total: int) -> None:
    """Show no progress."""


def copies() -> list[Path]:
    return sorted(path for path in (state_dir() / "remote").rglob("*") if path.is_file())


def same(folder: Path, fake: FakeGateway) -> bool:
    """Return whether all copies in `folder` have the bytes of the engine's files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    original = engine_folder(fake.id)
    return all((original / path.relative_to(folder)).read_bytes() == path.read_bytes() for path in files)


def interposed(fake: FakeGateway, change: Callable[[Question, msgspec.Struct], msgspec.Struct]) -> None:
    """Let `change` see each question, and replace its answer."""
    desk = fake.past
    assert desk is not None
    fake.past = lambda question: change(question, desk(question))


async def test_the_hour_is_copied_whole_private_and_read_as_a_local_one(fake: FakeGateway) -> None:
    steps: list[tuple[int, int]] = []
    async with linked(fake) as past:
        found = await past.copy_history(lambda done, total: steps.append((done, total)))
    assert len(copies()) == MINUTES and same(found.folder, fake) and found.missing == ""
    assert steps[-1][0] == steps[-1][1] == sum(path.stat().st_size for path in copies())
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in copies())
    above = [path for path in (state_dir() / "remote").rglob("*") if path.is_dir()]
    assert {path.stat().st_mode & 0o777 for path in above} == {0o700}
    hour = LastHour(fake.id, found.folder)
    assert hour.history.end - hour.history.begin == pytest.approx(179.0, abs=1.0) and hour.log_folder is None
    hour.history.close()


async def test_only_what_is_new_is_read_again(fake: FakeGateway) -> None:
    reads: list[ReadPast] = []
    interposed(fake, lambda question, answer: (reads.append(question), answer)[1] if _reads(question) else answer)
    async with linked(fake) as past:
        await past.copy_history(nothing)
        newest = sorted((engine_folder(fake.id) / "history").iterdir())[-1]
        before = newest.stat().st_size
        reads.clear()
        await past.copy_history(nothing)
        assert reads == []
        with newest.open("ab") as file:
            file.write(b"what came since")
        found = await past.copy_history(nothing)
    assert [(read.offset, read.size) for read in reads] == [(before, 15)] and same(found.folder, fake)


def _reads(question: Question) -> bool:
    return isinstance(question, ReadPast)


async def test_minutes_that_the_host_has_no_more_are_removed(fake: FakeGateway) -> None:
    async with linked(fake) as past:
        await past.copy_history(nothing)
        sorted((engine_folder(fake.id) / "history").iterdir())[0].unlink()
        await past.copy_history(nothing)
    assert len(copies()) == MINUTES - 1


async def test_incidents_of_earlier_engines_are_listed_and_opened(fake: FakeGateway) -> None:
    async with linked(fake) as past:
        listed = await past.incidents()
        assert [one.id for one in listed] == ["dead01/1", "2"] and {one.engine.name for one in listed} == {fake.name}
        for one in listed:
            await past.copy_incident(one, nothing)
    for one in listed:
        source = IncidentSource(one)
        assert source.incident.info == one.info and source.history.first is not None and source.log_folder is None
        source.history.close()


async def test_the_record_alone_is_copied_without_its_minutes(fake: FakeGateway) -> None:
    async with linked(fake) as past:
        await past.copy_incident((await past.incidents())[-1], nothing, minutes=False)
    assert [path.name for path in copies()] == ["incident.json"]


async def test_a_file_that_goes_meanwhile_is_left_out_and_counted(fake: FakeGateway) -> None:
    victim = sorted((engine_folder(fake.id) / "history").iterdir())[0]
    interposed(fake, lambda question, answer: (victim.unlink(missing_ok=True), answer)[1])
    async with linked(fake) as past:
        found = await past.copy_history(nothing)
    assert found.gone == 1 and "1 had gone meanwhile" in found.missing
    assert len(copies()) == MINUTES - 1 and same(found.folder, fake)


async def test_a_record_that_is_written_again_meanwhile_is_read_again(fake: FakeGateway) -> None:
    path = engine_folder(fake.id) / "incidents" / "2" / "incident.json"
    path.write_bytes(path.read_bytes() + b" " * 2 * PART_BYTES)
    changed: list[Question] = []

    def change(question: Question, answer: msgspec.Struct) -> msgspec.Struct:
        if _reads(question) and not changed:
            changed.append(question)
            path.write_bytes(path.read_bytes() + b"\n")
        return answer

    async with linked(fake) as past:
        one = (await past.incidents())[-1]
        interposed(fake, change)
        found = await past.copy_incident(one, nothing, minutes=False)
    assert changed and same(found.folder, fake)


async def test_a_file_that_always_changes_ends_with_an_error(fake: FakeGateway) -> None:
    marks = iter(range(10**6))

    def change(question: Question, answer: msgspec.Struct) -> msgspec.Struct:
        return msgspec.structs.replace(answer, mark=next(marks)) if isinstance(answer, PastPart) else answer

    folder = engine_folder(fake.id) / "history"
    (folder / "009999999999999.rec").write_bytes(bytes(3 * PART_BYTES))
    interposed(fake, change)
    async with linked(fake) as past:
        with pytest.raises(QueryFailed, match="changes while it is read"):
            await past.copy_history(nothing)
    assert not [path for path in copies() if path.name.startswith(".")]


async def test_an_engine_that_goes_in_the_middle_leaves_whole_files_alone(fake: FakeGateway) -> None:
    reads: list[Question] = []

    def stop(question: Question, answer: msgspec.Struct) -> msgspec.Struct:
        reads.append(question)
        fake.deaf = fake.silent = len(reads) > 2
        return answer

    big = engine_folder(fake.id) / "history" / "000000000000001.rec"
    big.write_bytes(bytes(20 * PART_BYTES))
    async with linked(fake) as past:
        interposed(fake, stop)
        task = asyncio.create_task(past.copy_history(nothing))
        while len(reads) < 3:
            await asyncio.sleep(0.01)
        fake.stop()
        with pytest.raises(LinkLost):
            await asyncio.wait_for(task, 60)
    assert all(path.suffix == ".rec" and not path.name.startswith(".") for path in copies())
    assert big.name not in {path.name for path in copies()}


async def test_a_copy_that_is_cancelled_leaves_nothing_half(fake: FakeGateway) -> None:
    big = engine_folder(fake.id) / "history" / "009999999999999.rec"
    big.write_bytes(bytes(40 * PART_BYTES))
    begun = asyncio.Event()
    async with linked(fake) as past:
        task = asyncio.create_task(past.copy_history(lambda done, total: begun.set()))
        await asyncio.wait_for(begun.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert copies() == []


async def test_files_beyond_the_limits_are_left_out_and_a_record_beyond_them_is_an_error(
    fake: FakeGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = sorted(path.stat().st_size for path in (engine_folder(fake.id) / "history").iterdir())
    monkeypatch.setattr(far_past, "ALL_MOST", sum(sizes) - 1)
    async with linked(fake) as past:
        found = await past.copy_history(nothing)
        assert found.large == 1 and len(copies()) == MINUTES - 1
        newest = sorted((engine_folder(fake.id) / "history").iterdir())[-1]
        assert newest.name in {path.name for path in copies()}, "the newest come first"
        monkeypatch.setattr(far_past, "FILE_MOST", 10)
        with pytest.raises(QueryFailed, match=r"incident.json has \d+ bytes, more than the 10"):
            await past.copy_incident((await past.incidents())[-1], nothing)


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": "../../x"}, {"engine": "a/b"}, {"earlier": [".."]}, {"files": [PastFile("../core.log", 1)]},
        {"files": [PastFile("/etc/passwd", 1)]}, {"files": [PastFile("history/000000000000001.rec", -1)]},
    ],
)  # fmt: skip
async def test_a_list_with_other_names_is_refused(fake: FakeGateway, changes: dict[str, object]) -> None:
    def change(question: Question, answer: msgspec.Struct) -> msgspec.Struct:
        return msgspec.structs.replace(answer, **changes) if isinstance(answer, PastListed) else answer

    interposed(fake, change)
    async with linked(fake) as past:
        with pytest.raises(QueryFailed, match="is no file of the past"):
            await past.copy_history(nothing)
    assert copies() == []


async def test_a_limit_of_questions_is_waited_for(fake: FakeGateway) -> None:
    refused: list[Question] = []

    def change(question: Question, answer: msgspec.Struct) -> msgspec.Struct:
        if len(refused) < 2:
            refused.append(question)
            return Failed(nonce=question.nonce, code="RATE_LIMITED", text="too much")
        return answer

    interposed(fake, change)
    async with linked(fake) as past:
        assert same((await past.copy_history(nothing)).folder, fake) and len(refused) == 2


async def test_a_gateway_of_an_earlier_version_is_named(fake: FakeGateway) -> None:
    fake.past = None
    async with linked(fake) as past:
        with pytest.raises(QueryFailed, match="earlier version, which hands out no files of the past"):
            await past.incidents()


async def test_copies_of_engines_that_were_not_used_for_longest_go(fake: FakeGateway) -> None:
    async with linked(fake) as past:
        own = (await past.copy_history(nothing)).folder
        for number in range(far_past.COPIES_KEPT + 2):
            (own.parent / f"old{number}").mkdir()
        await past.copy_history(nothing)
    assert own.is_dir() and len(list(own.parent.iterdir())) == far_past.COPIES_KEPT


# --- commands -----------------------------------------------------------------------------------------------


@pytest.fixture
def cli(fake: FakeGateway, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setattr(finding, "find_remote", lambda wanted, key=None: elsewhere(fake))
    return Cli(capsys, tmp_path)


def test_incidents_are_listed_and_printed(cli: Cli, fake: FakeGateway) -> None:
    run = cli("incidents")
    assert run.code == 0 and "dead01/1" in run.out and "stage 1" not in run.err
    run = cli("incidents", "2")
    assert run.code == 0 and "stage 1 was killed by SIGKILL" in run.out
    assert "see it: ppconsole -e tcp://10.0.0.5:7400 replay --incident 2" in run.out
    run = cli("incidents", "dead01/1")
    assert run.code == 0 and "replay --incident dead01/1" in run.out
    run = cli("incidents", "9")
    assert run.code == 7 and "no incident '9'; there are: dead01/1, 2" in run.err


def test_history_and_replay_print_the_copies(cli: Cli, fake: FakeGateway) -> None:
    run = cli("history")
    assert run.code == 0 and run.out.count("test.event") + run.out.count("second ") > 0, run.err
    updates = cli("history", "--json").rows
    assert sum("snapshot" in update for update in updates) == 60 * MINUTES
    run = cli("replay", "--incident", "2")
    assert run.code == 0 and "second" in run.out
    assert not list(Path().glob("*.rec"))


def test_an_export_of_an_incident_has_no_logs_of_this_host(cli: Cli, tmp_path: Path) -> None:
    run = cli("export", str(tmp_path / "a.zip"), "--incident", "2", "--with-text")
    assert run.code == 0 and "logs" in run.err


def test_an_engine_without_history_says_so(cli: Cli, fake: FakeGateway) -> None:
    for path in (engine_folder(fake.id) / "history").iterdir():
        path.unlink()
    run = cli("history")
    assert run.code == 7 and "is kept on its host; its profile may have console.history_minutes: 0" in run.err


def test_a_copy_that_cannot_be_written_is_one_line(cli: Cli) -> None:
    (state_dir() / "remote").write_text("a file where a folder should be")
    run = cli("history")
    assert run.code == 1 and "a copy cannot be written" in run.err and len(run.err.splitlines()) == 1


def test_local_engines_have_a_history_command_too(
    fake: FakeGateway, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cli = Cli(capsys, tmp_path)
    assert sum("snapshot" in update for update in cli("-e", fake.id, "history", "--json").rows) == 60 * MINUTES
    assert cli("-e", "dead01", "history").code == 0
    assert copies() == []


# --- the console --------------------------------------------------------------------------------------------


@asynccontextmanager
async def console(fake: FakeGateway) -> AsyncIterator[Rig]:
    fake.snapshot.engine.id = fake.id
    link = EngineLink(elsewhere(fake), timing=FAST)
    app = ConsoleApp(link, clock=Clock(), theme="pp-dark")
    async with app.run_test(size=(120, 36)) as pilot:
        rig = Rig(app, pilot, link, Clock())  # type: ignore[arg-type]
        await rig.until(lambda: app.model.state.snapshot is not None)
        app.tick()
        yield rig


async def test_h_fetches_the_hour_and_opens_it(fake: FakeGateway) -> None:
    async with console(fake) as rig:
        await rig.pilot.press("h")
        await rig.until(lambda: len(rig.app.screen_stack) == 3)
        past = rig.app.screen.console  # type: ignore[attr-defined]
        await rig.until(lambda: past.model.state.snapshot is not None)
        assert past.model.state.snapshot.engine.step == 59 and len(copies()) == MINUTES
        await rig.pilot.press("I")
        await rig.until(lambda: "Esc goes back to the present, then I" in rig.screen())
        await rig.pilot.press("escape")
        await rig.until(lambda: len(rig.app.screen_stack) == 2)


async def test_incidents_are_fetched_when_they_are_opened(fake: FakeGateway) -> None:
    asked: list[Question] = []
    interposed(fake, lambda question, answer: (asked.append(question), answer)[1])
    async with console(fake) as rig:
        await rig.pilot.press("I")
        await rig.until(lambda: "stage 1 was killed by SIGKILL" in rig.screen())
        assert copies() == [] and len(asked) == 2
        await rig.until(lambda: not rig.app.screen._loading.is_running)  # type: ignore[attr-defined]
        rig.app.screen.start_load()  # type: ignore[attr-defined]
        await rig.until(lambda: not rig.app.screen._loading.is_running)  # type: ignore[attr-defined]
        assert len(asked) == 2, "no incident has come since"
        await rig.pilot.press("enter")
        await rig.until(lambda: isinstance(rig.app.screen, DiagnosisScreen))
        assert "incident.json" in {path.name for path in copies()}


async def test_an_engine_that_does_not_answer_is_reported_by_h(fake: FakeGateway) -> None:
    interposed(fake, lambda question, answer: Failed(nonce=question.nonce, code="FAILED", text="the disk is broken"))
    async with console(fake) as rig:
        await rig.pilot.press("h")
        await rig.until(lambda: "the last hour was not fetched: the disk is broken" in rig.screen())
        assert len(rig.app.screen_stack) == 2


def test_ctrl_c_while_it_is_fetched_leaves_nothing_half(fake: FakeGateway, tmp_path: Path) -> None:
    big = engine_folder(fake.id) / "history" / "009999999999999.rec"
    big.write_bytes(bytes(40 * PART_BYTES))
    begun = threading.Event()

    def slowly(question: Question, answer: msgspec.Struct) -> msgspec.Struct:
        if _reads(question):
            begun.set()
            time.sleep(0.2)
        return answer

    interposed(fake, slowly)
    write_contexts(Contexts("far", [Context("far", "tcp://10.0.0.5:7400", fake.keypair.public)]))
    ends = {name: getattr(fake.record, name) for name in ("state_endpoint", "control_endpoint", "bulk_endpoint")}
    program = (
        "import sys; from ppconsole.link import contexts; import msgspec; from ppconsole.cli import main;"
        f"made = contexts.remote_record; ends = {ends!r};"
        "contexts.remote_record = lambda *words: msgspec.structs.replace(made(*words), **ends);"
        "sys.exit(main(['history']))"
    )
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert begun.wait(60), run.communicate(timeout=60)
        run.send_signal(signal.SIGINT)
        _, error = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 130 and "Traceback" not in error, error
    assert copies() == []
