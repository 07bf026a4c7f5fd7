"""How tokens are chosen for one request."""

from __future__ import annotations

import msgspec

from ppengine.protocol.foreign_arguments import TakesForeign
from ppengine.protocol.kinds import check_kind
from ppengine.protocol.structured_outputs import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_STOPS, MAX_STOP_CHARS = 64, 256
"""Every new piece of text is compared with all stop texts."""
MAX_STOP_TOKENS = 64
"""A stage on a GPU keeps them in a table with a row for each request."""
MOST_TOKEN = 2**31 - 1
"""Largest id of a token, `top_k` and `min_tokens`: a stage keeps them in 64 bits, added to positions."""
MAX_BIASES = 300
"""Entries of `logit_bias`, as OpenAI takes them."""
LEAST_REPETITION, MOST_REPETITION = 0.01, 100.0
"""Limits of `repetition_penalty`: the logits of a model stay finite in float32."""
MAX_ALLOWED_TOKENS = 4096
MAX_BAD_WORDS, MAX_BAD_TOKENS = 256, 1024
"""Sequences of `bad_words_ids`, and tokens in all of them. Every step compares them with the output."""


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, metaclass=TakesForeign
):
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
    min_p: float = 0.0
    """Least probability of a token, as a share of the best one's, after the temperature. 0 considers every token."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output has. Below 0: such tokens become more likely."""
    frequency_penalty: float = 0.0
    """Taken off the logit of each token once for each time that the output has it."""
    repetition_penalty: float = 1.0
    """Divides logits above 0, and multiplies others, of tokens that the prompt or the output has. 1 changes nothing."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids, -100 to 100."""
    allowed_token_ids: list[int] | None = None
    """Tokens that may be chosen; None: all."""
    bad_words: list[str] = []
    """Texts that must not be written. The engine looks for their tokens, with and without a space before them."""
    bad_words_ids: list[list[int]] = []
    """Token sequences that the output must not have: the last token is banned where it would complete one."""
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
    structured_outputs: StructuredOutputsParams | None = None
    """The text that the output must be; None: any."""
    prompt_logprobs: int | None = None
    """Return the log-probabilities of the prompt's tokens, and of this many best ones. Its prefix is not reused."""

    def __post_init__(self) -> None:
        """Check kinds and ranges. A value that JSON cannot carry (NaN, infinity) fails the same comparisons."""
        if isinstance(self.stop, str):  # vLLM's users may write one without a list
            msgspec.structs.force_setattr(self, "stop", [self.stop])
        for (name, kind, default), value in zip(_KINDS, msgspec.structs.astuple(self), strict=True):
            if value is default or name == "structured_outputs":
                continue
            if default is msgspec.NODEFAULT and type(value) is list and not value:
                continue
            if value is None and name in _LISTS:
                msgspec.structs.force_setattr(self, name, [])
            else:
                check_kind(name, value, kind)
        if not 1 <= self.n <= 64:
            raise ValueError(f"n is {self.n}; it must be 1 to 64")
        if not 0.0 <= self.temperature <= 100.0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) to 100")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if not -1 <= self.top_k <= MOST_TOKEN:
            raise ValueError(f"top_k is {self.top_k}; it must be 1 to 2**31-1, or 0 or -1 for all tokens")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be 0 to 2**63-1")
        if self.max_tokens is not None and not 1 <= self.max_tokens < 2**63:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1, and below 2**63")
        most = MOST_TOKEN if self.max_tokens is None else min(self.max_tokens, MOST_TOKEN)
        if not 0 <= self.min_tokens <= most:
            shown = "2**31-1" if most == MOST_TOKEN else f"max_tokens ({most})"
            raise ValueError(f"min_tokens is {self.min_tokens}; it must be 0 to {shown}")
        if any(not text for text in self.stop):
            raise ValueError("stop holds an empty text; every stop text needs at least one character")
        if len(self.stop) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in self.stop):
            longest = max(map(len, self.stop))
            raise ValueError(
                f"stop holds {len(self.stop)} texts of up to {longest} characters; "
                f"at most {MAX_STOPS} of {MAX_STOP_CHARS} are taken"
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise ValueError(f"{len(self.stop_token_ids)} stop_token_ids; at most {MAX_STOP_TOKENS} are taken")
        if not _are_ids(self.stop_token_ids):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids}; ids are 0 to 2**31-1")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs is {self.logprobs}; it must be 0 to {MAX_LOGPROBS}")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"prompt_logprobs is {self.prompt_logprobs}; it must be 0 to {MAX_LOGPROBS}")
        if self.stop and not self.detokenize:
            raise ValueError("stop texts need detokenize=True")
        _check_factors(self)
        _check_bad_words(self)
        _check_tokens(self)
        _check_structure(self)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0.0

    @property
    def adjusts(self) -> bool:
        """Whether the logits of a token depend on more than the model."""
        factors = (self.min_p, self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        tokens = self.logit_bias or self.bad_words or self.bad_words_ids or self.allowed_token_ids is not None
        return factors != (0.0, 0.0, 0.0, 1.0) or bool(tokens)


def _are_ids(tokens: list[int]) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) <= MOST_TOKEN)


def _check_factors(params: SamplingParams) -> None:
    if not 0.0 <= params.min_p <= 1.0:
        raise ValueError(f"min_p is {params.min_p}; it must be 0 to 1")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= (value := getattr(params, name)) <= 2.0:
            raise ValueError(f"{name} is {value}; it must be -2 to 2")
    if not LEAST_REPETITION <= params.repetition_penalty <= MOST_REPETITION:
        raise ValueError(
            f"repetition_penalty is {params.repetition_penalty}; it must be {LEAST_REPETITION:g} to {MOST_REPETITION:g}"
        )


def _check_tokens(params: SamplingParams) -> None:
    bias, allowed = params.logit_bias or {}, params.allowed_token_ids
    if not bias and allowed is None:
        return
    if len(bias) > MAX_BIASES:
        raise ValueError(f"logit_bias has {len(bias)} entries; at most {MAX_BIASES} are taken")
    for token, value in bias.items():
        if not _are_ids([token]) or not -100.0 <= value <= 100.0:
            raise ValueError(f"logit_bias of token {token} is {value}; ids are 0 to 2**31-1, biases -100 to 100")
    if allowed is not None and not 1 <= len(allowed) <= MAX_ALLOWED_TOKENS:
        raise ValueError(f"allowed_token_ids has {len(allowed)} ids; it must be 1 to {MAX_ALLOWED_TOKENS}, or None")
    if not _are_ids(allowed or []):
        wrong = next(token for token in allowed or [] if not _are_ids([token]))
        raise ValueError(f"allowed_token_ids has {wrong}; ids are 0 to 2**31-1")
    banned = {sequence[0] for sequence in params.bad_words_ids if len(sequence) == 1}
    banned.update(params.stop_token_ids if params.min_tokens else [])
    if allowed is not None and banned.issuperset(allowed):
        raise ValueError("allowed_token_ids has only bad words, or stop tokens before min_tokens; one must be free")


def _check_structure(params: SamplingParams) -> None:
    wanted = params.structured_outputs
    if wanted is None:
        return
    if not isinstance(wanted, StructuredOutputsParams):
        raise ValueError(f"structured_outputs is {type(wanted).__name__}; it must be StructuredOutputsParams or None")
    others = {
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words or params.bad_words_ids),
    }
    for name, given in others.items():
        if given:
            raise ValueError(f"{name} is given beside structured_outputs; together they may leave no token: use one")


def _check_bad_words(params: SamplingParams) -> None:
    sequences = params.bad_words_ids
    if not params.bad_words and not sequences:
        return
    if not all(text.strip() for text in params.bad_words):
        raise ValueError("bad_words holds an empty text; every bad word needs a character that is no space")
    if len(params.bad_words) > MAX_BAD_WORDS or any(len(text) > MAX_STOP_CHARS for text in params.bad_words):
        longest = max(map(len, params.bad_words))
        raise ValueError(
            f"bad_words holds {len(params.bad_words)} texts of up to {longest} characters; "
            f"at most {MAX_BAD_WORDS} of {MAX_STOP_CHARS} are taken"
        )
    if not all(sequences) or not all(map(_are_ids, sequences)):
        raise ValueError("bad_words_ids holds an empty sequence or a number that is no id; ids are 0 to 2**31-1")
    if len(sequences) > MAX_BAD_WORDS or sum(map(len, sequences)) > MAX_BAD_TOKENS:
        raise ValueError(
            f"bad_words_ids holds {len(sequences)} sequences with {sum(map(len, sequences))} tokens; "
            f"at most {MAX_BAD_WORDS} with {MAX_BAD_TOKENS} are taken"
        )


_LISTS = ("stop", "stop_token_ids", "bad_words")
"""Lists that are None by default in vLLM, so its users may write that."""
_KINDS = [(field.name, field.type, field.default) for field in msgspec.structs.fields(SamplingParams)]
"""Name, type and default of the fields; those with lists have none. A field that has its default needs no check."""
