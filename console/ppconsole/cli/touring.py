"""`tour`: two minutes on an engine of its own, with a real fault, its mending and a change of memory."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import json_option, timeout_option
from ppconsole.cli.session import print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord

    from ppconsole.tour import TourApp


_PLACE_MOST = 40
"""Characters of a folder for temporary files: the path of a socket in it has 107 bytes at most."""


@click.command("tour")
@click.option("--auto", is_flag=True, help="Go on without keys.")
@click.option("--speed", type=click.FloatRange(0.1, 100.0), default=1.0, show_default=True, metavar="N",
              help="With --auto: N times faster.")  # fmt: skip
@json_option("Print the steps that happened as JSON, at the end.")
@timeout_option("Give up if the engine does not serve within S seconds (exit code 5).")
def tour_command(auto: bool, speed: float, as_json: bool, timeout: float | None) -> int:
    """Show the console in two minutes.

    It starts the bundled model in two CPU stages, stops one, walks to the cause, mends it, and halves the memory.
    Nothing is faked: each step waits for its effect in the engine. The engine and its files are of a private
    folder, and both are removed at the end.
    """
    from ppconsole.cli.bundled_engine import PROFILE, START_S, until_serving
    from ppconsole.cli.launch import EngineProcess, need_engine
    from ppconsole.cli.screen import has_terminal
    from ppconsole.cli.serving import profile_arguments

    need_engine()
    if not has_terminal():
        raise exits.Failure("tour needs a terminal; without one: ppconsole demo --headless", exits.USAGE)
    with _private_folders(), _signals_end():
        engine = EngineProcess(profile_arguments(PROFILE, (), "tour", True), silent=True)
        try:
            record = run(lambda: until_serving(engine, timeout or START_S))
            app = _app(record, auto, speed)
            app.run()
        finally:
            say("stopping the tour's engine")
            engine.stop()
            engine.close()
    return _report(app, as_json)


def _app(record: EngineRecord, auto: bool, speed: float) -> TourApp:
    """Return the console that plays the tour on an engine."""
    from ppconsole.link.engine_link import EngineLink
    from ppconsole.link.settings import Settings, settings_path
    from ppconsole.tour import TourApp
    from ppconsole.tour_steps import STEPS
    from ppconsole.widgets.driver import ConsoleDriver

    link = EngineLink(record, slow=True)
    app = TourApp(link, settings=Settings(settings_path()), title="tour", steps=STEPS, auto=auto, speed=speed)
    app.driver_class = ConsoleDriver
    return app


def _report(app: TourApp, as_json: bool) -> int:
    """Print the steps that happened; return the exit code."""
    from ppconsole.tour_steps import STEPS

    if as_json:
        print_json({"steps": [step._asdict() for step in app.done], "of": len(STEPS), "failure": app.failure})
    else:
        click.echo("\n".join(f"{step.name:<10}{step.seconds:6.1f}s  {step.fact}" for step in app.done))
    if app.failure:
        raise exits.Failure(f"tour: {app.failure}")
    return exits.DONE if len(app.done) == len(STEPS) else app.return_code or exits.DONE


@contextmanager
def _private_folders() -> Iterator[None]:
    """Keep the engine's sockets, records and settings in a folder of the tour's own, and remove it at the end."""
    place = tempfile.gettempdir()
    folder = tempfile.mkdtemp(prefix="pptour-", dir=place if len(place) <= _PLACE_MOST else "/tmp")
    before = {name: os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME")}
    os.environ |= dict.fromkeys(before, folder)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _signals_end() -> Iterator[None]:
    """Let SIGTERM and a closed terminal end the tour as Ctrl-C does, so that its engine is stopped."""

    def end(number: int, _: object) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
