"""Bodies of requests with the messages of a chat."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from typing_extensions import override

from ppengine.http.api_errors import invalid
from ppengine.http.body import Body
from ppengine.http.request_fields import CommonFields
from ppengine.http.tool_fields import Function, Tool, ToolCall, ToolChoice, call_schema, functions_of
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.structured_outputs import StructuredOutputsParams

_WHITE_SPACE = " ?"
"""White space in calls that are certain: clients read the JSON, so more of it is a waste."""


class ContentPart(msgspec.Struct):
    """A part of a message."""

    type: str
    text: str | None = None
    refusal: str | None = None
    """Text of an earlier answer, in a part of that type."""


class Message(msgspec.Struct, kw_only=True):
    """A message of a chat, with the fields that templates read."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it. Raises ApiError for anything but text."""
        content = self.content
        if isinstance(content, list):
            texts = [part.text if part.text is not None else part.refusal for part in content]
            if None in texts:
                other = content[texts.index(None)].type
                raise invalid(f"a message has a part of type {other}; this model reads text alone", "messages")
            content = "".join(text or "" for text in texts)
        fields = {
            # Few templates know the newer name of the role.
            "role": "system" if self.role == "developer" else self.role, "content": content or "", "name": self.name,
            "tool_calls": [call.for_template() for call in self.tool_calls or []] or None,
            "tool_call_id": self.tool_call_id, "reasoning_content": self.reasoning_content or self.reasoning,
        }  # fmt: skip
        return {name: value for name, value in fields.items() if value is not None}


class ChatRequest(CommonFields, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    """Go on with the text of the last message, which is the assistant's, in place of a new one."""
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """A name for the chat template. `none` asks it for no reasoning, others do as much as it makes of them."""

    include_reasoning: bool | None = None
    """False: the reasoning is left out of the answer."""

    @property
    def names(self) -> dict[str, str]:
        """The client's names of fields that errors of the service name."""
        most = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {"prompt": "messages", "max_tokens": most, "logprobs": "top_logprobs"}

    @property
    def begun(self) -> str:
        """The text that the answer goes on with."""
        last = self.messages[-1].for_template() if self.continue_final_message and self.messages else {}
        return str(last.get("content", ""))

    def template_options(self) -> dict[str, Any]:
        """Return further names for the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        thinking = {"enable_thinking": False} if self.reasoning_effort == "none" else {}
        return effort | thinking | (self.chat_template_kwargs or {})

    def wanted_logprobs(self) -> int | None:
        """Return how many of the best log-probabilities are wanted a token; None: none. Raises ApiError."""
        if self.top_logprobs and not self.logprobs:
            raise invalid(f"top_logprobs is {self.top_logprobs}; it needs logprobs: true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def functions(self) -> list[Function]:
        """Return the functions that the model may call. Raises ApiError."""
        return functions_of(self.tools, self.tool_choice)

    @property
    def parallel(self) -> bool:
        """Whether several calls are wanted."""
        return self.parallel_tool_calls is not False

    @property
    @override
    def constraint_field(self) -> str | None:
        return super().constraint_field or ("tools" if self._call_schema() is not None else None)

    @override
    def constraint(self) -> StructuredOutputsParams | None:
        schema, other = self._call_schema(), super().constraint_field
        if schema is None:
            return super().constraint()
        if other is not None:
            raise invalid(f"{other} and a tool_choice of a call are given; one of them constrains the answer", other)
        try:
            return StructuredOutputsParams(json=schema, whitespace_pattern=_WHITE_SPACE)
        except ValueError as error:
            raise invalid(f"tools: {error}", "tools") from None

    def _call_schema(self) -> dict[str, Any] | None:
        return call_schema(self.functions(), self.tool_choice, parallel=self.parallel)

    def sampling(self) -> SamplingParams:
        """Return how the core samples. Raises ApiError."""
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.params(most, self.wanted_logprobs())


class TokenizeRequest(Body, kw_only=True):
    """Body of `/tokenize`: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    def template_options(self) -> dict[str, Any]:
        """Return further names for the chat template."""
        return self.chat_template_kwargs or {}


class DetokenizeRequest(Body, kw_only=True):
    """Body of `/detokenize`."""

    tokens: list[int]
