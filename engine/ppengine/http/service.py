"""From the body of a request to running generations: checks, tokens, ids, room."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from ppengine.checkpoint.absent_tokenizer import AbsentTokenizer
from ppengine.checkpoint.model_spec import read_spec
from ppengine.checkpoint.prompt_encoder import PromptEncoder
from ppengine.checkpoint.template_source import TOOL_USE, template_source
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import EngineConfig
from ppengine.common.one_line import one_line
from ppengine.http.answer_limits import check_size
from ppengine.http.api_errors import ApiError, invalid, too_long, unavailable
from ppengine.http.chat_fields import ChatRequest, TokenizeRequest
from ppengine.http.chat_prompt import chat_text
from ppengine.http.chat_renderer import ChatRenderer
from ppengine.http.client_limits import ClientLimits
from ppengine.http.client_stats import Call
from ppengine.http.followed import Followed
from ppengine.http.front_link import FrontLink
from ppengine.http.generation import Generation
from ppengine.http.prompt_tokens import PromptTokens
from ppengine.http.reply.reasoning_splitter import begins_inside
from ppengine.http.reply.reply_form import ReplyForm, form_of
from ppengine.http.reply.reply_reader import ReplyFactory
from ppengine.http.request_fields import CommonFields, CompletionRequest
from ppengine.http.sampling_defaults import SamplingDefaults
from ppengine.http.tool_fields import Function, certain_parser, functions_of, schemas
from ppengine.protocol.clients import ROUTES
from ppengine.protocol.offline import Added
from ppengine.protocol.sampling import MOST_TOKEN, SamplingParams
from ppengine.protocol.verbs import Submit

CHAT_MOST = 2**22
"""Most characters of a rendered chat."""
USER_MOST = 64
"""Most characters of `user` that consoles get as the owner of a request."""
PROMPTS_MOST = 1024
"""Most prompts of one request."""
CHOICES_MOST = 4096
"""Most choices of one call: the core queues all of them in one turn, at 20 µs each, while all streams wait."""
TOKENS_MOST = 2**20
"""Most tokens of all prompts of one request."""
CONSTRAINTS_MOST = 2**18
"""Characters of the constraints of all prompts of a request: the core checks each."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
_PREFIXES = {route: prefix for prefix, route in ROUTES.items()}
_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


@dataclass(frozen=True)
class Caller:
    """The author of a request: the name of the key, the `x-request-id` header, and the counts of the call."""

    name: str
    request_id: str | None
    call: Call


class Service:
    """Serves one engine. `most_open`: requests that may be open at once in this process."""

    def __init__(
        self, config: EngineConfig, link: FrontLink, renderer: ChatRenderer, limits: ClientLimits, most_open: int
    ) -> None:
        self.config, self.link = config, link
        absent = config.profile.model.skip_tokenizer
        self.tokenizer = AbsentTokenizer() if absent else Tokenizer.load(Path(config.model_path))
        self.models = config.model_names
        self.model = self.models[0]
        self.created = int(config.started_wall)
        self._renderer, self._limits, self._most_open = renderer, limits, most_open
        self._encoder = PromptEncoder(self.tokenizer, config.max_model_len)
        self._tokens = PromptTokens(self.tokenizer, self._encoder, config.max_model_len)
        http = config.profile.http
        folder = Path(config.model_path)
        self._defaults = SamplingDefaults(folder, used=http.generation_config == "auto")
        template = template_source(folder, TOOL_USE) or template_source(folder)
        self.takes_chats = template is not None and not absent
        self.reply_form = form_of(template, http.tool_parser, http.reasoning)
        self._spoken = self.tokenizer.special_ids(self.reply_form.special)

    @cached_property
    def vocabulary(self) -> int:
        """Token ids of the model, which may be more than the tokenizer has texts for. Needs the `config.json`."""
        return read_spec(Path(self.config.model_path)).vocab_size

    async def complete(self, request: CompletionRequest, caller: Caller) -> tuple[str, list[Generation]]:
        """Begin the generations of a completion; return its id and one a prompt. Raises ApiError."""
        await self._check(request, caller)
        prompts = request.prompts()
        if len(prompts) > PROMPTS_MOST:
            raise invalid(f"{len(prompts)} prompts; at most {PROMPTS_MOST} are taken", "prompt")
        special = request.add_special_tokens
        if any(isinstance(one, str) for one in prompts):
            self.needs_tokenizer("prompt", "send prompt as token ids")
        ids = await self._tokens.of_all(prompts, special=special)
        return await self._begin(COMPLETIONS, ids, request, caller)

    async def chat(
        self, request: ChatRequest, caller: Caller, route: str = CHATS
    ) -> tuple[str, Generation, ReplyFactory]:
        """Begin the generation of a chat; return its id, the generation and its readers. Raises ApiError."""
        await self._check(request, caller)
        functions, certain = request.functions(), certain_parser(request.tool_choice)
        if functions and certain is None and self.reply_form.tool_parser is None:
            text = "tools: this model's chat template has no form of tool calls that is known; see http.tool_parser"
            raise ApiError(400, "invalid_request_error", text, param="tools", code="unsupported_parameter")
        text = await self._rendered(request, functions)
        # A text that is constrained begins with its form: it has no place for reasoning, and no free calls.
        form = self.reply_form if request.constraint_field is None or certain is not None else ReplyForm()
        replies = ReplyFactory(
            form=form, inside=form.reasoning is not None and begins_inside(text, request.begun, form.reasoning),
            functions=schemas(functions), parallel=request.parallel, certain=certain,
        )  # fmt: skip
        ids = await self._tokens.of_text(text, special=False)
        spoken = {} if replies.plain else self._spoken
        name, (generation,) = await self._begin(route, [ids], request, caller, spoken)
        return name, generation, replies

    async def count(self, request: ChatRequest) -> int:
        """Return the number of tokens of a chat. Raises ApiError."""
        self.check_model(request.model)
        text = await self._rendered(request, request.functions())
        return len(await self._tokens.of_text(text, special=False))

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        """Return the token ids of a prompt or chat. Raises ApiError."""
        self.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        self.needs_tokenizer("prompt" if request.messages is None else "messages", "there is none to ask")
        if request.prompt is not None:
            return await self._tokens.of_text(request.prompt, special=request.add_special_tokens)
        text = await self._rendered(request, functions_of(request.tools, None))
        return await self._tokens.of_text(text, special=False)

    def needs_tokenizer(self, param: str, instead: str) -> None:
        """Raise ApiError in an engine that was started without a tokenizer; `instead` says what it can do."""
        if isinstance(self.tokenizer, AbsentTokenizer):
            raise invalid(f"{param} needs a tokenizer; this engine was started without one: {instead}", param)

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for a model that is not served here."""
        profile = self.config.profile
        others = () if profile.http.model_names else (self.config.model_path, profile.model.id)
        if name is not None and name not in self.models and name not in others:
            text = f"model {name[:80]} is not served here; it is {' or '.join(self.models)}"
            raise ApiError(404, "not_found_error", text, param="model", code="model_not_found")

    async def _check(self, request: CommonFields, caller: Caller) -> None:
        self.check_model(request.model)
        self._limits.check(caller.name)
        if request.stops():
            self.needs_tokenizer("stop", "use stop_token_ids")
        if request.bad_words:
            self.needs_tokenizer("bad_words", "use logit_bias")
        await self.link.engine.confirm()
        state = self.link.state
        if state is None or self.link.silent:
            raise unavailable("the engine core does not answer; it may be restarting")
        if state.state in ("loading", "draining", "failed"):
            raise unavailable(f"the engine is {state.state}: {state.message}" if state.message else state.state, 5)
        if self.link.open_requests >= self._most_open:
            text = f"{self.link.open_requests} requests are open, the most that this process takes; try again"
            raise ApiError(429, "rate_limit_error", text, retry_after_s=1)

    async def _rendered(self, request: ChatRequest | TokenizeRequest, functions: list[Function]) -> str:
        self.needs_tokenizer("messages", "send token ids to /v1/completions")
        return await chat_text(self._renderer, request, functions, min(CHAT_MOST, self._encoder.most))

    async def _begin(
        self, route: str, prompts: list[list[int]], request: CompletionRequest | ChatRequest, caller: Caller,
        spoken: Mapping[int, str] | None = None,
    ) -> tuple[str, list[Generation]]:  # fmt: skip
        sampling, name = self._sampling(request), _new_id(_PREFIXES[route], caller.request_id or request.request_id)
        if (choices := len(prompts) * sampling.n) > CHOICES_MOST:
            text = f"{len(prompts)} prompts with n={sampling.n} are {choices} choices; at most {CHOICES_MOST} are taken"
            raise invalid(text, "n")
        if sampling.structured_outputs is not None:
            size = len(prompts) * len(sampling.structured_outputs.compiled_form.text)
            if size > CONSTRAINTS_MOST:
                field = request.constraint_field or "structured_outputs"
                text = f"{field} has {size} characters over all prompts; at most {CONSTRAINTS_MOST} are taken at once"
                raise invalid(text, field)
        most = self.config.max_model_len
        if (taken := request.most_prompt(most, sampling.max_tokens or 1)) is not None:
            prompts = [ids[-taken:] for ids in prompts]
        longest = max(map(len, prompts))
        if longest >= most or sum(map(len, prompts)) > TOKENS_MOST:
            # Reading millions of numbers would hold up the core, and with it all requests.
            text = f"the prompt has {longest} tokens, max_model_len is {most}; at most {most - 1} would fit"
            many = f"the prompts have {sum(map(len, prompts))} tokens; at most {TOKENS_MOST} are taken at once"
            raise too_long(text if longest >= most else many, "prompt")
        if max(map(max, filter(None, prompts)), default=0) > MOST_TOKEN:
            # No message has such a number. The core names others that are not in the vocabulary.
            raise invalid("prompt has a number above 2**31-1, which is no token id", "prompt")
        check_size(request, sampling, prompts)
        names = [name] if len(prompts) == 1 else [f"{name}-{index}" for index in range(len(prompts))]
        try:
            submissions = [
                Submit(
                    prompt_token_ids=ids, sampling=sampling, request=one, priority=request.priority or 0,
                    cache_salt=request.cache_salt,
                )
                for one, ids in zip(names, prompts, strict=True)
            ]  # fmt: skip
        except ValueError as error:
            raise invalid(str(error), str(error).split(" ", 1)[0]) from None
        spoken = self.tokenizer.special_texts if request.skip_special_tokens is False else spoken or {}
        followed = await self._submit(name, submissions, request, sampling, caller)
        caller.call.prompt(sum(map(len, prompts)))
        return name, [
            Generation(
                self.link, self.tokenizer, one, ids, index * sampling.n, request.stops(), sampling.min_tokens,
                spoken, sampling.prompt_logprobs is not None, sampling.stop_token_ids,
                bool(request.include_stop_str_in_output),
            )
            for index, (one, ids) in enumerate(zip(followed, prompts, strict=True))
        ]  # fmt: skip

    async def _submit(
        self, name: str, submissions: list[Submit], request: CompletionRequest | ChatRequest, sampling: SamplingParams,
        caller: Caller,
    ) -> list[Followed]:  # fmt: skip
        """Submit the requests of a call. Raises ApiError if the core takes none."""
        trace = caller.call.trace
        if trace is not None:
            # Before the core has them: a short request may end together with the answer.
            sizes = {one.request or "": len(one.prompt_token_ids or ()) for one in submissions}
            trace.submitted(name, sizes, sampling, bool(request.stream))
        try:
            answer, followed = await self.link.submit(
                submissions, _owner(request.user) or caller.name, caller.name, caller.call.arrived
            )  # fmt: skip
            if answer.error:
                raise _refusal(answer, request, len(submissions))
        except BaseException:
            if trace is not None:
                trace.refused()
            raise
        return followed

    def _sampling(self, request: CompletionRequest | ChatRequest) -> SamplingParams:
        """Return how the core samples, with the tokens of bad words. Raises ApiError."""
        self._defaults.fill(request)
        sampling = request.sampling()
        try:
            ids = self._encoder.bad_words_ids(sampling)
            return (
                msgspec.structs.replace(sampling, bad_words=[], bad_words_ids=ids) if sampling.bad_words else sampling
            )
        except ValueError as error:
            raise invalid(str(error), "bad_words") from None

    def now(self) -> int:
        """Return the time of an answer, in Unix seconds."""
        return int(time.time())


def _refusal(answer: Added, request: CompletionRequest | ChatRequest, prompts: int) -> ApiError:
    """Return the error of a call whose requests the core has refused."""
    if answer.again_s:
        code = "rate_limit_exceeded"
        return ApiError(429, "rate_limit_error", answer.error, code=code, retry_after_s=answer.again_s)
    if answer.lost or answer.later:
        return unavailable(answer.error, 5)
    text = answer.error.removeprefix("prompt 0: ") if prompts == 1 else answer.error
    field, _, words = text.partition(": ")
    if field == "structured_outputs" and request.constraint_field:
        return invalid(f"{request.constraint_field}: {words}", request.constraint_field)
    if field in request.__struct_fields__:
        return invalid(text, field)
    return too_long(text, "prompt") if "max_model_len" in text else invalid(text, "prompt")


def _owner(user: str | None) -> str:
    """Return the user of a request as consoles show it; empty without one."""
    return one_line(user or "", USER_MOST)


def _new_id(prefix: str, wanted: str | None) -> str:
    """Return an unused request id, which contains the client's own where it has one.

    Proxies give one id to all calls that follow from a request of theirs, and a thousand of those may be open.
    """
    if wanted is not None and _ID.fullmatch(wanted):
        return f"{prefix}{wanted}-{secrets.token_hex(6)}"
    return f"{prefix}{secrets.token_hex(6)}"
