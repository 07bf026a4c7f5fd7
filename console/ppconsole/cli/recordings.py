"""`record` and `replay`: what an engine showed, kept in a file and shown again; `replay` reads exports, too."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.incidents import find_incident
from ppconsole.cli.options import SECONDS, Common, NewFile, engine_option, json_option, timeout_option
from ppconsole.cli.session import attached, find, find_any, print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.recording import Update
    from ppengine.protocol.snapshot import Snapshot

    from ppconsole.link.export import ExportSource
    from ppconsole.link.replay import ReplaySource

SAMPLES = Path(__file__).resolve().parent.parent / "recordings"
SAMPLE = SAMPLES / "sample.ppr"


@click.command("record")
@click.argument("file", type=NewFile())
@engine_option
@click.option("--seconds", type=SECONDS, metavar="S", help="Stop by itself after S seconds.")
@click.option("--slow", is_flag=True, help="One snapshot a second in place of ten.")
@json_option("Print counts and path as JSON, at the end.")
@timeout_option("Give up attaching after S seconds.")
def record_command(
    file: Path, engine: str | None, seconds: float | None, slow: bool, as_json: bool, timeout: float | None
) -> None:
    """Record the engine to FILE.

    Snapshots and events, until Ctrl-C.
    """
    run(lambda: _record(file, Common(engine, as_json, timeout), seconds, slow))


async def _record(file: Path, common: Common, seconds: float | None, slow: bool) -> None:
    from ppengine.protocol.recording import Recorder, RecordingError

    from ppconsole.link.fault_watcher import FaultWatcher

    record = find(common.engine)
    try:
        recorder = Recorder(file, engine=record.id, name=record.name)
    except RecordingError as error:
        raise exits.Failure(str(error)) from None
    failed: asyncio.Future[OSError] = asyncio.get_running_loop().create_future()
    watcher = FaultWatcher(recorder)

    def take(update: Update) -> None:
        try:
            recorder.write(update)
            watcher.see(update)
        except OSError as error:
            if not failed.done():
                failed.set_result(error)

    with recorder:
        async with attached(common, take, slow=slow, backlog=1000) as link:
            say(f"recording {record.name} ({record.id}) to {file}; Ctrl-C ends it")
            for number in (signal.SIGINT, signal.SIGTERM):  # `timeout` and service managers send the second
                asyncio.get_running_loop().add_signal_handler(number, failed.cancel)
            asking = asyncio.create_task(watcher.run(link))
            done, _ = await asyncio.wait([failed], timeout=seconds)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
    if done and not failed.cancelled():
        raise exits.Failure(f"{file} cannot be written: {failed.result().strerror}; it ends before this")
    if common.json:
        print_json({"file": str(file), "engine": record.id, "updates": recorder.updates, "bytes": recorder.bytes})
    else:
        say(f"{recorder.updates} updates, {recorder.bytes} bytes in {file}; see it: ppconsole replay {file}")


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--sample", is_flag=True, help="A bundled recording of an incident; FILE may name which.")
@click.option("--incident", metavar="ID", help="A fault that was, from a minute before it: see `ppconsole incidents`.")
@engine_option
@click.option("--speed", type=float, default=1.0, show_default=True, help="0: as fast as it goes.")
@json_option("Print every update as one line of JSON, as fast as it goes.")
@timeout_option("Stop printing after S seconds (exit code 5); a screen stays until it is left.")
def replay_command(
    file: Path | None, sample: bool, incident: str | None, engine: str | None, speed: float, as_json: bool,
    timeout: float | None,
) -> int:  # fmt: skip
    """Show a recording, an export or an incident in the console.

    Without a terminal: its events and its last picture. Samples: see `ppconsole replay --sample list`.
    """
    from ppengine.protocol.recording import RecordingError

    from ppconsole.cli.screen import has_terminal
    from ppconsole.link.export import ExportError
    from ppconsole.link.incident_source import IncidentError

    if sample and file is not None and str(file) == "list":
        names = [path.stem for path in sorted(SAMPLES.glob("*.ppr"))]
        if as_json:
            print_json(names)
        else:
            click.echo("\n".join(names))
        return exits.DONE
    screen = has_terminal() and not as_json
    try:
        if incident is not None:
            source, title = _open_incident(Common(engine), incident, file, sample, speed if screen else 0.0)
        else:
            source, title = _open(_path(file, sample), speed if screen else 0.0)
    except (RecordingError, ExportError, IncidentError, ValueError) as error:
        raise exits.Failure(str(error), exits.USAGE if isinstance(error, ValueError) else exits.ERROR) from None
    if not screen:
        return run(lambda: _print(source, as_json, timeout))
    from ppconsole.app import run_console

    return run_console(source, read_only=True, title=title)


@click.command("history")
@engine_option
@json_option("Print every update as one line of JSON.")
@timeout_option("Give up after S seconds.")
def history_command(engine: str | None, as_json: bool, timeout: float | None) -> int:
    """Show the last hour of an engine in the console.

    Without a terminal: its events and its last picture. The hour of an engine on another host is fetched first.
    """
    from ppengine.protocol.discovery import EndedEngine

    from ppconsole.cli.fetching import fetch_history
    from ppconsole.cli.screen import has_terminal
    from ppconsole.link.last_hour import LastHour, no_history
    from ppconsole.link.replay import ReplaySource

    found = find_any(engine)
    record = found.record if isinstance(found, EndedEngine) else found
    copies = fetch_history(Common(engine, as_json, timeout)).folder if record.remote else None
    hour = LastHour(copies.name if copies is not None else record.id, copies)
    if hour.history.first is None:
        raise exits.Failure(no_history(record.label, hour), exits.NOT_FOUND)
    if not has_terminal() or as_json:
        return run(lambda: _print(ReplaySource(hour.history, 0.0), as_json, timeout))
    from ppconsole.app import run_console

    return run_console(hour, read_only=True, title=f"the last hour of {hour.header.name} ({hour.engine_id})")


def _open(path: Path, speed: float) -> tuple[ReplaySource | ExportSource, str]:
    """Return the source of a recording or an export, by the first bytes of the file, and a title for it."""
    from ppconsole.link.export import ExportSource
    from ppconsole.link.replay import ReplaySource

    try:
        with path.open("rb") as opened:
            packed = opened.read(2) == b"PK"
    except OSError:
        packed = False  # reading the recording reports the error
    if packed:
        export = ExportSource(path)
        manifest = export.export.manifest
        return export, f"export of {manifest.name} ({manifest.engine})"
    replay = ReplaySource(path, speed)
    return replay, f"recording of {replay.header.name} ({replay.header.engine})"


def _open_incident(
    common: Common, wanted: str, file: Path | None, sample: bool, speed: float
) -> tuple[ReplaySource | ExportSource, str]:
    """Return the source of an incident, and a title for it. Raises Failure, IncidentError."""
    from ppconsole.link.incident_source import IncidentError, IncidentSource

    if file is not None or sample:
        raise exits.Failure("name a FILE, --sample or --incident, one of them", exits.USAGE)
    listed = find_incident(common, wanted)
    source = IncidentSource(listed, speed=speed)
    if source.history.first is None:
        raise IncidentError(f"no recording of incident {listed.id} was kept; its text: ppconsole incidents {listed.id}")
    return source, f"incident {listed.id} of {listed.engine.name}"


def _path(file: Path | None, sample: bool) -> Path:
    if file is None and not sample:
        raise exits.Failure("name a FILE or give --sample, one of them", exits.USAGE)
    if not sample:
        return file or SAMPLE
    path = SAMPLE if file is None else SAMPLES / f"{file.name}.ppr"
    if path.is_file():
        return path
    if file is None:
        raise exits.Failure(f"no sample is bundled with this build ({path} is missing); name a FILE of your own")
    names = ", ".join(found.stem for found in sorted(SAMPLES.glob("*.ppr")))
    raise exits.Failure(f"no sample is called {file}; there are {names}", exits.USAGE)


async def _print(source: ReplaySource | ExportSource, as_json: bool, timeout: float | None) -> int:
    from ppengine.protocol.recording import LinkState
    from ppengine.protocol.snapshot import Event, Snapshot

    from ppconsole.cli.render import event_line, status_lines
    from ppconsole.link.replay import ReplaySource

    last: Snapshot | None = None

    def take(update: Update) -> None:
        nonlocal last
        if isinstance(update, Snapshot):
            last = update
        if as_json:
            kind = "link" if isinstance(update, LinkState) else "event" if isinstance(update, Event) else "snapshot"
            print_json({kind: update})
        elif isinstance(update, Event):
            click.echo(event_line(update))

    await source.start(take)
    try:
        if isinstance(source, ReplaySource):
            async with asyncio.timeout(timeout):
                await source.played()
    finally:
        await source.close()
    if last is not None and not as_json:
        click.echo("\n".join(status_lines(last)))
        click.echo("".join(f"{line}\n" for line in _fault_lines(source, last)), nl=False)
    if isinstance(source, ReplaySource) and source.error is not None:
        raise exits.Failure(str(source.error))
    return exits.DONE


def _fault_lines(source: ReplaySource | ExportSource, last: Snapshot) -> list[str]:
    """Return the fault of a file whose last picture does not show it any more."""
    from ppengine.protocol.inspection import FaultDetail

    from ppconsole.cli.render import verdict_sentence
    from ppconsole.model.endings import clock_text

    fault = source.kept("fault")
    if not isinstance(fault, FaultDetail) or last.verdicts:
        return []
    over = f", over {clock_text(fault.over_wall)}" if fault.over_wall is not None else ""
    return [f"fault at {clock_text(fault.wall)}{over}: {verdict_sentence(fault.verdict)}"]
