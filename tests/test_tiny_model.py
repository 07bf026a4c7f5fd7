"""The bundled model is small, loads in transformers unchanged and writes English."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

PROFILES = Path(__file__).parents[1] / "profiles"
TINY = PROFILES / "models" / "tiny"
END = 0
PROMPTS = [
    "The engine stopped because",
    "Once upon a time",
    "The king said",
    "In the morning",
    "To pause the engine",
]


def training_words() -> set[str]:
    """The words of the grammar's own text, without rule names and slots."""
    lines = (PROFILES / "tiny_grammar.txt").read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith(("#", "@")))
    text = re.sub(r"\[[^\]]*\]|\\n|<\|\w+\|>", " ", text)
    return set(re.findall(r"[a-z]+", text.lower()))


def reads_as_english(text: str, words: set[str]) -> bool:
    """At least nine words in ten are known, and the text does not say the same few words again and again."""
    made = re.findall(r"[^\W\d_]+", text.lower())
    known = sum(word in words for word in made)
    return len(made) >= 10 and known >= 0.9 * len(made) and len(set(made)) >= 0.4 * len(made)


def continuations(model: Any, tokenizer: Any, limit: int = 160) -> list[tuple[str, bool]]:
    """The greedy continuation of every prompt, and whether it ended by itself."""
    made = []
    for prompt in PROMPTS:
        given = tokenizer(prompt, return_tensors="pt")
        ids = model.generate(**given, max_new_tokens=limit, do_sample=False, pad_token_id=END)[0]
        new = ids[given["input_ids"].shape[1] :]
        made.append((tokenizer.decode(new, skip_special_tokens=True), END in new.tolist()))
    return made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    """The model as it loads, in float32, so that rounding does not depend on the processor's kernels."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(TINY)
    assert loaded.dtype == torch.bfloat16
    return loaded.float().eval()


def test_the_folder_is_small_and_holds_no_pickles() -> None:
    files = [path for path in TINY.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8 * 2**20
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".jinja", ".md"}


def test_the_config_and_the_weights_agree(model: Any) -> None:
    config = json.loads((TINY / "config.json").read_text(encoding="utf-8"))
    assert type(model).__name__ == config["architectures"][0] == "LlamaForCausalLM"
    assert model.config.num_hidden_layers == config["num_hidden_layers"] >= 8
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_both_tokenizers_agree_and_lose_nothing(tokenizer: Any) -> None:
    plain = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    text = "<|user|>Why  is stage 12 red?\n\n<|assistant|>Naïve ☃ text.<|endoftext|>"
    ids = tokenizer(text)["input_ids"]
    assert ids == plain.encode(text).ids
    assert tokenizer.decode(ids) == plain.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.eos_token_id == ids[-1] == END
    assert len(tokenizer) == 2048


def test_the_model_writes_english_and_ends(model: Any, tokenizer: Any) -> None:
    words = training_words()
    for text, ended in continuations(model, tokenizer):
        assert reads_as_english(text, words), text
        assert ended, text


def test_random_weights_do_not_write_english(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    untrained = transformers.LlamaForCausalLM(model.config).float().eval()
    words = training_words()
    texts = [text for text, _ in continuations(untrained, tokenizer, limit=60)]
    assert not any(reads_as_english(text, words) for text in texts), texts


def test_the_chat_template_renders(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " What is a stage? "},
        {"role": "assistant", "content": "A part."},
        {"role": "user", "content": "Thanks"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|user|>Be kind.\nWhat is a stage?<|assistant|>A part.<|endoftext|><|user|>Thanks<|assistant|>"
    )


def test_it_answers_a_chat(model: Any, tokenizer: Any) -> None:
    question = [{"role": "user", "content": "What is the scheduler?"}]
    given = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**given, max_new_tokens=160, do_sample=False, pad_token_id=END)[0].tolist()
    answer = tokenizer.decode(ids[given["input_ids"].shape[1] :], skip_special_tokens=True)
    assert reads_as_english(answer, training_words())
    assert "scheduler" in answer
    assert ids[-1] == END
