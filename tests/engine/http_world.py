"""The application of an HTTP process with a scripted model in place of the core, in one process with its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anthropic
import httpx2
import openai
import uvicorn
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import HttpConfig, ModelConfig
from ppengine.http.api_keys import ApiKeys
from ppengine.http.app import Routes
from ppengine.http.call_trace import CallTraces
from ppengine.http.chat_renderer import ChatRenderer
from ppengine.http.client_limits import ClientLimits
from ppengine.http.client_stats import ClientStats
from ppengine.http.connection import TRANSPORT, Connection, server_config
from ppengine.http.event_rows import EventRows
from ppengine.http.followed import Followed
from ppengine.http.front_link import FrontLink
from ppengine.http.key_limits import KeyLimits
from ppengine.http.outbox import Outbox
from ppengine.http.service import Service
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.control import Logprob
from ppengine.protocol.offline import Added, Piece, StateAnswer
from ppengine.protocol.prompt_scores import PromptLogprob
from ppengine.protocol.verbs import Submit
from starlette.types import ASGIApp, Message, Receive, Scope, Send

TINY = Path(__file__).parents[2] / "profiles" / "models" / "tiny"
TEMPLATE = """
{%- for tool in tools or [] %}<tool>{{ tool | tojson }}</tool>{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<call {{ call.id }}>{{ call.function | tojson }}</call>{% endfor %}
{%- endfor %}<|assistant|>{% if enable_thinking %}<think>{% endif %}
"""

HTTP = HttpConfig(tool_parser="hermes", reasoning="think")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Say it.", "parameters": PARAMETERS}}
ASK: list[Any] = [{"role": "user", "content": "How is it in Paris?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "weather", "arguments": {"city": oops}}</tool_call>'
THOUGHT = "<think>\nI look.\n</think>\n\n"
SCRIPTS = {
    "text": "It rains.", "empty": "", "call": CALL, "all": f"{THOUGHT}Let me see.\n{CALL}\n{CALL}", "broken": BROKEN,
    "thought": "<think>I am", "half": f"Well. {CALL[:40]}",
}  # fmt: skip


@dataclass
class ScriptedLink:
    """Gives the same output to each sample of each request, two tokens a piece."""

    tokenizer: Tokenizer
    text: str = ""
    reason: str = "stop"
    submitted: list[Submit] = field(default_factory=list)
    arrived: float = 0.0
    """Time of the newest call, as the service gave it."""
    left: list[Followed] = field(default_factory=list)
    ended_samples: list[tuple[str, int]] = field(default_factory=list)
    forgets: bool = False
    """Leave out the log-probabilities of prompts, as a core that was restarted."""
    backwards: bool = False
    """Write the last sample first."""
    refusal: Added | None = None
    """Answer of the core to all requests."""
    state: StateAnswer = field(
        default_factory=lambda: StateAnswer(nonce=0, state="serving", message="", max_model_len=4096, num_blocks=9)
    )
    silent: bool = False
    later: StateAnswer | None = None
    """State that a look finds."""
    outbox: Outbox = field(default_factory=Outbox)
    rows: EventRows = field(default_factory=EventRows)
    open_requests: int = 0

    @property
    def engine(self) -> ScriptedLink:
        """The state of the engine."""
        return self

    async def confirm(self) -> None:
        self.state = self.later or self.state

    async def submit(
        self, submissions: list[Submit], owner: str, client: str, arrived: float
    ) -> tuple[Added, list[Followed]]:
        self.arrived = arrived
        if self.refusal is not None:
            return self.refusal, []
        self.submitted += submissions
        followed = []
        for one in submissions:
            count = one.sampling.n
            made = Followed(one.request or "", count, [0] * count)
            for sample in reversed(range(count)) if self.backwards else range(count):
                self._write(made, sample, one)
            followed.append(made)
        return Added(nonce=0, requests=[one.request for one in followed]), followed

    def _write(self, followed: Followed, sample: int, submission: Submit) -> None:
        ids = self.tokenizer.encode_chat(self.text)
        pieces = [ids[at : at + 2] for at in range(0, len(ids), 2)]
        if self.reason == "stop":
            assert self.tokenizer.eos_id is not None
            pieces.append([self.tokenizer.eos_id])
        offset = 0
        for number, tokens in enumerate(pieces, 1):
            reason = self.reason if number == len(pieces) else None
            wanted = submission.sampling.logprobs
            logprobs = [Logprob(-0.5, [(one, -0.5)] * wanted) for one in tokens] if wanted is not None else []
            piece = Piece(followed.request, sample, offset, tokens, logprobs, reason, cached_tokens=3)
            best = submission.sampling.prompt_logprobs
            if best is not None and not offset and not sample and not self.forgets:
                known = [PromptLogprob(-1.5, 7, [(3 + at, -0.25) for at in range(best)])] * len(
                    submission.prompt_token_ids or []
                )
                piece.prompt_logprobs = [None, *known[1:]]
            followed.take(piece)
            offset += len(tokens)

    def end_sample(self, followed: Followed, sample: int) -> None:
        self.ended_samples.append((followed.request, sample))

    def leave(self, followed: Sequence[Followed]) -> None:
        self.left += followed


@dataclass
class ScriptedRenderer:
    """Renders chats in this process."""

    template: ChatTemplate = field(default_factory=lambda: ChatTemplate(TEMPLATE, {}))
    texts: list[str] = field(default_factory=list)

    async def render(self, chat: Chat, most: int) -> str:
        self.texts.append(self.template.render(chat, most))
        return self.texts[-1]


class Written:
    """The connection of a request: it keeps what is written, without the frames of chunks."""

    def __init__(self) -> None:
        self.body = b""

    def write(self, data: bytes) -> None:
        while data:
            size, _, rest = data.partition(b"\r\n")
            self.body, data = self.body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False


def connected(app: ASGIApp) -> ASGIApp:
    """Return `app` with a connection to each request, as the server of an HTTP process gives it one."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        written, cycle = Written(), SimpleNamespace()

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.body":
                message, written.body = {**message, "body": written.body + message["body"]}, b""
            await send(message)

        known = {"transport": written, "watchers": set(), "cycle": lambda: cycle}
        await app({**scope, "extensions": {TRANSPORT: known}}, receive, forward)

    return run


@asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[int]:
    """Serve `app` on a port."""
    config = server_config(app)
    config.load()
    state = uvicorn.server.ServerState()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(config, state, {}), "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for one in list(state.connections):
            one.transport.abort()


class HttpWorld:
    """An application, the script of its model, and clients of both vendors. Use it in an `async with`."""

    def __init__(
        self, http: HttpConfig, keys: ApiKeys | None = None, key: str = "none", limits: KeyLimits | None = None,
        traces: CallTraces | None = None,
    ) -> None:  # fmt: skip
        config = EngineConfig(
            id="e", name="t", epoch="epoch", profile=Profile(name="t", model=ModelConfig(path=str(TINY)), http=http),
            model_path=str(TINY), model_type="opt", layers=[(0, 1)], max_model_len=4096, run_dir="/r", ring_dir="/d",
            started_wall=0.0,
        )  # fmt: skip
        self.model = ScriptedLink(Tokenizer.load(TINY))
        self.renderer = ScriptedRenderer()
        stats = ClientStats()
        renderer = cast(ChatRenderer, self.renderer)
        self.service = Service(config, cast(FrontLink, self.model), renderer, ClientLimits(stats), 100)
        self.app = Routes(self.service, keys or ApiKeys({}), limits or KeyLimits({}, None), stats, traces).app()
        url = "http://engine"
        self.http = httpx2.AsyncClient(transport=httpx2.ASGITransport(connected(self.app)), base_url=url)
        self.openai = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, http_client=self.http, max_retries=0)
        self.anthropic = anthropic.AsyncAnthropic(base_url=url, api_key=key, http_client=self.http, max_retries=0)

    async def __aenter__(self) -> HttpWorld:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.aclose()

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        answer = await self.http.post(path, json=body)
        return answer.status_code, answer.json()

    async def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Return the JSON of the events of a streamed answer."""
        answer = await self.http.post(path, json={**body, "stream": True})
        assert answer.status_code == 200, answer.text
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        return [httpx2.Response(200, text=one).json() for one in data if one != "[DONE]"]


def world(text: str = "", reason: str = "stop") -> HttpWorld:
    """Return a world whose model writes `text`, with tool calls and reasoning."""
    made = HttpWorld(HTTP)
    made.model.text, made.model.reason = text, reason
    return made
