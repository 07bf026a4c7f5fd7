"""How tokens are chosen for one request."""

from __future__ import annotations

import msgspec

from ppengine.protocol.kinds import check_kind

MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 64, 256
"""Every new piece of text is compared with all stop texts."""
MAX_STOP_TOKENS = 64
"""A stage on a GPU keeps them in a table with a row for each request."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Sampling of one request, with the names and defaults that vLLM users know.

    Raises ValueError (or msgspec.ValidationError on the wire) when a field is out of range.
    """

    n: int = 1
    """How many continuations to return for one prompt."""
    temperature: float = 1.0
    """0 means greedy: the most likely token, ties to the lowest id."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 considers every token."""
    seed: int | None = None
    """Same seed, same tokens, after any preemption. None draws one seed at submission."""
    max_tokens: int | None = 16
    """None: as many as the model's length allows."""
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many."""
    stop: list[str] = []
    """Texts that end the output; they are not part of it."""
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    """Return the log-probabilities of the chosen token and of this many best ones."""
    detokenize: bool = True

    def __post_init__(self) -> None:
        """Check kinds and ranges. A value that JSON cannot carry (NaN, infinity) fails the same comparisons."""
        if isinstance(self.stop, str):  # vLLM's users may write one without a list
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for field in _FIELDS:
            check_kind(field.name, getattr(self, field.name), field.type)
        if not 1 <= self.n <= 64:
            raise ValueError(f"n is {self.n}; it must be 1 to 64")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if self.top_k < -1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1, or 0 or -1 for all tokens")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be 0 to 2**63-1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.min_tokens < 0 or (self.max_tokens is not None and self.min_tokens > self.max_tokens):
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be 0 to max_tokens ({self.max_tokens})")
        if any(not text for text in self.stop):
            raise ValueError("stop holds an empty text; every stop text needs at least one character")
        if len(self.stop) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in self.stop):
            longest = max(map(len, self.stop))
            raise ValueError(
                f"stop holds {len(self.stop)} texts of up to {longest} characters; "
                f"at most {MAX_STOPS} of {MAX_STOP_CHARS} are taken"
            )
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids}; ids are 0 or more")
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(f"{len(self.stop_token_ids)} stop_token_ids; at most {MAX_STOP_TOKENS} are taken")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs is {self.logprobs}; it must be 0 to {MAX_LOGPROBS}")
        if self.stop and not self.detokenize:
            raise ValueError("stop texts need detokenize=True")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0


_FIELDS = msgspec.structs.fields(SamplingParams)
