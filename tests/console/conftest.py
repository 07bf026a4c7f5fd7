"""Stylesheets of consoles, parsed once: each app reads the same ones, a tenth of what a test of a screen takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
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
