"""Token ids of prompts: of short texts at once, and of long ones on threads, so that other streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ppengine.checkpoint.prompt_encoder import PromptEncoder
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.thread_priority import yield_to_others
from ppengine.http.api_errors import invalid, too_long

INLINE_CHARACTERS = 2000
"""More of them in a call are tokenized on a thread, so that other streams go on: 1 ms here."""
LONG_TEXTS_AT_ONCE = 4
"""Threads for such calls, behind others on busy cores: 100,000 tokens take 0.2 s."""


class PromptTokens:
    """Makes them, within the limits of `encoder`."""

    def __init__(self, tokenizer: Tokenizer, encoder: PromptEncoder, max_model_len: int) -> None:
        self._tokenizer, self._encoder, self._max_model_len = tokenizer, encoder, max_model_len
        self._threads = ThreadPoolExecutor(LONG_TEXTS_AT_ONCE, "texts", yield_to_others)

    async def of_text(self, text: str, *, special: bool) -> list[int]:
        """Return the tokens of one text, with the `special` ones of a prompt. Raises ApiError."""
        (ids,) = await self.of_all([text], special=special)
        return ids

    async def of_all(self, prompts: Sequence[str | list[int]], *, special: bool) -> list[list[int]]:
        """Return the tokens of prompts; those that are tokens already stay as they are. Raises ApiError."""
        texts = [one for one in prompts if isinstance(one, str)]
        if (longest := max(map(len, texts), default=0)) > self._encoder.most:
            longest_token = self._encoder.longest_token
            limit = f"max_model_len is {self._max_model_len} tokens of at most {longest_token} characters"
            raise too_long(f"the prompt has {longest} characters; {limit}", "prompt")

        def encoded() -> list[list[int]]:
            return [one if isinstance(one, list) else self._encode(one, special=special) for one in prompts]

        try:
            if sum(map(len, texts)) <= INLINE_CHARACTERS:
                return encoded()
            return await asyncio.get_running_loop().run_in_executor(self._threads, encoded)
        except ValueError as error:
            raise invalid(str(error), "prompt") from None

    def _encode(self, text: str, *, special: bool) -> list[int]:
        if len(text) > INLINE_CHARACTERS:
            return self._tokenizer.encode_long(text, special=special)
        return self._tokenizer.encode(text) if special else self._tokenizer.encode_chat(text)
