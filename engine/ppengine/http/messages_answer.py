"""Answers of `/v1/messages`, in Anthropic's form, whole or as events."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from ppengine.http.answer_forms import named_event, usage_of
from ppengine.http.api_errors import ApiError
from ppengine.http.block_answer import BlockAnswer
from ppengine.http.generation import Generation
from ppengine.http.reply.reply_blocks import Block, Change
from ppengine.http.reply.reply_reader import ReplyFactory
from ppengine.http.service import Service

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Types of errors by status; any other is `api_error`, of which those below 500 are invalid requests."""


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text of the model."""

    text: str
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning of the model; the signature is empty, as no server checks it."""

    thinking: str
    signature: str = ""


class DirectCaller(msgspec.Struct, tag_field="type", tag="direct"):
    """The caller of a tool: the model itself."""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool; `input` is an object in JSON."""

    id: str
    name: str
    input: msgspec.Raw
    caller: DirectCaller


class OutputDetails(msgspec.Struct):
    """Output tokens by their purpose."""

    thinking_tokens: int


class DeltaUsage(msgspec.Struct, kw_only=True):
    """Tokens of a message; the input has those alone that no cached block holds."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails
    server_tool_use: None = None


class MessageUsage(DeltaUsage, kw_only=True):
    """Tokens of a message, with all fields that a whole one has."""

    cache_creation: None = None
    inference_geo: None = None
    service_tier: None = None


_Usage = TypeVar("_Usage", bound=DeltaUsage)


class MessageDelta(msgspec.Struct, kw_only=True):
    """The end of a message."""

    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None


class AnswerMessage(msgspec.Struct, kw_only=True):
    """Answer of `/v1/messages`."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: str | None
    stop_sequence: str | None
    stop_details: None = None
    container: None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessagesAnswer(BlockAnswer):
    """See `Answer`."""

    def __init__(self, name: str, service: Service, generation: Generation, replies: ReplyFactory) -> None:
        super().__init__(generation, replies)
        self._name, self._model = name, service.model
        self._ids: dict[Block, str] = {}

    def begin(self) -> bytes:
        """See `Answer`."""
        message = self.message()
        message.stop_reason = message.stop_sequence = None
        return _event("message_start", message=message)

    def end(self) -> bytes:
        """See `Answer`."""
        message = self.message()
        delta = MessageDelta(stop_reason=message.stop_reason, stop_sequence=message.stop_sequence)
        return _event("message_delta", delta=delta, usage=self._usage(DeltaUsage)) + _event("message_stop")

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return b"event: error\ndata: %b\n\n" % self.refusal(error)

    def refusal(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return error_body(error)

    def message(self) -> AnswerMessage:
        """See `BlockAnswer`."""
        return AnswerMessage(
            id=self._name, model=self._model, content=[self._block(block, whole=True) for block in self.blocks],
            stop_reason="stop_sequence" if self.stop_text is not None else _STOP_REASONS[self.reason],
            stop_sequence=self.stop_text, usage=self._usage(MessageUsage),
        )  # fmt: skip

    def change(self, change: Change) -> bytes:
        """See `BlockAnswer`."""
        block, index = change.block, self.blocks.index(change.block)
        if change.kind == "begin":
            return _event("content_block_start", index=index, content_block=self._block(block, whole=False))
        if change.kind == "end":
            return _event("content_block_stop", index=index)
        kind, name = _DELTAS[block.kind]
        return _event("content_block_delta", index=index, delta={"type": kind, name: change.text})

    def _usage(self, kind: type[_Usage]) -> _Usage:
        usage = usage_of([self.generation])
        cached = usage.prompt_tokens_details.cached_tokens
        return kind(
            input_tokens=usage.prompt_tokens - cached, cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens, output_tokens_details=OutputDetails(self.reader.reasoning_tokens),
        )  # fmt: skip

    def _block(self, block: Block, *, whole: bool) -> TextBlock | ThinkingBlock | ToolUseBlock:
        """Return a block, without `whole` an empty one."""
        text = block.text if whole else ""
        if block.kind == "text":
            return TextBlock(text=text)
        if block.kind == "reasoning":
            return ThinkingBlock(thinking=text)
        name = self._ids.get(block) or self._ids.setdefault(block, self.replies.call_id())
        # The arguments of a call that was cut are no JSON.
        arguments = "{}" if not text or block.status == "incomplete" else text
        return ToolUseBlock(id=name, name=block.name, input=msgspec.Raw(arguments.encode()), caller=DirectCaller())


_DELTAS = {"text": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
           "call": ("input_json_delta", "partial_json")}  # fmt: skip


def error_body(error: ApiError) -> bytes:
    """Return an error in Anthropic's form."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    reason = {"type": kind, "message": error.body.message}
    return msgspec.json.encode({"type": "error", "error": reason, "request_id": None})


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, {"type": kind, **fields})
