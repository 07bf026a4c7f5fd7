"""Tokens of the texts that come with a prompt, within the limits of a model."""

from __future__ import annotations

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.absent_texts import WITHOUT_TOKENIZER, check_sampling_without_tokenizer
from ppengine.protocol.frames import check_utf8
from ppengine.protocol.sampling import SamplingParams


class TextTooLongError(ValueError):
    """A text cannot fit, however it is tokenized: its characters, and the most that would fit."""

    def __init__(self, text: str, characters: int, most: int) -> None:
        super().__init__(text)
        self.characters, self.most = characters, most


class PromptEncoder:
    """Tokens of prompts and bad words. `tokenizer` None: the engine has none, and texts are refused."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self._tokenizer, self._max_model_len = tokenizer, max_model_len
        self.longest_token = 0 if tokenizer is None else tokenizer.longest_token
        """Characters of the longest token."""
        self.most = max_model_len * self.longest_token
        """Characters of a prompt that can fit."""

    def checked(self, text: str) -> Tokenizer:
        """Return the tokenizer for a prompt. Raises ValueError if there is none, TextTooLongError."""
        if self._tokenizer is None:
            raise ValueError(WITHOUT_TOKENIZER)
        if len(text) > self.most:
            # Tokenizing takes about 0.5 s per megabyte.
            fits = f"{self._max_model_len} tokens of at most {self.longest_token} characters"
            raise TextTooLongError(
                f"the prompt has {len(text)} characters, max_model_len is {fits}; at most {self.most} would fit",
                len(text), self.most,
            )  # fmt: skip
        return self._tokenizer

    def bad_words_ids(self, sampling: SamplingParams) -> list[list[int]]:
        """Return the token sequences that must not be written, those of `bad_words` among them.

        Raises ValueError for texts of the sampling if there is no tokenizer, and for a word that is no UTF-8 or has no
        tokens.
        """
        tokenizer = self._tokenizer
        if tokenizer is None:
            check_sampling_without_tokenizer(sampling)
        if tokenizer is None or not sampling.bad_words:
            return sampling.bad_words_ids
        for number, word in enumerate(sampling.bad_words):
            check_utf8(f"bad_words[{number}]", word)
        return sampling.bad_words_ids + [ids for word in sampling.bad_words for ids in tokenizer.encode_bad_word(word)]
