"""The verbs and screens in Textual's command palette."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ppengine.protocol.verb_table import covers
from textual.command import DiscoveryHit, Hit, Hits, Provider

from ppconsole.screens.console import Console
from ppconsole.view.commands import SCREENS, VERBS


class ConsoleCommands(Provider):
    """Every verb of the command line; those that need words open it with the verb written."""

    def _entries(self) -> Iterator[tuple[str, str, Callable[[], None]]]:
        """Yield (name, help, action)."""
        console: Console = self.app  # type: ignore[assignment]
        for name, usage in VERBS.items():
            if not console.model.state.read_only and covers(console.model.state.role, usage.row.role):
                yield name, usage.text, partial(console.navigation.begin_command, name, " " in usage.form)
        for name, text in SCREENS.items():
            yield name, text, partial(console.navigation.begin_command, name, needs_words=False)
        for theme, text in (
            ("pp-dark", "dark colours"),
            ("pp-light", "light colours"),
            ("ansi-dark", "the terminal's"),
        ):
            yield f"theme {theme}", text, partial(console.use_theme, theme)

    async def discover(self) -> Hits:
        """Yield everything while nothing is typed."""
        for name, text, run in self._entries():
            yield DiscoveryHit(name, run, help=text)

    async def search(self, query: str) -> Hits:
        """Yield what matches."""
        matcher = self.matcher(query)
        for name, text, run in self._entries():
            score = matcher.match(f"{name} {text}")
            if score > 0:
                yield Hit(score, matcher.highlight(name), run, help=text)
