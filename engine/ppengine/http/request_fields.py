"""Bodies of requests: each known field is honoured, or refused by name unless its value changes nothing."""

from __future__ import annotations

import difflib
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgspec
from typing_extensions import override

from ppengine.http.api_errors import ApiError, invalid
from ppengine.http.body import Body
from ppengine.http.field_errors import field_error, json_text
from ppengine.http.structured_fields import StructuredFields
from ppengine.protocol.sampling import SamplingParams

T = TypeVar("T", bound="Body")


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool = False
    """Send the usage in an event of its own, at the end."""
    continuous_usage_stats: bool = False
    """Send it in each event, too."""


class CommonFields(StructuredFields, kw_only=True):
    """Fields that completions and chats share."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    request_id: str | None = None
    """A part of the id, unless the header `x-request-id` has it."""
    truncate_prompt_tokens: int | None = None
    """Most tokens of a prompt; its last ones are taken. -1: as many as fit beside the output."""
    include_stop_str_in_output: bool | None = None
    """Let a stop text, or the text of a stop token, end the answer."""
    skip_special_tokens: bool | None = None
    """False: special tokens have a text in the answer."""
    return_token_ids: bool | None = None
    """Let answers have the token ids of prompt and output."""
    return_tokens_as_token_ids: bool | None = None
    """Write tokens with log-probabilities as `token_id:N`."""

    def most_prompt(self, max_model_len: int, output: int) -> int | None:
        """Return the most tokens that are taken of a prompt; None: all. Raises ApiError.

        `output`: most tokens of the answer.
        """
        most = self.truncate_prompt_tokens
        if most is not None and (most < -1 or most == 0):
            field = "truncate_prompt_tokens"
            raise invalid(f"{field} is {most}; it must be at least 1, or -1 for as many as fit", field)
        return max(1, max_model_len - output) if most == -1 else most

    def params(self, most_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """Return how the core samples; stop texts are found here. Raises ApiError.

        `most_tokens` None: as many as the model allows. `logprobs` is the number of the best ones a token; None: none.
        """
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid(
                f"best_of is {self.best_of}; it must be n ({self.n or 1}): ask for n continuations", "best_of"
            )
        values = zip(_SAMPLING, _sampling_of(self), strict=True)
        given: dict[str, Any] = {name: value for name, value in values if value is not None}
        if self.seed is not None and -(2**63) <= self.seed < 0:
            # vLLM draws a seed for -1. OpenAI takes all of 64 bits, the core those of 63.
            given["seed"] = None if self.seed == -1 else self.seed % 2**63
        given["structured_outputs"] = self.constraint()
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs is given with stream; an event has no place for them", "prompt_logprobs")
        try:
            # Checked with their texts, and sent without them: the core has token ids alone.
            whole = SamplingParams(**given, stop=self.stops(), max_tokens=most_tokens, logprobs=logprobs)
        except ValueError as error:
            name = str(error).split(" ", 1)[0]
            raise invalid(str(error), name if name in type(self).__struct_fields__ else None) from None
        # Without another check of everything, as `replace` has it.
        msgspec.structs.force_setattr(whole, "stop", [])
        msgspec.structs.force_setattr(whole, "detokenize", False)
        return whole

    def prompt_values(self) -> dict[str, int]:
        """Return how many log-probabilities an answer has for each token of a prompt, by the field that wants them."""
        return {} if self.prompt_logprobs is None else {"prompt_logprobs": self.prompt_logprobs + 1}

    @property
    def repeating(self) -> str:
        """Name of the field for which each choice has its whole prompt; empty: none has it."""
        return "return_token_ids" if self.return_token_ids else ""

    def stops(self) -> list[str]:
        """Return the stop texts."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


VALUES_MOST = 2**20
"""Commas in a body: a million token ids are read in 0.1 s, and all streams of the process wait for that."""
STRUCTURE_MOST = 2**17
"""Objects, lists and fields in a body. They take 2 µs each, so as many as 16 MB may have would take up to 5 s."""
MESSAGES_MOST = 2**13
"""Entries of a conversation: 100,000 take 0.7 s, and all streams of the process wait for that."""
_SAMPLING = (
    "n", "temperature", "top_p", "top_k", "seed", "min_tokens", "stop_token_ids", "ignore_eos", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "prompt_logprobs",
)  # fmt: skip
_sampling_of = attrgetter(*_SAMPLING)


class CompletionRequest(CommonFields, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    add_special_tokens: bool = True
    echo: bool | None = None
    """Begin each text with the prompt; with `logprobs`, those of the prompt come first."""

    @property
    def prompt_alone(self) -> bool:
        """Whether no output is wanted: the engine makes one token, which is left out."""
        return bool(self.echo) and self.max_tokens == 0

    def sampling(self) -> SamplingParams:
        """Return how the core samples; the default of `max_tokens` is OpenAI's. Raises ApiError."""
        most = 16 if self.max_tokens is None else self.max_tokens
        sampling = self.params(1 if self.prompt_alone else most, self.logprobs)
        wanted = [one for one in (self.prompt_logprobs, self.logprobs if self.echo else None) if one is not None]
        return msgspec.structs.replace(sampling, prompt_logprobs=max(wanted)) if wanted else sampling

    @override
    def prompt_values(self) -> dict[str, int]:
        found = super().prompt_values()
        if self.echo and self.logprobs is not None:
            found["logprobs"] = self.logprobs + 1
        # Each choice repeats those of its prompt.
        return {name: count * (self.n or 1) for name, count in found.items()}

    @property
    @override
    def repeating(self) -> str:
        return "echo" if self.echo else super().repeating

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids. Raises ApiError."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if not given:
            raise invalid("prompt is an empty list; give a text, token ids, or a list of either", "prompt")
        # A look at each of some thousand ids would take longer than all else.
        kinds = set(map(type, given))
        if kinds == {int}:
            return [cast("list[int]", given)]
        if int in kinds:
            raise invalid("prompt mixes token ids with texts; give a text, token ids, or a list of either", "prompt")
        return [one for one in given if not isinstance(one, int)]


def decode(body: bytes, kind: type[T]) -> T:
    """Return the body of a request. Raises ApiError, which names the field at fault."""
    if len(body) > STRUCTURE_MOST:  # A shorter one cannot have as many.
        _check_structure(body)
    try:
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise invalid(f"the body is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise invalid(f"the body is {json_text(data)}; it must be an object")
    fields = kind.__struct_fields__
    for name in [name for name in data if name not in fields]:
        _check_unknown(name, data.pop(name), kind)
    for name in ("messages", "input"):
        if isinstance(value := data.get(name), list) and len(value) > MESSAGES_MOST:
            raise invalid(f"{name} has {len(value)} entries; at most {MESSAGES_MOST} are taken", name)
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except (ValueError, RecursionError) as error:
        raise field_error(error, data, kind) from None


_PLACES = {
    "extra_body": "its fields are written beside the others; openai-python does so",
    "input": "it is one of /v1/responses",
    "messages": "it is one of /v1/chat/completions",
    "prompt": "it is one of /v1/completions",
}
"""Right places of fields that are often in a wrong one."""


def _check_structure(body: bytes) -> None:
    """Raise ApiError for a body of too many values, objects, lists and fields. The last three do not count in texts."""
    if body.count(b",") > VALUES_MOST:
        raise invalid(f"the body has more than {VALUES_MOST} commas, the most that are taken")
    if _structure(body) <= STRUCTURE_MOST:
        return
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') <= 4 * STRUCTURE_MOST and _structure(b"".join(plain.split(b'"')[::2])) <= STRUCTURE_MOST:
        return
    raise invalid(f"the body has more than {STRUCTURE_MOST} objects, lists and fields, the most that are taken")


def _structure(body: bytes) -> int:
    return sum(map(body.count, (b"{", b"[", b":")))


def _check_unknown(name: str, value: object, kind: type[Body]) -> None:
    """Raise ApiError for a field that this server does not have, unless it is null or changes nothing."""
    no_op = kind.no_op.get(name)
    if value is None or name in kind.ignored or (no_op is not None and any(value == one for one in no_op)):
        return
    if no_op is not None:
        accepted = ["null", *(msgspec.json.encode(one).decode() for one in no_op)]
        text = f"{name} is {json_text(value)}; this server does not have it and takes {' or '.join(accepted)}"
        raise ApiError(400, "invalid_request_error", text, param=name, code="unsupported_parameter")
    near = difflib.get_close_matches(name[:80], kind.__struct_fields__, n=1)
    hint = f"did you mean {near[0]}?" if near else _PLACES.get(name, "")
    raise ApiError(
        400, "invalid_request_error", f"unknown field {name[:80]}{f'; {hint}' if hint else ''}",
        param=name[:80], code="unknown_parameter",
    )  # fmt: skip
