"""The tokenizer of an engine that has none: tokens have no text, and texts have no tokens."""

from __future__ import annotations

from collections.abc import Iterable

from typing_extensions import override

from ppengine.checkpoint.tokenizer import Tokenizer


class AbsentTokenizer(Tokenizer):
    """Takes the place of a tokenizer under `model.skip_tokenizer`. Every token is silent, so all outputs are empty."""

    def __init__(self) -> None:
        self.eos, self.eos_id = None, None
        self.fixed_texts = {}
        self._special_ids = frozenset()

    @property
    @override
    def longest_token(self) -> int:
        return 0

    @override
    def encode(self, text: str) -> list[int]:
        raise ValueError("this engine was started without a tokenizer: send token ids")

    @override
    def encode_chat(self, text: str) -> list[int]:
        return self.encode(text)

    @override
    def decode(self, ids: list[int]) -> str:
        return ""

    @override
    def token_text(self, token: int) -> str:
        # vLLM's form of a token that is not to be written as text.
        return f"token_id:{token}"

    @override
    def fixed_text(self, token: int) -> str | None:
        return ""

    @override
    def is_silent(self, token: int) -> bool:
        return True

    @override
    def special_ids(self, texts: Iterable[str]) -> dict[int, str]:
        return {}
