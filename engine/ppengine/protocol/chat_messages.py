"""Messages between the core and the process that renders chat templates, on the socket `render`."""

from __future__ import annotations

from typing import Literal

import msgspec


class Render(msgspec.Struct, tag="render", kw_only=True):
    """One chat to render; the core sends the next when this one is answered."""

    number: int
    messages: list[dict[str, str]]
    """Messages of the chat, each with `role` and `content`."""
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
