"""Tokens of the texts that a program gives. The core gets token ids alone."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import msgspec

from ppengine.checkpoint.prompt_encoder import PromptEncoder
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.offline.prompts import Submission, TokensPrompt
from ppengine.protocol.token_ids import compact


class ProgramTexts:
    """The tokenizer of an engine in the process of a program. It is loaded when a text first needs it."""

    def __init__(self, folder: Path, max_model_len: int, *, absent: bool) -> None:
        """`absent`: the engine was started without a tokenizer, so texts are refused."""
        self._folder, self._max_model_len, self.absent = folder, max_model_len, absent

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the checkpoint; None: the engine was started without one."""
        return None if self.absent else Tokenizer.load(self._folder)

    @cached_property
    def _encoder(self) -> PromptEncoder:
        return PromptEncoder(self.tokenizer, self._max_model_len)

    def encoded(self, one: Submission) -> Submission:
        """Return a submission with the tokens of its texts. Raises ValueError for one that cannot be tokenized."""
        verb, tokens = one.verb, one.tokens
        if one.is_text:
            text = one.text or ""
            tokens = compact(self._encoder.checked(text).encode_long(text, special=True))
            if not tokens:
                verb = msgspec.structs.replace(verb, prompt_token_ids=[])
        sampling = verb.sampling
        if sampling.stop or sampling.bad_words:
            # Stop texts are found here.
            banned = self._encoder.bad_words_ids(sampling)
            bare = msgspec.structs.replace(sampling, stop=[], bad_words=[], bad_words_ids=banned)
            verb = msgspec.structs.replace(verb, sampling=bare)
        return one._replace(verb=verb, tokens=tokens, is_text=False)

    def chat_prompt(self, text: str) -> TokensPrompt:
        """Return a rendered chat as a prompt. Its template brings its own special tokens."""
        assert self.tokenizer is not None, "chats are refused without one"
        return TokensPrompt(prompt_token_ids=self.tokenizer.encode_long(text, special=False), prompt=text)
