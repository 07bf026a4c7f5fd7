"""Texts of requests, made again from the core's tokens when they are needed: none is lost with this process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.protocol.text_messages import OutputPart
from ppengine.texts.request_text import RequestText

KEPT_TOKENS = 4 * 1024 * 1024
"""Most tokens of texts that are kept beside those whose stop texts are looked for; the least recently used go."""
KEPT_MOST = 10_000
"""Most requests, likewise."""
REQUEST_WEIGHT = 64
"""Tokens that need the memory of a request without any."""


class TextStore:
    """The newest texts, by request."""

    def __init__(self, tokenizer: Tokenizer, eos: Collection[int]) -> None:
        self._tokenizer, self._eos = tokenizer, frozenset(eos)
        self._texts: OrderedDict[str, RequestText] = OrderedDict()
        self._weight = 0

    def get(self, request: str) -> RequestText | None:
        """Return the text of a request; None if it is not kept."""
        text = self._texts.get(request)
        if text is not None:
            self._texts.move_to_end(request)
        return text

    def take(self, part: OutputPart) -> RequestText | None:
        """Enter tokens of the core; return the text of their request, None if it must be read from its beginning."""
        text = self.get(part.request)
        if text is None or text.number != part.number:
            if part.context is None:
                return None
            self._drop(part.request)
            text = RequestText.of(part.number, part.context, self._tokenizer, self._eos)
            self._texts[part.request] = text
        if not text.samples[part.sample].take(part.offset, part.token_ids.tolist(), part.finish_reason):
            return None
        self.weigh(text)
        return text

    def weigh(self, text: RequestText) -> None:
        """Count the tokens of a text that has grown, and drop others that have not been used for long."""
        weight = REQUEST_WEIGHT + sum(sample.count for sample in text.samples)
        self._weight += weight - text.weight
        text.weight = weight
        if self._weight > KEPT_TOKENS or len(self._texts) > KEPT_MOST:
            self._trim(text)

    def unfollow(self) -> None:
        """Keep no text longer than others: those whose stop texts are looked for are marked again."""
        for text in self._texts.values():
            text.followed = False

    def _trim(self, newest: RequestText) -> None:
        surplus, most = self._weight - KEPT_TOKENS, len(self._texts) - KEPT_MOST
        old = []
        for name, text in self._texts.items():
            if surplus <= 0 and most <= 0:
                break
            if text.followed or text is newest:
                continue
            old.append(name)
            surplus, most = surplus - text.weight, most - 1
        for name in old:
            self._drop(name)

    def _drop(self, request: str) -> None:
        text = self._texts.pop(request, None)
        if text is not None:
            self._weight -= text.weight
