"""Arguments of vLLM's `SamplingParams` that this engine does not have.

Values that change nothing are taken, and others are refused with the reason.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class Foreign(NamedTuple):
    """An argument that this engine does not have."""

    taken: tuple[object, ...]
    """Values that change nothing, beside None."""
    reason: str
    """Reason why others are refused, or the other way to the same end."""


_BEAMS = "this engine samples each continuation by itself; ask for n of them"
OF_SAMPLING: dict[str, Foreign] = {
    "best_of": Foreign((), "it must be n: ask for n continuations"),
    "early_stopping": Foreign((False,), _BEAMS),
    "extra_args": Foreign(({},), "it is for plugins of vLLM"),
    "flat_logprobs": Foreign((False,), "log-probabilities are one entry a token"),
    "guided_decoding": Foreign((), "give structured_outputs"),
    "include_stop_str_in_output": Foreign((False,), "the text ends before the stop text; stop_reason has it"),
    "length_penalty": Foreign((1,), _BEAMS),
    "logits_processors": Foreign(([],), "give penalties, logit_bias or bad_words"),
    "skip_special_tokens": Foreign((True,), "the text has no special tokens; token_ids has them"),
    "spaces_between_special_tokens": Foreign((True,), "the text has no special tokens; token_ids has them"),
    "truncate_prompt_tokens": Foreign((), "prompts are not cut; give token ids"),
    "use_beam_search": Foreign((False,), _BEAMS),
}
"""By name."""


class TakesForeign(msgspec.StructMeta):
    """Class of a struct to whose calls such arguments may be given. Messages with them are refused as before."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        """Return an instance. Raises ValueError with the reason."""
        for name in OF_SAMPLING.keys() & given.keys():
            value, foreign = given.pop(name), OF_SAMPLING[name]
            neutral = value is None or value in foreign.taken or (name == "best_of" and value == given.get("n", 1))
            if not neutral:
                raise ValueError(f"{name}={value!r:.80} is refused: {foreign.reason}")
        return super().__call__(*args, **given)
