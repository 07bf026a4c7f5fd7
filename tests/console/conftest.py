"""The engine and the command line of a test. Stylesheets of consoles are parsed once, a tenth of a screen's test."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_helpers import Cli
from fake_gateway import FakeGateway
from settled import settled
from textual import app, pilot, screen
from textual.css.stylesheet import Stylesheet


@pytest.fixture(scope="session", autouse=True)
def _parsed_once() -> Iterator[None]:
    """Keep parsed rules for later apps with the same variables. Textual itself keeps them for one app."""
    known: dict[Any, Any] = {}
    parse = Stylesheet._parse_rules

    @functools.wraps(parse)
    def parsed(self: Stylesheet, *args: Any, **options: Any) -> Any:
        key = args, tuple(sorted(options.items())), tuple(sorted(self._variables.items()))
        if key not in known:
            known[key] = parse(self, *args, **options)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stylesheet, "_parse_rules", parsed)
        yield


@pytest.fixture(scope="session", autouse=True)
def _waits_by_the_loop() -> Iterator[None]:
    """Have pilots go on as soon as the event loop has nothing left to do, the next picture included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(screen, "UPDATE_PERIOD", 1 / 500)
        for module in (pilot, app):
            patch.setattr(module, "wait_for_idle", settled)
        yield


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of engines and settings of this test."""
    for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("PPCONSOLE_ENGINE", raising=False)
    return tmp_path


@pytest.fixture
def fake(folder: Path) -> Iterator[FakeGateway]:
    """Return an engine that runs."""
    with FakeGateway() as gateway:
        yield gateway


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], folder: Path) -> Cli:
    """Return what runs a command line."""
    return Cli(capsys, folder)
