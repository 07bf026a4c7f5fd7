"""Bodies of requests to `/v1/responses`, and the chats that they are."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from ppengine.http.api_errors import ApiError, invalid
from ppengine.http.body import Body
from ppengine.http.chat_fields import ChatRequest, ContentPart, Message
from ppengine.http.request_fields import StreamOptions
from ppengine.http.structured_fields import JsonSchemaFormat, ResponseFormat
from ppengine.http.tool_fields import CalledFunction, Function, NamedFunction, NamedTool, Tool, ToolCall, ToolChoice

_INCLUDED = ("reasoning.encrypted_content",)
"""Values of `include` that add nothing: there is no such thing here."""


class ReasoningOptions(msgspec.Struct, kw_only=True):
    """How much to reason: see `ChatRequest.reasoning_effort`. There are no summaries."""

    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`text`, `json_object`, or `json_schema` with the schema beside its name."""

    type: str
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> ResponseFormat:
        """Return the form as chats have it. Raises ApiError."""
        if self.type not in ("text", "json_object", "json_schema"):
            text = f"text.format.type is {self.type[:80]}; it must be text, json_object or json_schema"
            raise _unsupported(text, "text.format")
        if self.type == "json_schema" and self.schema is None:
            raise invalid("text.format of type json_schema needs a schema", "text.format")
        schema = JsonSchemaFormat(name=self.name, description=self.description, schema=self.schema, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(msgspec.Struct, kw_only=True):
    """The form of the text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesTool(msgspec.Struct, kw_only=True):
    """A tool. Only functions reach the model; tools of OpenAI's own servers are left out."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(msgspec.Struct, kw_only=True):
    """The function that must be called."""

    type: Literal["function"]
    name: str


class InputItem(msgspec.Struct, kw_only=True):
    """An item of the conversation: a message, a call, its output, or reasoning."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class ResponsesRequest(Body, kw_only=True):
    """Body of `/v1/responses`, with the sampling parameters of chats."""

    ignored: ClassVar[frozenset[str]] = frozenset({
        "client_metadata", "max_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "service_tier",
    })  # fmt: skip
    no_op: ClassVar[dict[str, tuple[object, ...]]] = {
        "background": (False,),
        "conversation": (),
        "context_management": (),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }

    names: ClassVar[dict[str, str]] = {
        "response_format": "text.format", "max_tokens": "max_output_tokens", "messages": "input", "prompt": "input",
    }  # fmt: skip
    """Fields as the client names them, by their names in a chat."""

    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def functions(self) -> list[ResponsesTool]:
        """Return the tools that are offered to the model."""
        return [tool for tool in self.tools or [] if tool.type == "function"]

    def as_chat(self) -> ChatRequest:
        """Return the same request as a chat. Raises ApiError."""
        self._check()
        choice: ToolChoice | None
        if isinstance(self.tool_choice, ResponsesNamedTool):
            choice = NamedTool(type="function", function=NamedFunction(self.tool_choice.name))
        else:
            choice = self.tool_choice
        tools = [
            Tool(
                type="function",
                function=Function(
                    name=tool.name or "", description=tool.description, parameters=tool.parameters, strict=tool.strict
                ),
            )
            for tool in self.functions()
        ]
        return ChatRequest(
            model=self.model, messages=self._messages(), max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, seed=self.seed,
            repetition_penalty=self.repetition_penalty, min_tokens=self.min_tokens, ignore_eos=self.ignore_eos,
            stream=self.stream, user=self.user, priority=self.priority,
            cache_salt=self.cache_salt, chat_template_kwargs=self.chat_template_kwargs,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            tools=tools or None, tool_choice=choice, parallel_tool_calls=self.parallel_tool_calls,
            response_format=None if self.text is None or self.text.format is None else self.text.format.as_chat(),
        )  # fmt: skip

    def _check(self) -> None:
        """Raise ApiError for a value that this server cannot honour."""
        if self.store:
            raise _unsupported("store is true; this server keeps no responses: give false", "store")
        if self.previous_response_id is not None:
            text = "previous_response_id is set; this server keeps no responses: send the whole conversation as input"
            raise _unsupported(text, "previous_response_id")
        if other := [one for one in self.include or [] if one not in _INCLUDED]:
            raise _unsupported(f"include has {other[0][:80]}; this server takes {' or '.join(_INCLUDED)}", "include")

    def _messages(self) -> list[Message]:
        """Return the messages of the chat. Instructions and the first system messages are one: templates take one."""
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[Message] = []
        reasoning: str | None = None
        for number, item in enumerate(items):
            if item.type == "reasoning":
                reasoning = _text(item.content)
            elif item.type == "message" and item.role is not None:
                thought = reasoning if item.role == "assistant" else None
                messages.append(Message(role=item.role, content=item.content, reasoning_content=thought))
                reasoning = None
            elif item.type == "function_call":
                called = CalledFunction(name=item.name or "", arguments=item.arguments)
                if not messages or messages[-1].role != "assistant":
                    messages.append(Message(role="assistant", reasoning_content=reasoning))
                    reasoning = None
                calls = messages[-1].tool_calls or []
                messages[-1].tool_calls = [*calls, ToolCall(id=item.call_id, function=called)]
            elif item.type == "function_call_output":
                messages.append(Message(role="tool", content=item.output, tool_call_id=item.call_id))
            else:
                right = "message (with a role), function_call, function_call_output and reasoning"
                raise invalid(f"input[{number}] is of type {item.type[:80]}; this server takes {right}", "input")
        first = next((at for at, one in enumerate(messages) if one.role not in ("system", "developer")), len(messages))
        system = [self.instructions or "", *(str(one.for_template()["content"]) for one in messages[:first])]
        whole = "\n\n".join(text for text in system if text)
        return [*([Message(role="system", content=whole)] if whole else []), *messages[first:]]


def _text(content: str | list[ContentPart] | None) -> str | None:
    return "".join(part.text or "" for part in content) if isinstance(content, list) else content


def _unsupported(text: str, param: str) -> ApiError:
    return ApiError(400, "invalid_request_error", text, param=param, code="unsupported_value")
