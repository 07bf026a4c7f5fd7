"""Messages between the process that renders chat templates and its parent, on a socket of the parent."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


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


class Rendered(msgspec.Struct, tag="rendered", kw_only=True):
    """Text of a chat, or the reason why there is none."""

    number: int
    text: str = ""
    error: str = ""
    """One line; empty with a text."""
    code: Literal["INVALID", "DOES_NOT_FIT", "BUSY"] = "INVALID"
    """Code of the refusal that the error leads to."""


class RendererReady(msgspec.Struct, tag="renderer-ready", kw_only=True):
    """The process has set its limits and takes chats."""


FromRenderer = Rendered | RendererReady
