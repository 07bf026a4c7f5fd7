"""One sample of one prompt: its tokens, its blocks and its history."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from hashlib import blake2b

from ppengine.core.scheduler.results import Fence
from ppengine.core.scheduler.token_gaps import TokenGaps
from ppengine.protocol.allowed_keys import OWNER
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import RequestState
from ppengine.protocol.tiers import PromptSources
from ppengine.protocol.timings import Phase, PhaseKind
from ppengine.protocol.token_ids import TokenIds, compact, wide
from ppengine.protocol.token_mask import TokenMask

HISTORY_LIMIT = 200
"""Number of history lines that a request keeps; the oldest are dropped first."""
PHASES_LIMIT = 64
"""Number of phases that a request keeps."""
FORCED_MOST = 64
"""Most tokens that a grammar forces and that one row computes together with the token before them."""
_TOKEN_BYTES = array("q").itemsize


def salt_digest(salt: str) -> bytes:
    """Return the 16 bytes before the first block of prompts with a salt. No block has them as its own digest."""
    return blake2b(salt.encode(), digest_size=16, person=b"cache_salt").digest()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One continuation of a prompt. Only the scheduler changes it after its admission.

    `num_computed` counts tokens whose KV is written, or will be by a step already scheduled;
    `pending` counts samples that no step has returned yet. So `num_tokens + pending - num_computed`
    tokens are left to compute.
    """

    id: str
    prompt_ids: TokenIds
    sampling: SamplingParams
    seed: int
    owner: str = ""
    """User or session that submitted it, by the name that it gave."""
    principal: str = OWNER
    """Name of the key that submitted it: other keys need an override."""
    cache_salt: str = ""
    """Only requests with the same one share cached blocks; empty: those without one do."""
    client: str = ""
    """Name of the API key of the HTTP port with which it came; empty: it came otherwise."""
    sample: int = 0
    leader: Request | None = None
    """Sample 0 of the same prompt; None for sample 0."""
    arrival_time: float = 0.0
    """Time when the first process of the engine got it: an HTTP process, or the gateway."""
    queued_time: float = 0.0
    """Time when it first came into the queue of a core, with its tokens and its grammar."""
    priority: int = 0
    arrival: int = 0
    """Number in order of arrival, counted by the scheduler."""
    max_tokens: int = 0
    """Output token limit, resolved against the model's length at admission."""
    stops: frozenset[int] = frozenset()
    state: RequestState = "waiting"
    slot: int | None = None
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    """Tokens that its last start found in the prefix cache or on the host, or took from its leader."""
    sources: PromptSources | None = None
    """Sources of the tokens of its last start; None before it, and without a host cache."""
    fetched: list[tuple[int, str]] | None = None
    """(host slot, backend) that are pinned for its next start; None: none are."""
    pending: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    """Unretired steps that compute for it or copy its blocks, oldest first."""
    revision: int = 0
    """Number of actions on it."""
    preemptions: int = 0
    swaps: int = 0
    finish_reason: str | None = None
    history: list[tuple[float, str]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    """Copies and restarts, for its trace; one at most has not ended."""
    first_token_time: float | None = None
    finished_time: float | None = None
    admitted_time: float | None = None
    """Time when it first got blocks."""
    gaps: TokenGaps | None = None
    """Times between its tokens, kept by the core's latencies; None before the first token."""

    fence: Fence | None = None
    aborted_by: str = ""
    """Author of its abort, also of one that has not ended it yet; empty: not aborted, or by no operator."""
    loss: str = ""
    """Why it ended as lost, in one line; empty: it did not."""
    held_by: str = ""
    """Action and author of its hold (`swap-out by eve`), while it is held."""
    followers: list[Request] = field(default_factory=list)
    """Samples that wait for this one's prompt; they are in no queue."""
    queued: bool = False
    """Whether it is in the ready queue."""
    group: str = field(init=False)
    """Id of its prompt: the id of sample 0."""
    constrained: bool = field(init=False)
    """Whether its output follows a grammar, so that each token needs a mask."""
    mask: TokenMask | None = None
    """Mask of the token behind its outputs; None: it has not come. Its next output ends it."""
    ahead: bool = False
    """Whether a constrained one may be scheduled before the mask of its row has come."""
    late_step: int = 0
    """Step of its row whose mask has not come; 0: there is none."""
    registered: int = 0
    """Tokens that the stages know since its last start."""
    digest_root: bytes = field(init=False)
    """Start of its chain of digests: the salt's, empty without one."""
    digests: list[bytes] = field(default_factory=list)
    last_step: int = 0
    """Step number of its last row that samples."""
    prompt_step: int = 0
    """Step number of the end of its prompt."""
    num_entered: int = 0
    """Blocks of its table that are in the prefix cache, entered by it or found there."""

    def __post_init__(self) -> None:
        """Keep values that each token needs."""
        self.prompt_ids = compact(self.prompt_ids)
        self.group = self.id if self.leader is None else self.leader.id
        self.digest_root = salt_digest(self.cache_salt) if self.cache_salt else b""
        self.constrained = self.sampling.structured_outputs is not None

    def may_sample(self, most_pending: int) -> bool:
        """Return whether another token of it may be scheduled. One mask at most is outstanding for its rows."""
        if not self.constrained:
            return self.pending < most_pending
        if self.late_step:
            return False
        if not self.pending:
            return self.mask is not None or self.ahead
        return self.ahead and self.mask is not None and self.pending < most_pending

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be computed: with its first token all are known."""
        return self.sampling.prompt_logprobs is not None and not self.sample and not self.output_ids

    def order(self) -> tuple[int, int]:
        """Return its sort key in all queues but `ready`; victims are taken in reverse."""
        return self.priority, self.arrival

    @property
    def model_limit(self) -> int | None:
        """Tokens of prompt and output that the model allows, if this ended it and not a limit of its own."""
        own = self.sampling.max_tokens
        if self.finish_reason != "length" or (own is not None and own <= self.max_tokens):
            return None
        return self.num_prompt + self.max_tokens

    @property
    def begun(self) -> bool:
        """Whether this sample, or sample 0 of its prompt, has ever had blocks."""
        return self.admitted_time is not None or (self.leader is not None and self.leader.admitted_time is not None)

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens that the core knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_prompt(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def finished(self) -> bool:
        """Whether it has ended, even if it still has blocks."""
        return self.state == "finished"

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions `[start, end)`."""
        prompt = len(self.prompt_ids)
        if end <= prompt:
            return self.prompt_ids[start:end].tolist()
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return self.prompt_ids[start:].tolist() + self.output_ids[: end - prompt]

    def full_digests(self, count: int, block_size: int) -> list[bytes]:
        """Return the digests of its first `count` full blocks; all their tokens must be known.

        A digest has 16 bytes. It is of the digest before it and of the block's tokens, 8 bytes each. The salt's is
        before the first, so no block is found by a request with another salt: on the device, the host or a backend.
        """
        digests = self.digests
        known = len(digests)
        if known < count:
            # One array for all blocks: a third less time.
            start, end = known * block_size, count * block_size
            whole = end <= len(self.prompt_ids)
            content = bytes(wide(self.prompt_ids[start:end]) if whole else array("q", self.tokens(start, end)))
            width = block_size * _TOKEN_BYTES
            digest = digests[-1] if digests else self.digest_root
            for start in range(0, len(content), width):
                digest = blake2b(digest + content[start : start + width], digest_size=16).digest()
                digests.append(digest)
        return digests if len(digests) == count else digests[:count]

    def note(self, now: float, text: str) -> None:
        """Add a line to its history."""
        if len(self.history) >= HISTORY_LIMIT:
            del self.history[0]
        self.history.append((now, text))

    def begin_phase(self, kind: PhaseKind, now: float, text: str = "") -> None:
        """Begin a phase, and end the one before."""
        if self.phases and self.phases[-1].end is None:
            self.phases[-1].end = now
        if len(self.phases) >= PHASES_LIMIT:
            del self.phases[0]
        self.phases.append(Phase(kind, now, None, text))

    def end_phase(self, kind: PhaseKind, now: float) -> float:
        """End the phase of this kind that has not ended; return its seconds, 0 without one."""
        phase = self.phases[-1] if self.phases else None
        if phase is None or phase.end is not None or phase.kind != kind:
            return 0.0
        phase.end = now
        return now - phase.begin

    def __repr__(self) -> str:
        return (
            f"<{self.id} #{self.arrival} {self.state} slot={self.slot} computed={self.num_computed}/{self.num_tokens}"
            f"+{self.pending} blocks={self.blocks} host={self.host_blocks} in_flight={self.in_flight}"
            f" fence={self.fence}>"
        )
