"""Text to token ids and back, from tokenizer.json alone: no torch, no transformers, no code from the checkpoint."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Backend

from ppengine.common.config import ConfigError

_UNFINISHED = "\ufffd"
_LONGEST_TAIL = 64
"""Tokens of one stream without a whole character among them, from when on a cut is looked for."""

_TEMPLATE_FAULTS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Errors that an expression in a template can raise, as in Python."""


class Tokenizer:
    """Tokenizer of a checkpoint. `eos` is the end-of-sequence token's text and `eos_id` its id, where it has one."""

    def __init__(self, backend: Backend, special: dict[str, str], template: str | None) -> None:
        self._backend = backend
        self._special = special
        self._template = template
        self._compiled: Template | None = None
        self._special_ids = frozenset(
            number for number, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.eos = special.get("eos_token")
        self.eos_id: int | None = None if self.eos is None else backend.token_to_id(self.eos)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a Hugging Face folder. Raises ConfigError in one line."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder}: no tokenizer.json; save it with transformers' AutoTokenizer, or send token ids"
            )
        try:
            backend = Backend.from_str(path.read_text("utf-8"))
        except Exception as error:  # noqa: BLE001 - the Rust library raises bare Exception
            raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
        # What the file may carry for training batches has no place here: prompts are neither cut nor padded.
        backend.no_truncation()
        backend.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        special = {**_special_tokens(_read_json(folder / "special_tokens_map.json")), **_special_tokens(config)}
        return cls(backend, special, _chat_template(folder, config))

    @property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it: no token is longer in a text."""
        return max(map(len, self._backend.get_vocab()), default=0)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with the special tokens around it that tokenizer.json says.

        Its word is final: transformers too ignores `add_bos_token` where there is a tokenizer.json.
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=True).ids
        return ids

    def decode(self, ids: list[int]) -> str:
        """Return the text of `ids`, special tokens left out; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def is_silent(self, token: int) -> bool:
        """Return whether `token` adds nothing to a text: a special one, or padding of the vocabulary."""
        return token in self._special_ids or self._backend.id_to_token(token) is None

    def stream(self, prompt_ids: list[int] | None = None) -> DetokStream:
        """Return an incremental decoder for what follows `prompt_ids`."""
        return DetokStream(self, prompt_ids or [])

    def chat(self, messages: list[dict[str, Any]]) -> str:
        """Return the text of `messages` (`role`, `content`) by the chat template, ready for the assistant's answer.

        Special tokens are in the text already: encode it with `encode_chat`. Raises ConfigError if there is no
        template or it refuses the messages.
        """
        if self._template is None:
            raise ConfigError("this model has no chat template; send the prompt as plain text")
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._template)
            return self._compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._special
            )
        except (TemplateError, *_TEMPLATE_FAULTS) as error:
            raise ConfigError(f"chat template: {' '.join(str(error).split())}") from None

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids of `chat(messages)`, which brings its own special tokens."""
        ids: list[int] = self._backend.encode(self.chat(messages), add_special_tokens=False).ids
        return ids


class DetokStream:
    """Text of a growing output, in pieces that join to the text of the whole.

    A piece is given out only at the end of a character. The text of the last piece's tokens is decoded again in front
    of the next one, because some tokenizers write a token differently at the start of a text. (One exception to the
    joining: in a SentencePiece vocabulary a broken byte spoils the whole run of byte tokens around it, including
    good text that is given out already.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        # The last whole character of the prompt is context enough; one has at most four bytes, so four tokens.
        self._ids = [token for token in prompt_ids[-16:] if not tokenizer.is_silent(token)][-4:]
        self._given = len(self._ids)
        self._prefix = tokenizer.decode(self._ids)

    def push(self, token: int) -> str:
        """Return the text that `token` completes, which may be none."""
        if self._tokenizer.is_silent(token):
            return ""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if not text.endswith(_UNFINISHED):
            return self._give(len(self._ids), text)
        if len(self._ids) - self._given >= _LONGEST_TAIL:
            return self._give_part(text)
        return ""

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


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox that chat templates run in, with the helpers that they expect."""

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        # Jinja's own escapes what HTML would take for markup.
        return json.dumps(value, ensure_ascii=options.pop("ensure_ascii", False), indent=indent, **options)

    def now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = now
    environment.filters["tojson"] = to_json
    return environment


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the template: a file of its own (transformers 5), or a key of tokenizer_config.json, maybe by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return `bos_token`, `eos_token` and the like as texts; they are written as texts or as objects with `content`."""
    found = {}
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
