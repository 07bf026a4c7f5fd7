"""The base of every body, with the fields that are taken without effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import msgspec

_IGNORED = frozenset({
    "guided_decoding_backend", "metadata", "prediction", "prompt_cache_key", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store",
})  # fmt: skip
"""Fields of OpenAI and vLLM that say nothing about the tokens. A prediction is for speed alone."""
_NO_OP: dict[str, tuple[object, ...]] = {
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that this server does not have, with the values, beside null, that change nothing."""


class Body(msgspec.Struct, kw_only=True):
    """Every body. A null is the default, as OpenAI has it."""

    ignored: ClassVar[Collection[str]] = _IGNORED
    no_op: ClassVar[Mapping[str, tuple[object, ...]]] = _NO_OP

    model: str | None = None
