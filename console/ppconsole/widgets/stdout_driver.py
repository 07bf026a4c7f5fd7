"""Drawing on stdout where stderr is not the terminal (`ppconsole attach 2>errors.txt`)."""

from __future__ import annotations

import sys
from typing import Any

from textual.drivers.linux_driver import LinuxDriver


class StdoutDriver(LinuxDriver):
    """Textual draws on stderr; an operator who redirects that wants errors in it and no screen."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if sys.__stdout__ is not None:
            self._file = sys.__stdout__
