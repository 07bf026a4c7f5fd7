"""Tokens as a retired step hands them to the outputs, for requests that are a name and a sample alone."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from ppengine.core.outputs import OutputHub


def push(
    hub: OutputHub, name: str, sample: int, token: int, logprob: float = 0.0, top: Sequence[tuple[int, float]] = ()
) -> None:
    """Append one token to a sample."""
    hub.push([(cast(Any, SimpleNamespace(group=name, sample=sample)), token, logprob, list(top))])
