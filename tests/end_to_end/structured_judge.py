"""The outside judge of structured outputs: transformers, greedy, with llguidance's own masks."""

from __future__ import annotations

from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer
from reference import model
from transformers import AutoTokenizer

WHITESPACE = r"[ \t\n]{1,24}"
"""White space between the parts of JSON that docs/design/structured-output.md promises."""


def structured(folder: Path, prompt: str, grammar: str, most: int, *, min_tokens: int = 0) -> str:
    """Return the greedy text behind `prompt` that follows `grammar`, of `most` tokens at most.

    `min_tokens`: no end of sequence before this many, as long as another token is allowed.
    """
    judge, words = model(folder, "float64"), AutoTokenizer.from_pretrained(folder)
    eos, vocabulary = judge.config.eos_token_id, judge.config.vocab_size
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=vocabulary, eos_token=eos)
    matcher = LLMatcher(tokenizer, grammar)
    ids, found = words(prompt).input_ids, list[int]()
    with torch.inference_mode():
        past, fresh = None, torch.tensor([ids])
        while len(found) < most:
            out = judge(fresh, past_key_values=past, use_cache=True)
            allowed = torch.tensor([byte > 0 for byte in matcher.compute_logit_bias()][:vocabulary])
            if len(found) < min_tokens and allowed.sum() > 1:
                allowed[eos] = False
            past, token = out.past_key_values, int(out.logits[0, -1].masked_fill(~allowed, -torch.inf).argmax())
            if token == eos:
                break
            found.append(token)
            assert matcher.consume_token(token), matcher.get_error()
            fresh = torch.tensor([[token]])
    return words.decode(found)


def schema_grammar(schema: dict[str, object]) -> str:
    """Return the grammar of JSON of a schema."""
    return LLMatcher.grammar_from_json_schema(schema, {"whitespace_pattern": WHITESPACE})
