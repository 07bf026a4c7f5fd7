"""Running `ppconsole` in this process or in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ppconsole.cli import main


@dataclass
class Run:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[Any]:
        """The lines of stdout as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


class Cli:
    """Calls `main` and collects what it prints; `env` is for processes of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self.env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}

    def __call__(self, *arguments: str) -> Run:
        self._capsys.readouterr()
        code = main(list(arguments))
        captured = self._capsys.readouterr()
        return Run(code, captured.out, captured.err)

    def process(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "ppconsole", *arguments],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
