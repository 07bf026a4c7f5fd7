"""Verbs: the messages of everything that a command may ask for. How each is written is in `verb_table`."""

from __future__ import annotations

import re
from collections import Counter
from typing import Annotated, Any, Literal, get_args

import msgspec

from ppengine.protocol.error_text import shown
from ppengine.protocol.kinds import check_kind
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.store_verbs import StoreVerb
from ppengine.protocol.verb_table import ROWS, Row

PRIORITY_MOST = 2**31 - 1
CLIENT_MOST = 64
"""Characters of the name of an API key."""
_LIMIT = re.compile(r"[1-9][0-9]{0,5}(/min)?")
SALT_MOST = 1024
"""Characters of a salt."""
MANY_MOST = 1000
"""Most requests of one command."""


class Submit(msgspec.Struct, tag="submit", kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A new request: a text or token ids. `chat`: put the text through the model's chat template."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    sampling: SamplingParams = SamplingParams()
    request: str | None = None
    """Id to use; None lets the engine choose."""
    abort_on_detach: bool = False
    chat: bool = False
    priority: int = 0
    """Requests wait by priority, the smaller first, then by arrival."""
    cache_salt: str | None = None
    """Only prompts with the same salt share cached blocks. None: they share those of all prompts without one."""

    def __post_init__(self) -> None:
        """Check the priority and the salt."""
        _check_priority(self.priority)
        if self.cache_salt is not None:
            check_salt(self.cache_salt)


class Abort(msgspec.Struct, tag="abort", kw_only=True, forbid_unknown_fields=True):
    """End a request; its blocks come back once its last step has retired."""

    request: str


class Preempt(msgspec.Struct, tag="preempt", kw_only=True, forbid_unknown_fields=True):
    """Take a request's blocks: `recompute` drops them, `swap` moves them to the host; `hold` keeps it off."""

    request: str
    mode: Literal["recompute", "swap"] | None = None
    hold: bool = False


class SwapOut(msgspec.Struct, tag="swap-out", kw_only=True, forbid_unknown_fields=True):
    """Move a request's blocks to the host, and hold it there unless `hold` is false."""

    request: str
    hold: bool = True


class SwapIn(msgspec.Struct, tag="swap-in", kw_only=True, forbid_unknown_fields=True):
    """Bring a request's blocks back and let it run."""

    request: str


class Release(msgspec.Struct, tag="release", kw_only=True, forbid_unknown_fields=True):
    """End a hold; the scheduler does the rest."""

    request: str


class Priority(msgspec.Struct, tag="priority", kw_only=True, forbid_unknown_fields=True):
    """Change a request's priority: the smaller goes first among those that wait, then the earlier."""

    request: str
    priority: int

    def __post_init__(self) -> None:
        """Check the priority."""
        _check_priority(self.priority)


class SetMemory(msgspec.Struct, tag="set-memory", kw_only=True, forbid_unknown_fields=True):
    """Change memory utilization live. Above 0, at most 1, and enough for one sequence; the core checks."""

    utilization: float


class Pause(msgspec.Struct, tag="pause", kw_only=True, forbid_unknown_fields=True):
    """`wait`: finish the running requests, start none; `keep`: stop scheduling, keep all; `abort`: abort all."""

    mode: Literal["wait", "keep", "abort"] = "wait"


class Resume(msgspec.Struct, tag="resume", kw_only=True, forbid_unknown_fields=True):
    """Undo Pause."""


class Drain(msgspec.Struct, tag="drain", kw_only=True, forbid_unknown_fields=True):
    """Refuse new requests and finish the others; `undo` accepts requests again."""

    undo: bool = False


class Stop(msgspec.Struct, tag="stop", kw_only=True, forbid_unknown_fields=True):
    """Stop the engine and all its processes."""


class Continue(msgspec.Struct, tag="continue", kw_only=True, forbid_unknown_fields=True):
    """Send SIGCONT to a stopped stage."""

    stage: int


CheckName = Literal["ledger", "strict", "finite", "shadow", "checksum"]


class SetCheck(msgspec.Struct, tag="check", kw_only=True, forbid_unknown_fields=True):
    """Switch a live check, in all stages at one step. Off also forgets its findings.

    `ledger`: hand-offs between streams and threads; `strict`: wait for every operation before the next; `finite`:
    values that leave a stage; `shadow`: a single-stage reference repeats a `share` of the steps; `checksum`: hidden
    states that change between two stages.
    """

    check: CheckName
    mode: Literal["on", "off"] = "on"
    share: float | None = None
    """Share of the steps, above 0 and at most 1, for `shadow` alone."""


class RestartStage(msgspec.Struct, tag="restart-stage", kw_only=True, forbid_unknown_fields=True):
    """Restart a stage in any state; in-flight requests are recomputed, none are lost."""

    stage: int


class Cordon(msgspec.Struct, tag="cordon", kw_only=True, forbid_unknown_fields=True):
    """Begin no request, and do not restart this stage if it dies, so that it can be examined; `undo` ends that.

    Requests that have begun go on, and may come back from the host; others are accepted and wait.
    """

    stage: int
    undo: bool = False


class Fault(msgspec.Struct, tag="fault", kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Break something on purpose, in an engine started with `--allow-faults`. `stage` None: not a stage."""

    kind: str
    stage: int | None = None
    rank: int = 0
    """Tensor rank of the stage."""


class ClearFaults(msgspec.Struct, tag="clear-faults", kw_only=True, forbid_unknown_fields=True):
    """End every fault on demand that can be ended."""


class Lease(msgspec.Struct, tag="lease", kw_only=True, forbid_unknown_fields=True):
    """Take or release control: while a key holds the lease, other keys change nothing but their own submissions."""

    action: Literal["take", "release"]
    ttl_s: float = 300.0
    """Seconds after the last verb of the holder at which it ends."""
    force: bool = False
    """Take it from another holder."""

    def __post_init__(self) -> None:
        """Check the time."""
        check_kind("ttl", self.ttl_s, Annotated[float, msgspec.Meta(ge=10.0, le=3600.0, description="10 s to 1 h")])


class Limit(msgspec.Struct, tag="limit", kw_only=True, forbid_unknown_fields=True):
    """Limit the requests of an API key: `8` open ones, `60/min` a minute; `off` ends its limits and its drain."""

    client: str
    limit: str

    def __post_init__(self) -> None:
        """Check client and limit."""
        _check_client(self.client)
        if self.limit != "off" and not _LIMIT.fullmatch(self.limit):
            raise ValueError(f"limit is {shown(self.limit, 40)}; it must be N, N/min or off, N from 1 to 999999")

    @property
    def numbers(self) -> tuple[int | None, int | None]:
        """Most open requests, and most requests a minute; None: not in this verb."""
        if self.limit == "off":
            return None, None
        number = int(self.limit.removesuffix("/min"))
        return (None, number) if self.limit.endswith("/min") else (number, None)


class Kick(msgspec.Struct, tag="kick", kw_only=True, forbid_unknown_fields=True):
    """Abort the open requests of an API key, and close its streams."""

    client: str

    def __post_init__(self) -> None:
        """Check the client."""
        _check_client(self.client)


class DrainClient(msgspec.Struct, tag="drain-client", kw_only=True, forbid_unknown_fields=True):
    """Refuse new requests of an API key and finish the others, until `limit CLIENT off`."""

    client: str

    def __post_init__(self) -> None:
        """Check the client."""
        _check_client(self.client)


RequestVerb = Abort | Preempt | SwapOut | SwapIn | Release | Priority
"""Verbs on one request. The core applies each to all samples of the request that it fits."""


class Many(msgspec.Struct, tag="many", kw_only=True, forbid_unknown_fields=True):
    """One verb on up to 1,000 requests: one plan, one outcome. Each request is atomic, the whole is not."""

    verbs: list[RequestVerb]
    """One a request; they differ in the request alone."""
    revisions: list[int | None] = []
    """Revision that each request must have, in the order of `verbs`; null, or an empty list: any."""

    def __post_init__(self) -> None:
        """Check number, kinds and requests."""
        count = len(self.verbs)
        if not 1 <= count <= MANY_MOST:
            raise ValueError(f"{count} requests in one command; it must be 1 to {MANY_MOST}")
        kinds = sorted({str(verb.__struct_config__.tag) for verb in self.verbs})
        if len(kinds) > 1:
            raise ValueError(f"the verbs are {', '.join(kinds)}; they must be of one kind")
        if any(msgspec.structs.replace(verb, request=self.verbs[0].request) != self.verbs[0] for verb in self.verbs):
            raise ValueError(f"the verbs are not the same {kinds[0]}; they may differ in their request alone")
        if self.revisions and len(self.revisions) != count:
            raise ValueError(f"{len(self.revisions)} revisions for {count} requests; there must be one each, or none")
        twice = next((name for name, times in Counter(self.requests).items() if times > 1), None)
        if twice is not None:
            raise ValueError(f"request {twice} is there twice; each must be there once")

    @property
    def requests(self) -> list[str]:
        """The ids of its requests."""
        return [verb.request for verb in self.verbs]


Verb = (
    Submit | RequestVerb | Many | SetMemory | Pause | Resume | Drain | Stop | Continue | SetCheck | RestartStage
    | Cordon | Limit | Kick | DrainClient | StoreVerb | Fault | ClearFaults | Lease
)  # fmt: skip
"""The allow-list: a command can ask for nothing else."""

MESSAGES: dict[str, type[Verb]] = {message.__struct_config__.tag: message for message in get_args(Verb)}
"""The message of each verb by name."""


def check_salt(salt: str) -> None:
    """Raise ValueError for an empty or a long salt. The text has no part of it: it is a secret."""
    if not 1 <= len(salt) <= SALT_MOST:
        raise ValueError(f"cache_salt has {len(salt)} characters; it must be a text of 1 to {SALT_MOST}")


def _check_priority(priority: int) -> None:
    check_kind("priority", priority, int)
    if not -PRIORITY_MOST <= priority <= PRIORITY_MOST:
        raise ValueError(f"priority is {priority}; it must be {-PRIORITY_MOST} to {PRIORITY_MOST}")


def _check_client(client: str) -> None:
    if not 1 <= len(client) <= CLIENT_MOST or not client.isprintable() or " " in client:
        right = f"it must be the name of an API key, 1 to {CLIENT_MOST} printable characters without spaces"
        raise ValueError(f"client is {shown(client, 40)}; {right}")


def row_of(verb: Verb) -> Row:
    """Return the row of a verb."""
    return ROWS[name_of(verb)]


def name_of(verb: Verb) -> str:
    """Return the name of a verb, as it is typed and sent."""
    return str(verb.__struct_config__.tag)


def label_of(verb: Verb) -> str:
    """Return the words to show, as they are typed: of many verbs, those of each."""
    return row_of(verb.verbs[0] if isinstance(verb, Many) else verb).words


def build(name: str, values: dict[str, Any]) -> Verb:
    """Return the verb `name` from `values` by argument name; None and () leave the message's default.

    Raises ValueError for values that the message refuses.
    """
    message, fields = MESSAGES[name], dict[str, Any]()
    nested: dict[str, dict[str, Any]] = {}
    for argument in ROWS[name].arguments:
        value = values.get(argument.name)
        if value is None or value == ():
            continue
        outer, _, inner = argument.field.rpartition(".")
        value = not value if argument.negates else list(value) if argument.kind == "texts" else value
        (nested.setdefault(outer, {}) if outer else fields)[inner] = value
    for field in msgspec.structs.fields(message):
        if field.name in nested:
            fields[field.name] = field.type(**nested[field.name])
    return message(**fields)


def value_of(verb: Verb, field: str) -> Any:
    """Return a field of a verb; `sampling.seed` is a field of a field."""
    value: Any = verb
    for part in field.split("."):
        value = getattr(value, part)
    return value


def default_of(verb: Verb, field: str) -> Any:
    """Return the default of a field of a verb."""
    outer, _, inner = field.partition(".")
    default = next(each.default for each in msgspec.structs.fields(type(verb)) if each.name == outer)
    return getattr(default, inner) if inner else default
