"""Outputs of the offline API, with the names that vLLM users know."""

from __future__ import annotations

from dataclasses import dataclass

from ppengine.protocol.control import Logprob
from ppengine.protocol.prompt_scores import PromptLogprob
from ppengine.protocol.timings import Timings


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. `logprobs` is one entry a token where the sampling asked for them."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[Logprob]
    stop_reason: str | int | None = None
    """The stop text or the token of `stop_token_ids` that ended it. None: neither, so also at the end of sequence."""

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum of the log-probabilities of its tokens; None if the sampling did not ask for them."""
        return sum(each.chosen for each in self.logprobs) if self.logprobs else None

    def finished(self) -> bool:
        """Return whether it has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A request and its continuations."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PromptLogprob | None] | None = None
    """One a token of the prompt where the sampling asked for them; that of the first is None."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that were not computed, as the KV cache had them. None: it has not ended."""
    metrics: Timings | None = None
    """Times of the first continuation. None: it has not ended, or it did so in a core that was restarted since."""
