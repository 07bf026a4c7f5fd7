"""Messages of the process of texts: with the gateway on its socket `texts`, and with the core on `front`."""

from __future__ import annotations

import msgspec

from ppengine.protocol.control import ErrorCode, Failed, Fetch, Fetched, Inspect, Inspected, Logprob
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.token_ids import TokenIds
from ppengine.protocol.verbs import Submit


class Encode(msgspec.Struct, tag="encode", kw_only=True):
    """A submission with texts, answered by `Encoded`. One that is repeated while it is under way counts once."""

    id: str
    """Id of its command."""
    submit: Submit


class Encoded(msgspec.Struct, tag="encoded", kw_only=True):
    """The submission by token ids alone, or the reason why there is none."""

    id: str
    submit: Submit | None = None
    """Without prompt text, chat and bad words; stop texts stay. None: it is refused."""
    error: str = ""
    """One line; empty: there is none."""
    code: ErrorCode = "INVALID"
    """Code of the refusal that the error leads to."""


class TextsAlive(msgspec.Struct, tag="texts-alive", kw_only=True):
    """The process takes work; it says so once a second. The number shows a gateway that another one is there."""

    pid: int


class TextsEvent(msgspec.Struct, tag="texts-event", kw_only=True):
    """An event for the engine's log, as the end of the process of chat templates."""

    kind: str
    text: str


class ReadOutput(msgspec.Struct, tag="read-output", kw_only=True):
    """Tokens of one continuation, for its text; answered by `OutputPart` or `Failed`.

    The core answers when there are more tokens than `offset` and `since`, at the end, or after `wait_ms`; at once if
    the request is not the one that the reader knows.
    """

    nonce: int
    request: str
    sample: int
    offset: int = 0
    """Tokens of which the reader has the text."""
    since: int = 0
    """First token that the reader must answer with, with its log-probability."""
    number: int = -1
    """Number of the request that the reader knows; -1: none. Requests of one name have several."""
    wait_ms: int = 0
    console: bool = True
    """A console reads; False: a stop text is looked for, which is no reading."""


class PromptContext(msgspec.Struct, kw_only=True):
    """A request, as far as its text depends on it."""

    prompt_tail: list[int]
    """Last tokens of the prompt."""
    sampling: SamplingParams
    samples: int
    speaks: bool
    """Whether its outputs have a text; not without `detokenize`."""


class OutputPart(msgspec.Struct, tag="output-part", kw_only=True):
    """Tokens of one continuation from `offset` on, the lower of the two in the question."""

    nonce: int
    request: str
    sample: int
    number: int
    """Number of the request in order of arrival."""
    offset: int
    token_ids: TokenIds
    logprobs: list[Logprob] = []
    """Those from `since` on, of which there may be more."""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    loss: str = ""
    """Why it is lost, in one line; empty: it is not."""
    context: PromptContext | None = None
    """If the reader does not know the request: then the tokens come from the first on."""


ToTexts = Encode | Fetch | Inspect
FromTexts = Encoded | TextsAlive | TextsEvent | Fetched | Inspected | Failed
