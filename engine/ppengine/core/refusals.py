"""Errors that refuse a command, and their codes."""

from __future__ import annotations

from ppengine.core.constraints import TooManyGrammarsError
from ppengine.core.plans import CommandError
from ppengine.core.scheduler import DoesNotFit
from ppengine.core.scheduler import Refused as NotPossible
from ppengine.protocol.control import ErrorCode

REFUSALS = (CommandError, NotPossible, DoesNotFit, TooManyGrammarsError, ValueError)
"""Each has its reason in one line."""


def code_of(error: Exception) -> ErrorCode:
    """Return the code of a refusal."""
    match error:
        case CommandError() | NotPossible():
            return error.code
        case DoesNotFit():
            return "DOES_NOT_FIT"
        case TooManyGrammarsError():
            return "BUSY"
    return "INVALID"
