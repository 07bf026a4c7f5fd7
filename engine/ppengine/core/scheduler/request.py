"""One sample of one prompt: what is known of it, what it holds, and what was done to it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import RequestState

if TYPE_CHECKING:
    from ppengine.core.scheduler.results import Fence

HISTORY_LIMIT = 200
"""Lines of history that a request keeps; the oldest go first."""


def chain_digest(parent: bytes, tokens: Iterable[int]) -> bytes:
    """Return the 16-byte name of a full block: `tokens` after everything that `parent` names."""
    return blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One continuation of a prompt. The scheduler alone changes it once it was added.

    `num_computed` counts tokens whose KV is written or will be by a step already scheduled; `pending` counts
    samples that no step has returned yet. So `num_tokens + pending - num_computed` tokens are left to give.
    """

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    seed: int
    owner: str = ""
    sample: int = 0
    leader: Request | None = None
    """Sample 0 of the same prompt; None for sample 0 itself."""
    arrival_time: float = 0.0

    arrival: int = 0
    """Order of arrival, counted by the scheduler."""
    max_tokens: int = 0
    """Resolved against the model's length when it is added."""
    stops: frozenset[int] = frozenset()
    state: RequestState = "waiting"
    slot: int | None = None
    output_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    """Tokens that its last admission found in the prefix cache or took from its leader."""
    pending: int = 0
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    """Unretired steps that compute for it or copy its blocks, oldest first."""
    revision: int = 0
    """Counts the acts on it."""
    preemptions: int = 0
    swaps: int = 0
    finish_reason: str | None = None
    history: list[tuple[float, str]] = field(default_factory=list)
    first_token_time: float | None = None
    finished_time: float | None = None
    admitted_time: float | None = None
    """First time it was given blocks."""

    fence: Fence | None = None
    held_by: str = ""
    """Who holds it and how (`swap-out by eve`), while it is held."""
    followers: list[Request] = field(default_factory=list)
    """Samples that wait for this one's prompt, in no queue."""
    queued: bool = False
    """It stands in the line of decodes."""
    digests: list[bytes] = field(default_factory=list)
    last_step: int = 0
    """Number of the step of its last row that samples."""
    prompt_step: int = 0
    """Number of the step that computes the end of its prompt."""
    num_entered: int = 0
    """Blocks of its table that were entered into the prefix cache, or came from there."""

    @property
    def group(self) -> str:
        """Id of the prompt that it is a sample of: sample 0's own id."""
        return self.id if self.leader is None else self.leader.id

    @property
    def begun(self) -> bool:
        """Whether this sample, or sample 0 of its prompt, has ever been given blocks."""
        return self.admitted_time is not None or (self.leader is not None and self.leader.admitted_time is not None)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens that the core knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_ids)

    @property
    def finished(self) -> bool:
        """Whether it has ended, whatever it still holds."""
        return self.state == "finished"

    @property
    def last_token(self) -> int:
        """The newest token that the core knows."""
        return self.output_ids[-1] if self.output_ids else self.prompt_ids[-1]

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the known tokens at positions `[start, end)`."""
        prompt = len(self.prompt_ids)
        if end <= prompt:
            return self.prompt_ids[start:end]
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        return self.prompt_ids[start:] + self.output_ids[: end - prompt]

    def full_digests(self, count: int, block_size: int) -> list[bytes]:
        """Return the digests of its first `count` full blocks; all their tokens must be known."""
        digests = self.digests
        while len(digests) < count:
            index = len(digests)
            parent = digests[-1] if digests else b""
            digests.append(chain_digest(parent, self.tokens(index * block_size, (index + 1) * block_size)))
        return digests if len(digests) == count else digests[:count]

    def note(self, now: float, text: str) -> None:
        """Add a line to its history."""
        if len(self.history) >= HISTORY_LIMIT:
            del self.history[0]
        self.history.append((now, text))

    def __repr__(self) -> str:
        return (
            f"<{self.id} #{self.arrival} {self.state} slot={self.slot} computed={self.num_computed}/{self.num_tokens}"
            f"+{self.pending} blocks={self.blocks} host={self.host_blocks} in_flight={self.in_flight}"
            f" fence={self.fence}>"
        )
