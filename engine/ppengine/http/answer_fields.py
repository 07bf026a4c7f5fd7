"""Bodies of answers, in OpenAI's form. A field that OpenAI always sends has no default here."""

from __future__ import annotations

import msgspec


class PromptDetails(msgspec.Struct):
    """Prompt tokens by their source."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct):
    """Output tokens by their purpose."""

    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | msgspec.UnsetType = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    """One of the best tokens of a place."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """The token of a place, and the best ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log-probabilities of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None = None


class PromptToken(msgspec.Struct, kw_only=True):
    """A token at one position of a prompt, as vLLM has it."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = list[dict[str, PromptToken] | None]
"""Tokens by id for each position of a prompt; none for the first."""


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, in lists of one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One continuation, or a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptTokens | msgspec.UnsetType = msgspec.UNSET
    stop_reason: str | int | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Answer of `/v1/completions`, or one event of it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class CallFunction(msgspec.Struct, kw_only=True):
    """The function of a tool call, or a part of its arguments, which are JSON."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str


class CallDelta(msgspec.Struct, kw_only=True):
    """A part of a tool call; the first has id, type and name."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: CallFunction


class Call(msgspec.Struct, kw_only=True):
    """A call of a function that was offered."""

    id: str
    type: str = "function"
    function: CallFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """The answer of the model. The reasoning has both names that clients read."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[Call] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of `/v1/chat/completions`."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptTokens | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    """A part of the model's answer; the first has the role."""

    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct, kw_only=True):
    """The model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "ppengine"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of `/v1/models`."""

    object: str = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, kw_only=True):
    """Answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """Answer of `/detokenize`."""

    prompt: str


class Version(msgspec.Struct):
    """Answer of `/version`."""

    version: str


class Load(msgspec.Struct):
    """Answer of `/load`: open requests of this process."""

    server_load: int
