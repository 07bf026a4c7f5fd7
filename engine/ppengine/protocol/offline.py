"""Messages of programs to the core: the offline API and HTTP processes; others are those that the gateway forwards."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ppengine.protocol.clients import ClientRule, HttpReport
from ppengine.protocol.control import (
    Command,
    Failed,
    Fetch,
    Fetched,
    Inspect,
    Inspected,
    Logprob,
    Reply,
)
from ppengine.protocol.gpu import DeviceRooms
from ppengine.protocol.metrics import CoreMetrics, MetricsQuery, StageFigures
from ppengine.protocol.prompt_scores import PromptLogprob
from ppengine.protocol.reports import ProcessReport, Recall, StartStage
from ppengine.protocol.text_messages import OutputPart, ReadOutput
from ppengine.protocol.timings import Timings
from ppengine.protocol.token_ids import TokenIds
from ppengine.protocol.verbs import Submit


class AddMany(msgspec.Struct, tag="add-many", kw_only=True):
    """Requests of one session, in order; answered by `Added`. The core refuses texts: a session makes its own."""

    nonce: int
    session: str
    submissions: list[Submit]
    """Without a text, stop texts and bad words."""
    first: int = 0
    """Number of the first prompt, for errors: many prompts come in portions."""
    owner: str = ""
    """User on whose behalf they come; empty: the session."""
    client: str = ""
    """Name of the API key with which they came; empty: none."""
    check: bool = False
    """Check the prompts alone: none is queued, and the answer has no ids."""
    tokens: list[TokenIds] = []
    """Token ids of the prompts, if not in the submissions: one array each. Many are long lists."""
    arrived: float = 0.0
    """Time when the session got their call in full, of the monotonic clock of the host. 0: not known."""


class Added(msgspec.Struct, tag="added", kw_only=True):
    """Ids in the order of the prompts. All or none is added: `error` names the first that does not fit."""

    nonce: int
    requests: list[str]
    error: str = ""
    lost: bool = False
    """The engine lacks a stage: no prompt will do."""
    later: bool = False
    """The engine takes no prompts now, as it drains or loads: the same ones may do later."""
    again_s: int = 0
    """Seconds after which to try again, for prompts above a limit of the client; 0: no limit refused them."""


class OpenSession(msgspec.Struct, tag="open-session", kw_only=True):
    """Begin a session: requests that an earlier process has left in it are aborted. No answer."""

    session: str


class Follow(msgspec.Struct, tag="follow", kw_only=True):
    """News of all requests of a session, answered by `News` as soon as there are any, or after `wait_ms`.

    The session without a name has the requests of consoles that stop texts may end, until they end.

    `since` is the cursor of the newest `News`, -1 without one. For an older cursor all is sent from the beginning.
    A question with the number of the last one goes on behind its answers; its `since` has no effect.
    """

    nonce: int
    session: str
    since: int
    wait_ms: int
    timings: bool = False
    """Send the timings of each sample with its end."""
    answers: int = 1
    """Answers that may be sent before the next question; each comes after `wait_ms` at the latest."""
    finished_only: bool = False
    """Only ends of requests are news before `wait_ms` is over: such an answer has the requests that have ended."""


class Piece(msgspec.Struct, array_like=True):
    """Tokens of one continuation from `offset` on."""

    request: str
    sample: int
    offset: int
    token_ids: list[int]
    logprobs: list[Logprob] = []
    finish_reason: str | None = None
    loss: str = ""
    """Why it is lost, in one line; empty: it is not."""
    cached_tokens: int = 0
    """At the end: prompt tokens whose blocks were cached."""
    prompt_logprobs: list[PromptLogprob | None] = []
    """Those of the prompt, with the first tokens of sample 0."""
    timings: Timings | None = None
    """At the end, if `Follow` asks for it; None also if a core before this one ended it."""
    number: int = 0
    """Number of the request in order of arrival, in the session without a name: several have one name in turn."""

    def skip(self, known: int) -> bool:
        """Leave out the tokens that a reader of `known` tokens has. Return False if tokens before it are missing."""
        more = known - self.offset
        if more > 0:
            self.token_ids, self.logprobs = self.token_ids[more:], self.logprobs[more:]
        return more >= 0


class Singles(msgspec.Struct, array_like=True):
    """Pieces of one token and nothing else, of requests with one sample, in columns: nearly all pieces are in them."""

    requests: list[str] = []
    offsets: list[int] = []
    token_ids: list[int] = []


class News(msgspec.Struct, tag="news", kw_only=True):
    """Answer to Follow; pass `cursor` as the next `since`. Two answers may overlap, by offset."""

    nonce: int
    cursor: int
    singles: Singles = msgspec.field(default_factory=Singles)
    pieces: list[Piece] = []
    """All others."""
    error: str = ""
    """Why nothing more will come: a stage is lost."""

    def all_pieces(self) -> Iterator[Piece]:
        """Yield all pieces. One of a request comes at most for each sample, so their order says nothing."""
        columns = self.singles
        for request, offset, token in zip(columns.requests, columns.offsets, columns.token_ids, strict=True):
            yield Piece(request, 0, offset, [token])
        yield from self.pieces


class AbortMany(msgspec.Struct, tag="abort-many", kw_only=True):
    """Abort requests of a session, or single continuations by their names (`r-8f2c.1`); no answer."""

    session: str
    requests: list[str]
    messages: list[int] = []
    """Numbers of `AddMany` whose requests are aborted, too: their answer may not have come."""


class EndSamples(msgspec.Struct, tag="end-samples", kw_only=True):
    """End continuations in whose text the session has found a stop text; no answer. The reason is `stop`."""

    session: str
    samples: list[tuple[str, int]]
    """Requests, each with the number of a continuation."""
    numbers: list[int] = []
    """Numbers of these requests, as in `OutputPart`: another one of the name goes on. Empty: not compared."""


class ForgetMany(msgspec.Struct, tag="forget-many", kw_only=True):
    """Outputs that were collected and can be dropped; no answer."""

    session: str
    requests: list[str]


class StateQuery(msgspec.Struct, tag="state-query", kw_only=True):
    """Answered by `StateAnswer` at once, or when the engine leaves `loading`, or after `wait_ms`."""

    nonce: int
    wait_ms: int


class StateAnswer(msgspec.Struct, tag="state-answer", kw_only=True):
    """State of the engine; `message` is the loading line or the failure."""

    nonce: int
    state: str
    message: str
    max_model_len: int
    num_blocks: int
    code: str = ""
    """`DOES_NOT_FIT`: the stages are up, and their memory does not hold one sequence."""
    rules: list[ClientRule] = []
    """Rules of clients of the HTTP port."""
    silent_http: list[str] = []
    """HTTP processes that do not report any more."""


ToFront = (
    Command | Fetch | Inspect | AddMany | OpenSession | Follow | AbortMany | EndSamples | ForgetMany
    | ReadOutput | StateQuery | MetricsQuery | HttpReport | ProcessReport | DeviceRooms | StageFigures | Recall
)  # fmt: skip
"""`ProcessReport` comes from the supervisor: the core learns there that a stage is dead. `DeviceRooms`,
`StageFigures` and `Recall` are the gateway's."""
FromFront = (
    Reply | Fetched | Inspected | Failed | Added | News | CoreMetrics | StateAnswer
    | OutputPart | StartStage
)  # fmt: skip
"""`StartStage` is for the supervisor alone."""
