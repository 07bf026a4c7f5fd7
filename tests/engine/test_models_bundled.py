"""The bundled model loads here and in transformers unchanged, and both say the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import reference_greedy, reference_logits
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.checkpoint.model_spec import check_weights, read_spec
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import profiles_dir
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.steps import Row
from stage_runs import Pipeline, exact_logits
from transformers import AutoTokenizer

PROMPT = "The old house by the river was"
CHAT = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def folder() -> Path:
    torch.set_num_threads(1)
    return profiles_dir() / "models" / "tiny"


def test_it_is_small_and_of_a_supported_family(folder: Path) -> None:
    assert read_spec(folder).model_type == "llama"
    assert len(check_weights(folder)) == 1
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 8 * 2**20


def test_text_and_chat_are_those_of_transformers(folder: Path) -> None:
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    for text in (PROMPT, "café 🙂\n\n  and so on", ""):
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    text = ChatTemplate.load(folder).render(Chat(messages=CHAT), 1000)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours.encode_chat(text) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.eos_id in read_spec(folder).eos_token_ids


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_logits_and_greedy_text_in_float64(folder: Path, stages: int) -> None:
    prompt = Tokenizer.load(folder).encode(PROMPT)
    expected = reference_greedy(folder, prompt, 24, torch.float64)
    pipeline = Pipeline(folder, torch.float64, stages)
    pipeline.add(0, prompt, length=len(prompt) + 24)
    logits = pipeline.step((0, 0, len(prompt)))
    torch.testing.assert_close(logits, exact_logits(folder, prompt, torch.float64), rtol=0, atol=1e-9)
    output = [int(logits[-1].argmax())]
    while len(output) < 24:
        row = Row(0, len(prompt) - 1 + len(output), 1, True, output[-1])
        output.append(int(pipeline.forward(*pipeline.batch([row]))[-1].argmax()))
    assert output == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_as_near_as_those_of_transformers(folder: Path, dtype: torch.dtype) -> None:
    prompt = Tokenizer.load(folder).encode(PROMPT)
    exact = exact_logits(folder, prompt, torch.float64)
    theirs = (reference_logits(folder, prompt, dtype).double() - exact).abs().max()
    pipeline = Pipeline(folder, dtype, 2)
    pipeline.add(0, prompt)
    assert (pipeline.step((0, 0, len(prompt))).double() - exact).abs().max() < 2 * theirs
