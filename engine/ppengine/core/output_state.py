"""The output of one request: the tokens of each continuation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ppengine.protocol.control import Logprob
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.prompt_scores import PromptLogprob
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.timings import Timings
from ppengine.protocol.token_ids import TokenIds, compact

LOGPROB_TOKENS = 32
"""Tokens that need the memory of one log-probability, 128 bytes."""


class Ending(NamedTuple):
    """The detail of a request at its end, that time of the clock, and its figures."""

    at: float
    detail: RequestDetail
    """Without the tokens of the prompt, which the output has."""
    info: FinishedInfo
    timings: Timings | None = None
    """None: it has ended in a core before this one."""


@dataclass(slots=True)
class Sample:
    """One continuation as it grows."""

    tokens: TokenIds = field(default_factory=compact)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: str | None = None
    ending: Ending | None = None


@dataclass(slots=True)
class Output:
    """All continuations of one request."""

    request: str
    session: str
    prompt_ids: TokenIds
    sampling: SamplingParams
    samples: list[Sample]
    prompt_logprobs: list[PromptLogprob | None] = field(default_factory=list)
    """One a token of the prompt where they were asked for; None: not computed, as that of the first token."""
    score_values: int = 0
    """Log-probabilities of the prompt that it has or gets; 0 once its reader has them."""
    number: int = 0
    """Number of its first sample in order of arrival."""
    deaths: int = 0
    """Ends of a core of which it may be the reason, without a token between them."""
    changed: int = 0
    read_at: float | None = None
    """When its end was first answered, on the hub's clock; the answer may have been lost on its way."""
    weight: int = 0
    """Tokens of prompt and samples once it has ended, and `LOGPROB_TOKENS` for each log-probability of samples."""
    followed: bool = field(init=False)
    """Whether a session gets its tokens: a program's own, or that in which stop texts of consoles are found."""

    def __post_init__(self) -> None:
        """Keep values that each token needs."""
        self.followed = bool(self.session or self.sampling.stop)

    @property
    def finished(self) -> bool:
        """Whether every continuation has ended."""
        return all(sample.finish_reason is not None for sample in self.samples)

    def weigh(self) -> int:
        """Set and return its weight."""
        values = sum(1 + len(each.top) for sample in self.samples for each in sample.logprobs)
        self.weight = len(self.prompt_ids) + sum(len(sample.tokens) for sample in self.samples)
        self.weight += LOGPROB_TOKENS * values
        return self.weight
