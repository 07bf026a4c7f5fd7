"""Text to token ids and back, from tokenizer.json alone: no torch, no transformers, no code from the checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel

from ppengine.checkpoint.config_json import read_bytes
from ppengine.checkpoint.special_tokens import special_tokens
from ppengine.common.config import ConfigError
from ppengine.common.one_line import one_line

_UNFINISHED = "\ufffd"
_LONGEST_TAIL = 64
"""Tokens of one stream without a whole character among them, from when on a cut is looked for."""


_TAIL = 8
"""Tokens behind a long run that are decoded one by one; a character has at most four."""


class TextError(ConfigError, ValueError):
    """A text that the tokenizer of a checkpoint does not take, as one without a token for a word. One line."""


class Tokenizer:
    """Tokenizer of a checkpoint. `eos` is the end-of-sequence token's text and `eos_id` its id, where it has one."""

    def __init__(self, backend: Backend, special: dict[str, str]) -> None:
        self._backend = backend
        self._special_ids = frozenset(
            number for number, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.eos = special.get("eos_token")
        self.eos_id: int | None = None if self.eos is None else backend.token_to_id(self.eos)
        self.fixed_texts: dict[int, str] | None = {} if isinstance(backend.decoder, ByteLevel) else None
        """Texts of tokens that are the same in any output, as far as they are known; None: there are none.

        A byte-level vocabulary joins the bytes of tokens, so a token of whole characters has one text.
        """

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder. Raises ConfigError in one line."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder}: no tokenizer.json; save it with transformers' AutoTokenizer, or send token ids"
            )
        try:
            backend = _call(Backend.from_str, read_bytes(path).decode())
        except ValueError as error:
            raise ConfigError(f"{path}: {one_line(str(error))}") from None
        # What the file may carry for training batches has no place here: prompts are neither cut nor padded.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, special_tokens(folder))

    @property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it: no token is longer in a text."""
        return max(map(len, self._backend.get_vocab()), default=0)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens around it that tokenizer.json says.

        Its word is final: transformers too ignores `add_bos_token` where there is a tokenizer.json. Raises TextError.
        """
        ids: list[int] = _call(self._backend.encode, text, add_special_tokens=True).ids
        return ids

    def encode_long(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a long text; other threads go on meanwhile, as they do not in the other calls.

        `special`: see `encode`; without it see `encode_chat`. Raises TextError.
        """
        (encoding,) = _call(self._backend.encode_batch_fast, [text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        return self._text_of(ids, skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """Return the text of one token, also of a special one; part of a character becomes U+FFFD."""
        return self._text_of([token], skip_special_tokens=False)

    def _text_of(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return a text; U+FFFD if the decoder of the checkpoint fails: an output goes on."""
        try:
            text: str = _call(self._backend.decode, ids, skip_special_tokens=skip_special_tokens)
        except TextError:
            return _UNFINISHED
        return text

    def fixed_text(self, token: int) -> str | None:
        """Return the text that `token` has in any output; None if its neighbours decide, or if it has none."""
        if self.fixed_texts is None:
            return None
        known = self.fixed_texts.get(token)
        if known is None:
            text = self.decode([token])
            if text and _UNFINISHED not in text:
                known = self.fixed_texts[token] = text
        return known

    def fixed_json(self, token: int) -> tuple[bytes, int] | None:
        """Return `fixed_text` as JSON, and its length in characters."""
        text = self.fixed_text(token)
        return None if text is None else (msgspec.json.encode(text), len(text))

    def is_silent(self, token: int) -> bool:
        """Return whether `token` adds nothing to a text: a special one, or padding of the vocabulary."""
        return token in self._special_ids or self._backend.id_to_token(token) is None

    def special_ids(self, texts: Iterable[str]) -> dict[int, str]:
        """Return those of `texts` that are special tokens, by id."""
        found = {self._backend.token_to_id(text): text for text in texts}
        return {number: text for number, text in found.items() if number in self._special_ids}

    @functools.cached_property
    def special_texts(self) -> dict[int, str]:
        """Texts of all special tokens, by id."""
        return {number: self.token_text(number) for number in self._special_ids}

    def stream(self, prompt_ids: Sequence[int] | None = None, spoken: Mapping[int, str] | None = None) -> DetokStream:
        """Return an incremental decoder for what follows `prompt_ids`; `spoken`: special tokens that have a text."""
        return DetokStream(self, prompt_ids or [], spoken or {})

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of a text of the chat template, which brings its own special tokens. Raises TextError."""
        ids: list[int] = _call(self._backend.encode, text, add_special_tokens=False).ids
        return ids

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """Return the token sequences that write `word` at the start of a text, and behind other text.

        vLLM takes the form with a space only if it has as many tokens as the other: it would not ban a word that is
        one token behind a space and two without. Raises ValueError for a word without tokens.
        """
        bare, spaced = (self.encode_chat(space + word.lstrip()) for space in ("", " "))
        if not bare:
            raise ValueError(f"the bad word {word!r} has no tokens; every bad word needs at least one")
        return [bare] if spaced == bare else [bare, spaced]


def _call(work: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Return what a call of the Rust library returns. Raises TextError if it fails; ValueError passes.

    It raises bare Exception. A panic of it is no Exception to Python, and would end the process.
    """
    try:
        return work(*given, **options)
    except (ValueError, MemoryError):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TextError(f"the tokenizer fails: {one_line(str(error))}") from None


class DetokStream:
    """Text of a growing output, in pieces that join to the text of the whole.

    A piece is given out only at the end of a character. The text of the last piece's tokens is decoded again in front
    of the next one, because some tokenizers write a token differently at the start of a text. (One exception to the
    joining: in a SentencePiece vocabulary a broken byte spoils the whole run of byte tokens around it, including
    good text that is given out already.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], spoken: Mapping[int, str]) -> None:
        self._tokenizer, self._spoken = tokenizer, spoken
        self._fixed = tokenizer.fixed_texts
        last = tokenizer.fixed_text(prompt_ids[-1]) if prompt_ids else None
        if last is not None:
            self._ids, self._given, self._prefix = [prompt_ids[-1]], 1, last
            return
        # The last whole character of the prompt is context enough; one has at most four bytes, so four tokens.
        heard = (token for token in reversed(prompt_ids[-16:]) if not tokenizer.is_silent(token))
        self._ids = [*islice(heard, 4)][::-1]
        self._given = len(self._ids)
        self._prefix = tokenizer.decode(self._ids)

    @property
    def even(self) -> bool:
        """Whether the next token adds its fixed text, if it has one: nothing waits for the end of a character.

        Such tokens may be left out here: no text depends on them.
        """
        return self._fixed is not None and len(self._ids) == self._given

    def push(self, token: int) -> str:
        """Return the text that `token` completes, which may be none."""
        if self._fixed is not None and len(self._ids) == self._given:
            # Nothing waits for the end of a character. Most tokens are known, so the call is left out for them.
            known = self._fixed.get(token) or self._tokenizer.fixed_text(token)
            if known is not None:
                self._ids, self._given, self._prefix = [token], 1, known
                return known
        if self._tokenizer.is_silent(token):
            return self.flush() + self._spoken[token] if token in self._spoken else ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(_UNFINISHED):
            return self._give(len(self._ids), text)
        if len(self._ids) - self._given >= _LONGEST_TAIL:
            return self._give_part(text)
        return ""

    def extend(self, tokens: list[int]) -> str:
        """Return the text that `tokens` complete together; long runs are decoded at once if most need it."""
        if self._spoken or self._fixed is not None:
            return "".join(map(self.push, tokens))
        head = [token for token in tokens[:-_TAIL] if not self._tokenizer.is_silent(token)]
        piece = ""
        if head:
            self._ids += head
            text = self._tokenizer.decode(self._ids)
            piece = "" if text.endswith(_UNFINISHED) else self._give(len(self._ids), text)
        return piece + "".join(map(self.push, tokens[-_TAIL:]))

    def flush(self) -> str:
        """Return the rest at the end; half a character becomes U+FFFD."""
        return self._give(len(self._ids), self._tokenizer.decode(self._ids))

    def _give(self, count: int, text: str) -> str:
        piece = text[len(self._prefix) :]
        if piece:
            self._ids = self._ids[self._given :]
            self._given = count - self._given
            self._prefix = self._tokenizer.decode(self._ids[: self._given])
        return piece

    def _give_part(self, text: str) -> str:
        """Give out all but the last tokens of a run without whole characters, so that it stays cheap to decode."""
        for count in range(len(self._ids) - 1, len(self._ids) - 4, -1):
            head = self._tokenizer.decode(self._ids[:count])
            if head + self._tokenizer.decode(self._ids[count:]) == text:
                return self._give(count, head)
        return ""
