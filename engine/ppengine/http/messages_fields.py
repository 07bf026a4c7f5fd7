"""Bodies of requests to `/v1/messages`, Anthropic's form, and the chats that they are."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ppengine.http.api_errors import invalid
from ppengine.http.body import Body
from ppengine.http.chat_fields import ChatRequest, Message
from ppengine.http.structured_fields import JsonSchemaFormat, ResponseFormat
from ppengine.http.tool_fields import CalledFunction, Function, NamedFunction, NamedTool, Tool, ToolCall, ToolChoice


class Content(msgspec.Struct, kw_only=True):
    """A block of a message: text, a call, its result, or reasoning."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Content] | None = None
    thinking: str | None = None


class Turn(msgspec.Struct, kw_only=True):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Content]


class MessagesTool(msgspec.Struct, kw_only=True):
    """A tool. Only those with a schema reach the model; tools of Anthropic's own are left out."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessagesToolChoice(msgspec.Struct, kw_only=True):
    """How the model uses tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct, kw_only=True):
    """Whether the chat template is asked for reasoning; how much, the model decides."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(msgspec.Struct, kw_only=True):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Form of the answer. `effort` says nothing to the models that run here."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Body, kw_only=True):
    """Body of `/v1/messages/count_tokens`."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "betas", "cache_control", "context_management", "inference_geo", "metadata", "service_tier", "speed",
    })  # fmt: skip
    no_op: ClassVar[dict[str, tuple[object, ...]]] = {"container": (), "mcp_servers": ([],), "output_format": ()}

    names: ClassVar[dict[str, str]] = {
        "response_format": "output_config.format", "stop": "stop_sequences", "prompt": "messages",
    }  # fmt: skip
    """Fields as the client names them, by their names in a chat."""

    messages: list[Turn]
    system: str | list[Content] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat. Raises ApiError."""
        choice = self.tool_choice
        form = None if self.output_config is None else self.output_config.format
        options = None if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        tools = [
            Tool(
                type="function",
                function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema),
            )
            for tool in self.tools or []
            if tool.input_schema is not None
        ]
        messages = self._messages()
        return ChatRequest(
            model=self.model, messages=messages, tools=tools or None, chat_template_kwargs=options,
            continue_final_message=bool(messages) and messages[-1].role == "assistant",
            tool_choice=None if choice is None else _choice(choice),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            response_format=None if form is None else ResponseFormat(
                type="json_schema", json_schema=JsonSchemaFormat(schema=form.schema)),
        )  # fmt: skip

    def _messages(self) -> list[Message]:
        messages = []
        if system := _text(self.system, "system"):
            messages.append(Message(role="system", content=system))
        for number, turn in enumerate(self.messages):
            if isinstance(turn.content, str):
                messages.append(Message(role=turn.role, content=turn.content))
            elif turn.role == "assistant":
                messages.append(_assistant(turn.content, number))
            else:
                messages += _user(turn, turn.content, number)
        return messages


class MessagesRequest(CountRequest, kw_only=True):
    """Body of `/v1/messages`, with the sampling parameters of chats."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat. Raises ApiError."""
        return msgspec.structs.replace(
            super().as_chat(), max_tokens=self.max_tokens, stop=self.stop_sequences, stream=self.stream,
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=self.seed,
            repetition_penalty=self.repetition_penalty, ignore_eos=self.ignore_eos, priority=self.priority,
            cache_salt=self.cache_salt,
        )  # fmt: skip


def _choice(choice: MessagesToolChoice) -> ToolChoice:
    if choice.type == "tool":
        return NamedTool(type="function", function=NamedFunction(choice.name or ""))
    return "required" if choice.type == "any" else choice.type


def _assistant(blocks: list[Content], number: int) -> Message:
    calls = [
        ToolCall(id=block.id, function=CalledFunction(name=block.name or "", arguments=block.input))
        for block in blocks
        if block.type == "tool_use"
    ]
    thoughts = "".join(block.thinking or "" for block in blocks if block.type == "thinking")
    rest = [block for block in blocks if block.type not in ("tool_use", "thinking", "redacted_thinking")]
    text = _text(rest, f"messages[{number}]")
    return Message(role="assistant", content=text, tool_calls=calls or None, reasoning_content=thoughts or None)


def _user(turn: Turn, blocks: list[Content], number: int) -> list[Message]:
    """Return the results of calls, each a message of its own, and then the text."""
    place = f"messages[{number}]"
    messages = [
        Message(role="tool", tool_call_id=block.tool_use_id, content=_text(block.content, place))
        for block in blocks
        if block.type == "tool_result"
    ]
    rest = [block for block in blocks if block.type != "tool_result"]
    return [*messages, *([Message(role=turn.role, content=_text(rest, place))] if rest or not messages else [])]


def _text(content: str | list[Content] | None, place: str) -> str:
    """Return the text of blocks. Raises ApiError for anything but text."""
    if not isinstance(content, list):
        return content or ""
    other = next((block.type for block in content if block.type != "text" or block.text is None), None)
    if other is not None:
        raise invalid(f"{place} has a block of type {other[:80]}; this model reads text alone", place.partition("[")[0])
    return "\n".join(block.text or "" for block in content)
