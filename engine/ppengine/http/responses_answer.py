"""Answers of `/v1/responses`, whole or as numbered events."""

from __future__ import annotations

import secrets
from typing import Any, Literal

import msgspec

from ppengine.http.answer_forms import named_event, usage_of
from ppengine.http.api_errors import ApiError
from ppengine.http.block_answer import BlockAnswer
from ppengine.http.generation import Generation
from ppengine.http.reply.reply_blocks import Block, Change
from ppengine.http.reply.reply_reader import ReplyFactory
from ppengine.http.responses_fields import ResponsesNamedTool, ResponsesRequest, ResponsesTool, TextFormat
from ppengine.http.service import Service

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[None] = []
    logprobs: list[None] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of reasoning."""

    text: str


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Status
    role: str = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """Reasoning of the model."""

    id: str
    status: Status
    summary: list[None] = []
    content: list[ReasoningText]


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str


Item = MessageItem | ReasoningItem | CallItem


class InputDetails(msgspec.Struct):
    """Input tokens by their source."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct):
    """Output tokens by their purpose."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """Answer of `/v1/responses`."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    store: bool = False
    temperature: float
    text: dict[str, TextFormat]
    tool_choice: str | ResponsesNamedTool
    tools: list[ResponsesTool]
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | msgspec.UnsetType = msgspec.UNSET


class ResponsesAnswer(BlockAnswer):
    """See `Answer`."""

    def __init__(
        self, name: str, service: Service, request: ResponsesRequest, generation: Generation, replies: ReplyFactory
    ) -> None:
        super().__init__(generation, replies)
        self._service, self._number = service, 0
        self._items: dict[Block, Item] = {}
        effort = request.reasoning.effort if request.reasoning is not None else None
        form = (request.text.format if request.text is not None else None) or TextFormat(type="text")
        self._response = Response(
            id=name, created_at=service.now(), status="in_progress", instructions=request.instructions,
            max_output_tokens=request.max_output_tokens, metadata=request.metadata or {}, model=service.model,
            output=[], parallel_tool_calls=replies.parallel, reasoning={"effort": effort, "summary": None},
            temperature=1.0 if request.temperature is None else request.temperature, text={"format": form},
            tool_choice=request.tool_choice or "auto", tools=request.functions(),
            top_p=1.0 if request.top_p is None else request.top_p,
        )  # fmt: skip

    def begin(self) -> bytes:
        """See `Answer`."""
        events = ("response.created", "response.in_progress")
        return b"".join(self._event(kind, response=self._response) for kind in events)

    def end(self) -> bytes:
        """See `Answer`."""
        response = self.message()
        return self._event(f"response.{response.status}", response=response)

    def failed(self, error: ApiError) -> bytes:
        """See `Answer`."""
        response = self._response
        response.status, response.output = "failed", [self._items[block] for block in self.blocks]
        response.error = {"code": "server_error", "message": error.body.message}
        return self._event("response.failed", response=response)

    def refusal(self, error: ApiError) -> bytes:
        """See `Answer`."""
        return error.encode()

    def message(self) -> Response:
        """See `BlockAnswer`."""
        response, usage = self._response, usage_of([self.generation])
        response.output = [self._item(block) for block in self.blocks]
        response.status = "incomplete" if self.reason == "length" else "completed"
        if response.status == "incomplete":
            response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            response.completed_at = self._service.now()
        cached = usage.prompt_tokens_details.cached_tokens
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens, input_tokens_details=InputDetails(cached),
            output_tokens=usage.completion_tokens, output_tokens_details=OutputDetails(self.reader.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )  # fmt: skip
        return response

    def change(self, change: Change) -> bytes:
        """See `BlockAnswer`."""
        block, item = change.block, self._item(change.block)
        at: dict[str, Any] = {"item_id": item.id, "output_index": self.blocks.index(block)}
        whole = {"output_index": at["output_index"], "item": item}
        if change.kind == "begin":
            added = self._event("response.output_item.added", **whole)
            return added if block.kind == "call" else added + self._part("added", block, at)
        kind = _TEXTS[block.kind]
        if block.kind != "call":
            at["content_index"] = 0
        if block.kind == "text":
            at["logprobs"] = []
        if change.kind == "grow":
            return self._event(f"response.{kind}.delta", **at, delta=change.text)
        if block.kind == "call":
            done = self._event(f"response.{kind}.done", **at, name=block.name, arguments=block.text)
        else:
            done = self._event(f"response.{kind}.done", **at, text=block.text) + self._part("done", block, at)
        return done + self._event("response.output_item.done", **whole)

    def _part(self, kind: str, block: Block, at: dict[str, Any]) -> bytes:
        part = OutputText(text=block.text) if block.kind == "text" else ReasoningText(text=block.text)
        place = {"item_id": at["item_id"], "output_index": at["output_index"], "content_index": 0}
        return self._event(f"response.content_part.{kind}", **place, part=part)

    def _item(self, block: Block) -> Item:
        """Return the item of a block as it is now; its id stays."""
        item = self._items.get(block)
        if item is None:
            item = self._items[block] = self._new_item(block)
        item.status = block.status
        if isinstance(item, CallItem):
            item.arguments = block.text
        elif isinstance(item, MessageItem):
            item.content = [OutputText(text=block.text)] if block.text else []
        else:
            item.content = [ReasoningText(text=block.text)] if block.text else []
        return item

    def _new_item(self, block: Block) -> Item:
        if block.kind == "call":
            call = self.replies.call_id()
            return CallItem(id=_name("fc"), status="in_progress", call_id=call, name=block.name, arguments="")
        if block.kind == "text":
            return MessageItem(id=_name("msg"), status="in_progress", content=[])
        return ReasoningItem(id=_name("rs"), status="in_progress", content=[])

    def _event(self, kind: str, **fields: object) -> bytes:
        message = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, message)


_TEXTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}


def _name(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
