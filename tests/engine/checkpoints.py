"""Random tiny checkpoints of every family, written by transformers itself.

Weights are drawn per tensor name, so the same arguments always give the same files. They are scaled so that
attention and position matter and greedy output wanders over the vocabulary.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    GlmConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.utils import logging as transformers_logging

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()

FAMILIES = ("opt", "opt-350m", "llama", "mistral", "qwen2", "qwen3", "glm", "glm4")
_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_OPT: dict[str, Any] = {
    "hidden_size": 32, "ffn_dim": 64, "num_attention_heads": 4, "max_position_embeddings": 512,
    "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, **_IDS,
}  # fmt: skip
_CONFIGS: dict[str, tuple[type, dict[str, Any]]] = {
    "opt": (OPTConfig, {**_OPT, "word_embed_proj_dim": 32}),
    "opt-350m": (OPTConfig, {**_OPT, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    "llama": (LlamaConfig, {**_LLAMA, "head_dim": 8, "tie_word_embeddings": False}),
    "mistral": (MistralConfig, {**_LLAMA, "head_dim": 8, "tie_word_embeddings": False}),
    "qwen2": (Qwen2Config, {**_LLAMA, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {**_LLAMA, "head_dim": 16, "tie_word_embeddings": True}),
    "glm": (GlmConfig, {**_LLAMA, "head_dim": 16, "tie_word_embeddings": False}),
    "glm4": (Glm4Config, {**_LLAMA, "head_dim": 16, "tie_word_embeddings": False}),
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
_CORPUS = [
    "The stage waits for the stage before it, and the pipeline is as slow as its slowest part.",
    "A block holds sixteen tokens; a request that is swapped out keeps its blocks on the host.",
    "Le café était déjà fermé; の漢字 and ünïcödé test the bytes. 🙂🚀 0123456789",
    "She said that the old house by the river was full of light, and that she would come back.",
]


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: bool = False,
    layers: int = 4,
    gain: float = 1.0,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of `family` into `folder` and return it. `overrides` are fields of config.json.

    The vocabulary has 128 tokens, or 384 with `tokenizer` (byte-level BPE with a chat template). `shards` above 1
    deals the tensors round robin to that many safetensors files with an index. With a `gain` of 0.5 rounding in half
    precision moves logits a sixteenth as much, and tokens stand half as far apart: errors show better there.
    """
    kind, fields = _CONFIGS[family]
    vocab = 384 if tokenizer else 128
    config = kind(**{"vocab_size": vocab, "num_hidden_layers": layers, **fields, **overrides})
    torch_dtype = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype).eval()
    scramble(model, gain)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if shards > 1:
        _reshard(folder, shards)
    if tokenizer:
        make_tokenizer(folder, config.vocab_size)
    return folder


def scramble(model: torch.nn.Module, gain: float = 1.0) -> None:
    """Redraw every parameter of a transformers model from a generator that is seeded by the parameter's name."""
    tied = bool(model.config.tie_word_embeddings)
    projected = getattr(model.config, "word_embed_proj_dim", model.config.hidden_size) != model.config.hidden_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if "norm" in name:
                # Queries and keys that are normed to length one would attend evenly everywhere.
                scale = 2.0 if "q_norm" in name else 1.0
                draw = (draw * 0.2 + 1.0) * scale if name.endswith("weight") else draw * 0.05
            elif "embed_positions" in name:
                draw = draw * 0.7
            elif "embed" in name:
                # A tied head sees the input's own embedding again: keep that direction small beside the layers' output.
                # Rows of one length: a longer row would win everywhere.
                draw = draw / draw.square().mean(1, keepdim=True).sqrt() * (0.7 if projected or not tied else 0.15)
            elif parameter.dim() == 2:
                # Centred rows: the mean of activations, the same at every position, would drown the rest.
                spread = 2.5 if any(part in name for part in ("q_proj", "k_proj")) else 1.6
                draw = (draw - draw.mean(1, keepdim=True)) * spread / math.sqrt(parameter.shape[1])
            else:
                draw = draw * 0.05
            parameter.copy_((draw * gain if parameter.dim() == 2 else draw).to(parameter.dtype))


def reference_logits(folder: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Return transformers' logits [T, V] of `tokens` for the checkpoint in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def reference_greedy(folder: Path, prompt: list[int], count: int, dtype: torch.dtype) -> list[int]:
    """Return `count` greedy tokens of transformers after `prompt`; the end of sequence does not stop it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        output = model(torch.tensor([tokens]), use_cache=True)
        for _ in range(count):
            tokens.append(int(output.logits[0, -1].argmax()))
            output = model(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)
    return tokens[len(prompt) :]


def make_tokenizer(folder: Path, vocab_size: int = 384) -> None:
    """Train a byte-level BPE tokenizer on a few sentences and write it as transformers does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]),
        ]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


def _reshard(folder: Path, shards: int) -> None:
    whole = folder / "model.safetensors"
    with safe_open(whole, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
    names = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    weight_map = {tensor: names[position % shards] for position, tensor in enumerate(tensors)}
    for name in names:
        part = {tensor: value for tensor, value in tensors.items() if weight_map[tensor] == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole.unlink()
