"""Room for the log-probabilities of prompts: those of all outputs together are bounded."""

from __future__ import annotations

from ppengine.core.output_state import Output
from ppengine.protocol.prompt_scores import HELD_MOST, PromptScores, values_of


class PromptScoreRoom:
    """Counts the log-probabilities of outputs from their beginning on, and keeps those that come."""

    def __init__(self) -> None:
        self.held = 0
        """Log-probabilities that the outputs have or get."""

    def lack(self, values: int) -> str:
        """Return why `values` more cannot be taken now; empty: they can."""
        if not values or self.held + values <= HELD_MOST:
            return ""
        text = f"prompt_logprobs are {values} values, those of open requests {self.held}; the engine has"
        return f"{text} {HELD_MOST} at most: give fewer prompts at once, or try again"

    def open(self, output: Output) -> None:
        """Take the room of an output that begins."""
        output.score_values = values_of(len(output.prompt_ids), output.sampling.prompt_logprobs)
        self.held += output.score_values

    def keep(self, output: Output, scores: PromptScores) -> None:
        """Keep log-probabilities of a prompt. Those that are computed again are the same."""
        if not output.score_values:
            return
        if not output.prompt_logprobs:
            output.prompt_logprobs = [None] * len(output.prompt_ids)
        output.prompt_logprobs[scores.first : scores.first + len(scores.logprobs)] = scores.logprobs

    def drop(self, output: Output) -> None:
        """Drop those of an output, which its reader has, or which nothing will read."""
        self.held -= output.score_values
        output.score_values, output.prompt_logprobs = 0, []
