"""Questions for the state of the engine that wait until it has loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ppengine.core.client_rules import ClientRules
from ppengine.core.health import Health
from ppengine.protocol.offline import StateAnswer, StateQuery


class StateWaiters:
    """Answers at once, when the engine leaves `loading`, or after the time that the question gives."""

    def __init__(
        self, health: Health, rules: ClientRules, silent_http: Callable[[], list[str]], max_model_len: int
    ) -> None:  # fmt: skip
        self._health, self._rules, self._silent_http = health, rules, silent_http
        self._max_model_len = max_model_len
        self._waiting: list[tuple[bytes, StateQuery, float]] = []

    def add(self, client: bytes, query: StateQuery, now: float) -> None:
        """Take a question."""
        self._waiting.append((client, query, now + query.wait_ms / 1e3))

    def answers(self, now: float) -> Iterator[tuple[bytes, StateAnswer]]:
        """Yield the clients and the answers that are due."""
        health, waiting, self._waiting = self._health, self._waiting, []
        for client, query, deadline in waiting:
            if health.state == "loading" and now < deadline:
                self._waiting.append((client, query, deadline))
                continue
            blocks = health.serving.memory.mapped_blocks if health.serving else 0
            yield client, StateAnswer(
                nonce=query.nonce, state=health.state, message=health.message,
                max_model_len=self._max_model_len, num_blocks=blocks,
                code="DOES_NOT_FIT" if health.unfit else "", rules=self._rules.rules(),
                silent_http=self._silent_http(),
            )  # fmt: skip
