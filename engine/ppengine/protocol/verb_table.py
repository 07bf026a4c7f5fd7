"""The verb table: how each verb is written, its keys and help, its target, and its guards.

CLI, command line, completion, keys, footer, help and confirm dialog are generated from these rows. Gateway and core
read the guards. The messages are in `verbs`; this module needs the standard library alone, because `ppconsole --help`
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal[
    "text", "prompt", "request", "stage", "integer", "number", "utilization", "texts", "ids", "biases", "flag",
    "duration", "client", "backend", "url",
]  # fmt: skip
Role = Literal["viewer", "operator", "admin"]
"""Rights of a key, each with those of the ones before it."""
Target = Literal["submission", "request", "requests", "stage", "memory", "check", "client", "backend", "engine"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One word or option of a verb, and the field of its message that it fills."""

    field: str
    """Name in the message; `sampling.seed` is a field of a field."""
    kind: Kind = "text"
    option: str = ""
    """Option such as `--mode`; empty: a positional word."""
    help: str = ""
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    default: Any = None
    """Default to show in the help, equal to the message's; None shows none."""
    required: bool = False
    """Whether an option must be given; a positional word must, unless it is `optional`."""
    negates: bool = False
    """Whether the flag clears its field."""
    optional: bool = False
    """Whether a positional word may be left out."""

    @property
    def name(self) -> str:
        """Return the last part of the field."""
        return self.field.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the main screen: its label in the footer and its line on the help screen."""

    key: str
    label: str
    help: str


@dataclass(frozen=True, slots=True)
class Row:
    """One verb. `name` is the tag of its message."""

    name: str
    help: str
    """One line without its capital and full stop: the effect."""
    arguments: tuple[Argument, ...] = ()
    target: Target = "engine"
    more: str = ""
    """Further paragraphs of the CLI's help."""
    key: Key | None = None
    runs: Literal["core", "gateway", "faults"] = "core"
    """Process that executes it. `faults`: the gateway's fault desk, only with `--allow-faults`."""
    needs: Literal["nothing", "loaded", "running"] = "running"
    """State that the core must have: none; has served once, even if degraded; served and not degraded."""
    role: Role = "operator"
    """Least role that may command it."""
    leased: Literal["refused", "own", "free"] = "refused"
    """Effect of a control lease of another key: refused; good for own requests alone; none."""
    ends_engine: bool = False
    """Whether the loss of the core is its success. The gateway then ends the engine without a core, too."""
    ends_within_s: float = 60.0
    """Seconds for which a client waits for its end, unless it sets a timeout."""
    written: str = ""
    """Words before its arguments, if they differ from the name."""
    typed: bool = True
    """Whether its name is a word of CLI and command line; otherwise it is made from several targets of another verb."""

    @property
    def has_revision(self) -> bool:
        """Whether `if_rev` guards it: by the revision of its request, or of memory."""
        return self.target in ("request", "memory")

    @property
    def words(self) -> str:
        """Return the words before the arguments."""
        return self.written or self.name


_RANK: dict[Role, int] = {"viewer": 0, "operator": 1, "admin": 2}


def covers(role: Role, least: Role) -> bool:
    """Return whether `role` has the rights of `least`."""
    return _RANK[role] >= _RANK[least]


_REQUEST = Argument("request", "request")
_STAGE = Argument("stage", "stage")
_CLIENT = Argument("client", "client")
_BACKEND = Argument("backend", "backend", metavar="NAME")

_SUBMIT = Row(
    "submit", "submit a prompt and print its text as it comes", target="submission", leased="free",
    more="""`-`, or nothing when input is piped, reads stdin.
    Ctrl-C aborts the request. A lost link does not: the text goes on when it is back, unless --timeout is over.""",
    arguments=(
        Argument("prompt", "prompt"),
        Argument("sampling.max_tokens", "integer", "--max-tokens", "Most tokens to write.", default=16),
        Argument("sampling.min_tokens", "integer", "--min-tokens", "No end before this many tokens."),
        Argument("sampling.temperature", "number", "--temperature", "0: always the most likely token.", default=1.0),
        Argument("sampling.top_p", "number", "--top-p", default=1.0),
        Argument("sampling.top_k", "integer", "--top-k", "0: all tokens."),
        Argument("sampling.min_p", "number", "--min-p", "Least probability, as a share of the best.", default=0.0),
        Argument(
            "sampling.presence_penalty", "number", "--presence-penalty", "Off the logits of tokens written.",
            default=0.0,
        ),
        Argument(
            "sampling.frequency_penalty", "number", "--frequency-penalty", "The same for each time it was written.",
            default=0.0,
        ),
        Argument(
            "sampling.repetition_penalty", "number", "--repetition-penalty",
            "Divides logits of tokens of prompt and output.", default=1.0,
        ),
        Argument(
            "sampling.logit_bias", "biases", "--logit-bias", "Added to logits; ID:BIAS with commas between.",
            metavar="BIASES",
        ),
        Argument(
            "sampling.allowed_token_ids", "ids", "--allowed-token-ids",
            "Choose among these tokens alone, with commas between.", metavar="IDS",
        ),
        Argument("sampling.bad_words", "texts", "--bad-words", "Never write this; may be repeated.", metavar="TEXT"),
        Argument("sampling.seed", "integer", "--seed", "Same seed, same text."),
        Argument("sampling.n", "integer", "-n", "Continuations of the prompt.", default=1),
        Argument("sampling.stop", "texts", "--stop", "End before this text; may be repeated.", metavar="TEXT"),
        Argument(
            "sampling.stop_token_ids", "ids", "--stop-token-ids", "Token ids that end it, with commas between.",
            metavar="IDS",
        ),
        Argument("sampling.ignore_eos", "flag", "--ignore-eos", "Go on after the model's end of sequence."),
        Argument(
            "sampling.logprobs", "integer", "--logprobs",
            "With --json: log-probabilities, and those of the N best.", metavar="N",
        ),
        Argument(
            "priority", "integer", "--priority", "Smaller starts first of the requests that wait.", metavar="N",
            default=0,
        ),
        Argument("chat", "flag", "--chat", "Put the prompt through the model's chat template."),
    ),
)  # fmt: skip

_REQUESTS = (
    Row(
        "preempt", "take a request's blocks", target="request",
        more="The scheduler brings it back unless it is held.",
        arguments=(
            Argument(
                "mode", option="--mode", choices=("recompute", "swap"),
                help="Drop its blocks, or move them to the host.",
            ),
            Argument("hold", "flag", "--hold", "Keep it off until it is released."),
            _REQUEST,
        ),
        key=Key("p", "preempt", "preempt the request"),
    ),
    Row(
        "swap-out", "move a request's blocks to the host and hold it", target="request",
        arguments=(
            Argument("hold", "flag", "--no-hold", "Let the scheduler bring it back when it likes.", negates=True),
            _REQUEST,
        ),
        key=Key("o", "swap out", "swap it out and hold it"),
    ),
    Row(
        "swap-in", "bring a request's blocks back and let it run", (_REQUEST,), "request",
        key=Key("n", "swap in", "swap it in"),
    ),
    Row(
        "release", "end a request's hold; the scheduler does the rest", (_REQUEST,), "request",
        key=Key("r", "release", "release its hold"),
    ),
    Row(
        "priority", "change a request's place among those that wait", target="request",
        more="Requests start by priority, the smaller N first, then by arrival. The default is 0; N may be negative.",
        arguments=(_REQUEST, Argument("priority", "integer", metavar="N")),
        key=Key("+", "priority", "priority; smaller first"),
    ),
    Row(
        "abort", "end a request and free its blocks", (_REQUEST,), "request", leased="own",
        more="Its blocks come back once its last step has retired.",
        key=Key("a", "abort", "abort it"),
    ),
    Row("many", "do one verb to several requests", target="requests", typed=False),
)  # fmt: skip

_ENGINE = (
    Row(
        "set-memory", "change the memory of the KV cache live", target="memory",
        more="""UTILIZATION is a share of each device's memory, above 0 and at most 1. `-20%`, `+5%` and `-2GiB` change
    the present KV memory by a share of it, or by bytes on each device.""",
        arguments=(Argument("utilization", "utilization"),),
        key=Key("m", "memory", "memory utilization"),
    ),
    Row(
        "pause", "stop scheduling",
        arguments=(
            Argument(
                "mode", option="--mode", choices=("wait", "keep", "abort"), default="wait",
                help="Finish the running requests and start none; stop at once and keep all; or abort all.",
            ),
        ),
        key=Key("P", "pause", "pause or resume"),
    ),
    Row("resume", "undo pause"),
    Row(
        "drain", "refuse new requests and finish the others",
        (Argument("undo", "flag", "--undo", "Accept requests again."),),
        key=Key("D", "drain", "drain or undo it"),
    ),
    Row(
        "lease", "keep the changes of other keys away for a while", runs="gateway", needs="nothing", leased="free",
        more="""While a key holds the lease, verbs of other keys are refused (LEASED). They may watch, submit, and abort
    their own requests. Each verb of the holder renews it. `lease show` prints the holder.""",
        arguments=(
            Argument("action", choices=("take", "release")),
            Argument(
                "ttl_s", "duration", "--ttl", "Time after the last verb at which it ends; 5m if left out.", metavar="T"
            ),
            Argument("force", "flag", "--force", "Take it from another holder; an event reports it."),
        ),
    ),
    Row("stop", "stop the engine and all its processes", needs="nothing", role="admin", ends_engine=True),
)  # fmt: skip

_STAGES = (
    Row(
        "continue", "wake a stage that a signal stopped", (_STAGE,), "stage", runs="gateway",
        key=Key("c", "continue", "continue halted stage"),
    ),
    Row(
        "check", "switch a live check on or off in all stages", target="check",
        more="""All stages switch at one step, while requests run.

    \b
    ledger  hand-offs of buffers between streams and threads, and their order
    strict  wait for every operation before the next (as CUDA_LAUNCH_BLOCKING, without a restart)
    finite  values that leave a stage: the first that is NaN or infinite
    shadow  a single-stage reference repeats a share of the steps and compares tokens
    checksum  hidden states between stages: the first that change on their way; on unless switched off

    `explain` reports what they find; off forgets it.""",
        arguments=(
            Argument("check", choices=("ledger", "strict", "finite", "shadow", "checksum")),
            Argument("mode", choices=("on", "off")),
            Argument(
                "share", "number", "--share", "Share of the steps, for `shadow on`; 0.01 if left out.", metavar="S"
            ),
        ),
    ),
    Row(
        "restart-stage", "restart a stage in any state", (_STAGE,), "stage", needs="loaded", ends_within_s=900.0,
        more="In-flight requests are recomputed, none are lost. The other stages keep their weights.",
        key=Key("x", "restart", "restart stage, none lost"),
    ),
    Row(
        "cordon", "begin no request, so that a stage can be examined", target="stage", needs="loaded",
        more="""Requests that have begun go on; new ones wait. If the stage dies, it is not restarted by itself:
    `restart-stage` restarts it, or lifting the cordon.""",
        arguments=(
            Argument("stage", "stage", "--stage", "The stage.", metavar="K", required=True),
            Argument("undo", "flag", "--undo", "Lift the cordon."),
        ),
        key=Key("C", "cordon", "cordon stage or undo it"),
    ),
)  # fmt: skip

_CLIENTS = (
    Row(
        "limit", "limit the requests of an API key of the HTTP port", target="client", needs="loaded",
        arguments=(_CLIENT, Argument("limit", metavar="N|N/min|off")),
        more="""N: most open requests. N/min: most requests a minute. Requests above it get status 429, with the
    seconds after which to try again. `off` ends both limits, and a drain. CLIENT is the name of the key, `http`
    without keys. A limit counts over all HTTP processes, and outlives a restarted core.""",
        key=Key("b", "limit", "limit its requests"),
    ),
    Row(
        "kick", "abort requests of an API key and close its streams", (_CLIENT,), "client",
        more="Streams end with finish_reason abort. Those whose client does not read are cut a second later.",
        key=Key("X", "kick", "abort its requests, close its streams"),
    ),
    Row(
        "drain-client", "refuse new requests of an API key and finish the others", (_CLIENT,), "client",
        needs="loaded", more="New requests get status 503, until `limit CLIENT off`.",
        key=Key("B", "drain", "refuse its new requests"),
    ),
)  # fmt: skip

_STORES = (
    Row(
        "store-add", "add a backend of KV tiers while the engine runs", target="backend", needs="loaded", role="admin",
        written="store add",
        arguments=(
            _BACKEND,
            Argument("kind"),
            Argument("url", "url", optional=True),
            Argument("quota_gib", "number", "--quota-gib", "Most GiB that it keeps.", default=16.0, metavar="N"),
            Argument(
                "write", option="--write", choices=("always", "reused", "evicted"), default="reused",
                help="Chunks that it gets: all; at the second use; before their host slots are evicted.",
            ),
            Argument("timeout_ms", "integer", "--timeout-ms", "Milliseconds for one call.", default=2000, metavar="MS"),
        ),
        more="""NAME is 1 to 32 small letters, digits, `_` and `-`. KIND and URL are those of the profile: `files
    /data/kv`, `valkey redis://HOST:6379/0`, `s3 s3://BUCKET/PREFIX`. URL `-` reads it from stdin, so that no list of
    processes has its password. It lasts until the engine ends; a profile keeps a backend for good.""",
        key=Key("A", "add", "add a backend"),
    ),
    Row(
        "store-pause", "neither read nor write a backend; its chunks stay", (_BACKEND,), "backend", needs="loaded",
        written="store pause", key=Key("p", "pause", "pause or resume"),
    ),
    Row(
        "store-resume", "use a backend again: ends a pause, a drain and open breakers", (_BACKEND,), "backend",
        needs="loaded", written="store resume", key=Key("r", "resume", "use it again"),
    ),
    Row(
        "store-drain", "write nothing new to a backend, and read it on", (_BACKEND,), "backend", needs="loaded",
        written="store drain", more="`store resume` ends it.", key=Key("B", "drain", "read it, write nothing new"),
    ),
    Row(
        "store-remove", "forget a backend; its chunks stay, those of kind memory end", (_BACKEND,), "backend",
        needs="loaded", role="admin", written="store remove", key=Key("X", "remove", "forget it"),
    ),
    Row(
        "store-test", "write, read, compare and delete one object in a backend", (_BACKEND,), "backend",
        needs="loaded", written="store test", more="Every place does it. A paused backend can be tested, too.",
        key=Key("t", "test", "write and read one object"),
    ),
    Row(
        "store-clear", "delete all chunks of this model from a backend", (_BACKEND,), "backend", needs="loaded",
        role="admin", ends_within_s=900.0, written="store clear", key=Key("C", "clear", "delete its chunks"),
    ),
)  # fmt: skip

_FAULTS = (
    Row(
        "fault", "break something on purpose, by KIND", runs="faults", role="admin",
        more="Only an engine that was started with --allow-faults does it; any other refuses (exit code 4).",
        arguments=(
            Argument("kind"),
            Argument("stage", "stage", "--stage", "The stage that it strikes.", metavar="K"),
            Argument("rank", "integer", "--rank", "The tensor rank of the stage.", default=0, metavar="R"),
        ),
    ),
    Row(
        "clear-faults", "end every fault on demand that can be ended", runs="faults", role="admin",
        written="fault --clear",
    ),
)  # fmt: skip

ROWS: dict[str, Row] = {
    row.name: row for row in (_SUBMIT, *_REQUESTS, *_ENGINE, *_STAGES, *_CLIENTS, *_STORES, *_FAULTS)
}
"""Every verb by name, in the order of the help."""
