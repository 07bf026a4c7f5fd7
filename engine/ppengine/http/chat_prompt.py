"""The text that a model goes on with in a chat: the chat's own, or that of its last message."""

from __future__ import annotations

from typing import Any

from ppengine.http.api_errors import invalid
from ppengine.http.chat_fields import ChatRequest, TokenizeRequest
from ppengine.http.chat_renderer import ChatRenderer
from ppengine.http.tool_fields import Function, for_template
from ppengine.protocol.chat_messages import Chat

_MARK = "\ufdd0"
"""Behind the text of the last message, so that its end is found. U+FDD0 is no character."""


async def chat_text(
    renderer: ChatRenderer, request: ChatRequest | TokenizeRequest, functions: list[Function], most: int
) -> str:
    """Return the text of a chat, of `most` characters at most. Raises ApiError."""
    messages = [one.for_template() for one in request.messages or []]
    if not messages:
        raise invalid("messages is an empty list; give at least one message", "messages")
    continued = bool(request.continue_final_message)
    if continued:
        messages[-1] = _marked(messages[-1])
    chat = Chat(
        messages=messages, tools=for_template(functions), options=request.template_options(),
        add_generation_prompt=request.add_generation_prompt and not continued,
    )  # fmt: skip
    text = await renderer.render(chat, most)
    if not continued:
        return text
    begun, mark, _ = text.rpartition(_MARK)
    if not mark:
        raise invalid("the last message cannot be continued: the chat template leaves its text out", "messages")
    return begun


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """Return the last message with a mark at its end. Raises ApiError unless it is a text of the assistant."""
    if message["role"] != "assistant":
        text = f"continue_final_message needs a last message of the assistant; its role is {message['role']}"
        raise invalid(text, "messages")
    if message.get("tool_calls"):
        raise invalid("the last message has a tool call; a text alone can be continued", "messages")
    return {**message, "content": f"{message['content']}{_MARK}"}
