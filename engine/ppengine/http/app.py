"""Routes of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from ppengine.common.http_address import parse_http
from ppengine.http import answer_fields as fields
from ppengine.http.api_errors import ApiError, invalid, naming
from ppengine.http.api_keys import ApiKeys
from ppengine.http.call_trace import CallTraces
from ppengine.http.chat_answer import ChatAnswer
from ppengine.http.chat_fields import ChatRequest, DetokenizeRequest, TokenizeRequest
from ppengine.http.client_stats import Call, ClientStats
from ppengine.http.completion_answer import CompletionAnswer
from ppengine.http.field_errors import json_text
from ppengine.http.generation_response import (
    BodyReader,
    GenerationResponse,
    error_response,
    headers_of,
    json_response,
)
from ppengine.http.host_names import HostNames
from ppengine.http.key_limits import LIMIT_HEADERS, Grant, KeyLimits
from ppengine.http.messages_answer import MessagesAnswer, TokenCount
from ppengine.http.messages_fields import CountRequest, MessagesRequest
from ppengine.http.metrics_text import CONTENT_TYPE, exposition
from ppengine.http.paths import Handler, Paths, error_form
from ppengine.http.request_fields import CompletionRequest, T, decode
from ppengine.http.responses_answer import ResponsesAnswer
from ppengine.http.responses_fields import ResponsesRequest
from ppengine.http.service import Caller, Service

_ALIVE = ("serving", "resizing", "paused", "draining", "degraded")
"""States in which a restart of the engine would make things worse: a stage restarts within seconds."""
_READY = ("serving", "resizing")
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
DETOKENIZE_MOST = 2**17
"""Most tokens of a text that is asked for, 0.3 µs each: the tokenizer keeps the GIL, and all streams wait."""
NO_KEY = "(no key)"
"""Client of the calls whose key is unknown or missing."""
_Handler = Callable[[Request, Caller], Awaitable[Response]]


class Routes:
    """Handlers of one service."""

    def __init__(
        self, service: Service, keys: ApiKeys, limits: KeyLimits, stats: ClientStats, traces: CallTraces | None = None
    ) -> None:
        self._service, self._keys, self._limits, self._stats = service, keys, limits, stats
        self._traces = traces
        self._bodies = BodyReader()

    def app(self) -> ASGIApp:
        """Return the application."""
        posts: dict[str, _Handler] = {
            "/v1/chat/completions": self.chat, "/v1/completions": self.complete, RESPONSES: self.respond,
            MESSAGES: self.message, "/v1/messages/count_tokens": self.count, "/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
        }  # fmt: skip
        gets: dict[str, _Handler] = {"/v1/models": self.models, "/version": self.version, "/load": self.load}
        handlers: dict[str, tuple[str, Handler]] = {
            "/health": ("GET", self._probe(_ALIVE)), "/ping": ("GET", self._probe(_ALIVE)),
            "/ready": ("GET", self._probe(_READY)), "/metrics": ("GET", self.metrics),
        }  # fmt: skip
        handlers |= {path: ("POST", self._guarded(path, handler, limited=True)) for path, handler in posts.items()}
        handlers |= {path: ("GET", self._guarded(path, handler)) for path, handler in gets.items()}
        below = {"/v1/models": ("GET", self._guarded("/v1/models/{name:path}", self.model))}
        http = self._service.config.profile.http
        origins = http.allowed_origins
        app = _for_browsers(Paths(handlers, below), origins)
        # No page of a browser reaches a Unix socket; a proxy passes names of its own.
        file = http.listen is not None and parse_http(http.listen).path
        return HostNames(app, origins) if self._keys.none and not file and "*" not in origins else app

    async def complete(self, request: Request, caller: Caller) -> Response:
        """Continue prompts."""
        body = await self._body(request, caller, CompletionRequest)
        name, generations = await self._service.complete(body, caller)
        answer = CompletionAnswer(name, self._service, body, generations)
        return GenerationResponse(name, answer, generations, caller.call, events=bool(body.stream))

    async def chat(self, request: Request, caller: Caller) -> Response:
        """Answer a chat."""
        body = await self._body(request, caller, ChatRequest)
        with naming(body.names):
            name, generation, replies = await self._service.chat(body, caller)
        answer = ChatAnswer(name, self._service, body, generation, replies)
        return GenerationResponse(name, answer, [generation], caller.call, events=bool(body.stream))

    async def respond(self, request: Request, caller: Caller) -> Response:
        """Answer a chat in the form of OpenAI's Responses."""
        body = await self._body(request, caller, ResponsesRequest)
        with naming(body.names):
            name, generation, replies = await self._service.chat(body.as_chat(), caller, RESPONSES)
        answer = ResponsesAnswer(name, self._service, body, generation, replies)
        return GenerationResponse(name, answer, [generation], caller.call, events=bool(body.stream))

    async def message(self, request: Request, caller: Caller) -> Response:
        """Answer a chat in the form of Anthropic's Messages."""
        body = await self._body(request, caller, MessagesRequest)
        with naming(body.names):
            name, generation, replies = await self._service.chat(body.as_chat(), caller, MESSAGES)
        answer = MessagesAnswer(name, self._service, generation, replies)
        response = GenerationResponse(name, answer, [generation], caller.call, events=bool(body.stream))
        response.more_headers["request-id"] = name  # Anthropic's clients read it.
        return response

    async def count(self, request: Request, caller: Caller) -> Response:
        """Return the number of tokens of a message's input."""
        body = await self._body(request, caller, CountRequest)
        with naming(body.names):
            return json_response(TokenCount(await self._service.count(body.as_chat())))

    async def tokenize(self, request: Request, caller: Caller) -> Response:
        """Return the tokens of a prompt."""
        body = await self._body(request, caller, TokenizeRequest)
        ids = await self._service.tokenize(body)
        texts = [self._service.tokenizer.token_text(one) for one in ids] if body.return_token_strs else None
        most = self._service.config.max_model_len
        return json_response(fields.Tokenized(count=len(ids), max_model_len=most, tokens=ids, token_strs=texts))

    async def detokenize(self, request: Request, caller: Caller) -> Response:
        """Return the text of tokens."""
        body = await self._body(request, caller, DetokenizeRequest)
        self._service.check_model(body.model)
        self._service.needs_tokenizer("tokens", "there is none to ask")
        if (count := len(body.tokens)) > DETOKENIZE_MOST:
            raise invalid(f"tokens has {count} numbers; at most {DETOKENIZE_MOST} are taken", "tokens")
        size = self._service.vocabulary
        if (wrong := next((one for one in body.tokens if not 0 <= one < size), None)) is not None:
            text = f"tokens has {json_text(wrong)}, which is not in the vocabulary (0 to {size - 1})"
            raise invalid(text, "tokens")
        return json_response(fields.Detokenized(self._service.tokenizer.decode(body.tokens)))

    async def models(self, request: Request, caller: Caller) -> Response:
        """Return the names of the model, each as a model."""
        return json_response(fields.ModelList(data=[self._model(name) for name in self._service.models]))

    async def model(self, request: Request, caller: Caller) -> Response:
        """Return one model by its name."""
        service, name = self._service, request.path_params["name"]
        service.check_model(name)
        return json_response(self._model(name if name in service.models else service.model))

    async def version(self, request: Request, caller: Caller) -> Response:
        """Return the version of the engine."""
        return json_response(fields.Version(version("ppconsole")))

    async def load(self, request: Request, caller: Caller) -> Response:
        """Return how many requests are open in this process."""
        return json_response(fields.Load(self._service.link.open_requests))

    async def metrics(self, request: Request) -> Response:
        """Return the metrics of the engine in Prometheus' text format."""
        if self._service.link.silent:
            return Response("the engine core does not answer", 503, media_type="text/plain")
        text = exposition(self._service.model, self._service.config, await self._service.link.metrics())
        return Response(text, media_type=CONTENT_TYPE)

    async def _body(self, request: Request, caller: Caller, kind: type[T]) -> T:
        """Read and check the body of a call, which has arrived then. Raises ApiError."""
        data = await self._bodies.read(request)
        caller.call.complete()
        return decode(data, kind)

    def _model(self, name: str) -> fields.Model:
        service = self._service
        if not self._lives(_ALIVE):
            raise ApiError(503, "service_unavailable_error", self._state(), retry_after_s=1)
        return fields.Model(
            id=name, created=service.created, root=service.config.model_path,
            max_model_len=service.config.max_model_len,
        )  # fmt: skip

    def _probe(self, states: tuple[str, ...]) -> Handler:
        async def probe(request: Request) -> Response:
            if states is _READY:
                # A stage that is restarted may be back before the next look at the state.
                await self._service.link.engine.look()
            return Response(self._state(), 200 if self._lives(states) else 503, media_type="text/plain")

        return probe

    def _lives(self, states: tuple[str, ...]) -> bool:
        link = self._service.link
        if link.state is None or link.silent:
            return False
        return link.state.state in states or (states is _ALIVE and link.state.state == "loading" and link.engine.served)

    def _state(self) -> str:
        """Return the engine's state in one line."""
        link = self._service.link
        if link.state is None or link.silent:
            return "the engine core does not answer"
        state = f"{link.state.state}: {link.state.message}" if link.state.message else link.state.state
        silent = ", ".join(link.state.silent_http)
        return f"{state}; these HTTP processes do not answer: {silent}" if silent else state

    def _begin(self, route: str, request: Request, name: str, grant: Grant | None = None) -> Call:
        """Begin a call. One without a key has no trace: strangers must not fill the collector."""
        call = self._stats.begin(name, route, grant)
        if self._traces is not None and name != NO_KEY:
            call.trace = self._traces.begin(route, request.headers, name)
        return call

    def _guarded(self, route: str, handler: _Handler, *, limited: bool = False) -> Handler:
        """Return `handler` behind the check of the key, and count the call by its end."""
        body = error_form(route)

        async def guarded(request: Request) -> Response:
            name, headers = NO_KEY, headers_of(request)
            try:
                name = self._keys.caller(headers.get("authorization"), headers.get("x-api-key"))
                grant = self._limits.enter(name) if limited else None
            except ApiError as error:
                self._begin(route, request, name).end(error.status)
                return error_response(error, body)
            call, status = self._begin(route, request, name, grant), 500
            response: Response | None = None
            try:
                response = await handler(request, Caller(name, headers.get("x-request-id"), call))
                status = response.status_code
            except ApiError as error:
                response, status = error_response(error, body), error.status
            except ClientDisconnect:
                response = Response(status_code=499)
                call.end(499, left=True)
            finally:
                if not isinstance(response, GenerationResponse):
                    call.end(status)
            if grant is not None and isinstance(response, GenerationResponse):
                response.more_headers |= grant.headers()
            elif grant is not None:
                response.headers.update(grant.headers())
            return response

        return guarded


def _for_browsers(app: ASGIApp, origins: list[str]) -> ASGIApp:
    """Let pages of `origins` read the answers of `app` (CORS)."""
    if not origins:
        return app
    shown = ["x-request-id", "request-id", "retry-after", *LIMIT_HEADERS]
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=shown
    )
