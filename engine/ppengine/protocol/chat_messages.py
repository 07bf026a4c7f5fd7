"""Messages between the process of chat templates and tokens and its parent, on a socket of the parent."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ppengine.protocol.frames import MAX_FRAME_BYTES

CHAT_MOST = MAX_FRAME_BYTES // 4 - 1024
"""Most characters of a rendered chat, which comes in one message; a character has at most four bytes."""


class Chat(msgspec.Struct, kw_only=True):
    """The arguments of a chat template."""

    messages: list[dict[str, Any]]
    """Messages of the chat, each with `role` and `content`."""
    tools: list[dict[str, Any]] | None = None
    """Functions that the model may call, in OpenAI's form."""
    add_generation_prompt: bool = True
    """Whether the text ends with the beginning of an answer."""
    options: dict[str, Any] = {}
    """Further names for the template, as `enable_thinking`."""


class Render(msgspec.Struct, tag="render", kw_only=True):
    """One chat to render; the parent sends the next when this one is answered."""

    number: int
    chat: Chat
    most: int
    """Most characters of the text."""
    cpu_s: int
    """Processor seconds after which the kernel ends the process; up to one more, as it counts whole ones."""


class Tokenize(msgspec.Struct, tag="tokenize", kw_only=True):
    """Texts whose tokens are wanted."""

    number: int
    texts: list[str]
    special: bool
    """Whether the special tokens of a prompt are around each; a rendered chat has its own."""
    cpu_s: int
    """See `Render`."""


class Answered(msgspec.Struct, kw_only=True):
    """An answer, or the reason why there is none."""

    number: int
    error: str = ""
    """One line; empty: there is none."""
    code: Literal["INVALID", "DOES_NOT_FIT", "BUSY"] = "INVALID"
    """Code of the refusal that the error leads to."""


class Rendered(Answered, tag="rendered", kw_only=True):
    """Text of a chat."""

    text: str = ""


class Tokenized(Answered, tag="tokenized", kw_only=True):
    """Tokens of each text."""

    token_ids: list[list[int]] = []


class RendererReady(msgspec.Struct, tag="renderer-ready", kw_only=True):
    """The process has set its limits and takes work."""


ToRenderer = Render | Tokenize
FromRenderer = Rendered | Tokenized | RendererReady
