"""Exit codes, and which error of an engine leads to which. `explain` chooses its own in `cli/inspecting.py`."""

from __future__ import annotations

from typing import IO, Any

import click

DONE = 0
ERROR = 1
USAGE = 2
NO_ENGINE = 3
DENIED = 4
TIMEOUT = 5
CONFLICT = 6
NOT_FOUND = 7
DOES_NOT_FIT = 8
FAULT_FOUND = 10
INTERRUPTED = 130

OF_CODE = {
    "FAILED": ERROR,
    "NO_CORE": ERROR,
    "BUSY": ERROR,
    "RATE_LIMITED": ERROR,
    "UNSUPPORTED": ERROR,
    "PROTOCOL": ERROR,
    "INVALID": USAGE,
    "DENIED": DENIED,
    "LEASED": DENIED,
    "EXPIRED": TIMEOUT,
    "CONFLICT": CONFLICT,
    "STALE_EPOCH": CONFLICT,
    "NOT_FOUND": NOT_FOUND,
    "GONE": NOT_FOUND,
    "DOES_NOT_FIT": DOES_NOT_FIT,
}
"""ErrorCode of the protocol to exit code."""

OF_STATE = {"applied": DONE, "planned": DONE, "failed": ERROR, "superseded": CONFLICT}
"""State of an Outcome to exit code."""


class Failure(click.ClickException):
    """Ends a command with one line on stderr and an exit code."""

    def __init__(self, text: str, code: int = ERROR) -> None:
        super().__init__(text)
        self.exit_code = code  # type: ignore[misc]  # click declares it for the class and reads the instance

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line, printable and short."""
        from ppengine.protocol.error_text import PREFIX, one_line

        click.echo(f"{PREFIX}{one_line(self.message)}", file=file, err=file is None)
