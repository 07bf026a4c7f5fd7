"""Train the bundled model: a Llama of 3.5 million parameters that writes simple English.

    python profiles/tiny_corpus.py --out text
    python profiles/train_tiny.py --text text --out tiny --device cuda --compile

The text folder holds ``*.txt`` files in which a line with only ``%`` ends a document. The script trains a
byte-level BPE tokenizer on them, trains the model, and writes a folder that ``transformers`` loads unchanged:
config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json, tokenizer_config.json and
chat_template.jinja. One in a hundred documents is held out and only measured.

The seed fixes the split, the first weights and the order of the documents; on a GPU the sums of a step are
not bit-for-bit repeatable, so a second run gives a model that is as good but not identical.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

EOS = "<|endoftext|>"
SPECIAL = [EOS, "<|user|>", "<|assistant|>"]
VOCAB = 2048
CONTEXT = 1024
CHAT_TEMPLATE = """\
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set ns.system = message['content'] | trim + '\\n' -%}
{%- elif message['role'] == 'user' -%}
{{- '<|user|>' + ns.system + message['content'] | trim -}}
{%- set ns.system = '' -%}
{%- elif message['role'] == 'assistant' -%}
{{- '<|assistant|>' + message['content'] | trim + '<|endoftext|>' -}}
{%- else -%}
{{- raise_exception('the roles are system, user and assistant') -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
PROMPTS = [
    "The engine stopped because",
    "Once upon a time",
    "The king said",
    "The weather today",
    "A pipeline is",
    "<|user|>Tell me a story about a fox.<|assistant|>",
]

Ids = npt.NDArray[np.uint16]


def read_documents(folder: Path) -> dict[str, list[str]]:
    """The documents of every text file, by the file's name."""
    found = {}
    for path in sorted(folder.glob("*.txt")):
        found[path.stem] = [text.strip() for text in path.read_text(encoding="utf-8").split("\n%\n")]
    if not found:
        raise SystemExit(f"no *.txt files in {folder}")
    return found


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE in which every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> list[Ids]:
    """The ids of each document, with the end token behind it."""
    return [np.array([*one.ids, 0], dtype=np.uint16) for one in tokenizer.encode_batch(documents)]


def pack(documents: list[Ids], rng: random.Random) -> npt.NDArray[np.int64]:
    """Rows of ``CONTEXT + 1`` ids in a new order; every row begins where a document begins.

    The document that the end of a row cuts off is the first of the next row.
    """
    order = list(range(len(documents)))
    rng.shuffle(order)
    stream = np.concatenate([documents[at] for at in order])
    begins = np.concatenate([[0], np.cumsum([len(documents[at]) for at in order])])
    starts, at = [], 0
    while begins[at] + CONTEXT + 1 <= len(stream):
        starts.append(int(begins[at]))
        at = max(at + 1, int(np.searchsorted(begins, begins[at] + CONTEXT + 1, side="right")) - 1)
    rng.shuffle(starts)
    at_rows = np.array(starts, dtype=np.int64)[:, None] + np.arange(CONTEXT + 1)
    rows: npt.NDArray[np.int64] = stream[at_rows].astype(np.int64)
    return rows


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of every next id."""
    with torch.autocast(rows.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, documents: list[Ids], device: str) -> float:
    """The mean loss over held-out documents, packed in a fixed order."""
    rows = torch.from_numpy(pack(documents, random.Random(0))[:64]).to(device)
    if not len(rows):
        return math.nan
    total = sum(float(loss_of(model, part)) * len(part) for part in torch.split(rows, 8))
    return total / len(rows)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """A short rise, then half a cosine down to a fiftieth of the peak."""
    rise = max(1, min(100, steps // 10))
    if step < rise:
        return peak * (step + 1) / rise
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise))))


def train(model: LlamaForCausalLM, documents: list[Ids], args: argparse.Namespace) -> None:
    """Run the training steps in place."""
    rng = random.Random(args.seed)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=args.device == "cuda")
    step_loss = torch.compile(loss_of) if args.compile else loss_of
    rows = torch.empty(0, CONTEXT + 1, dtype=torch.int64)
    model.train()
    began, epoch, tokens = time.perf_counter(), 0, 0
    for step in range(args.steps):
        if len(rows) < args.batch:
            rows = torch.from_numpy(pack(documents, rng)).to(args.device)
            epoch += 1
            if len(rows) < args.batch:
                raise SystemExit(f"the text fills only {len(rows)} rows; take a smaller --batch")
        batch, rows = rows[: args.batch], rows[args.batch :]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        loss = step_loss(model, batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tokens += args.batch * CONTEXT
        if step % args.log_every == 0 or step == args.steps - 1:
            value, spent = loss.item(), time.perf_counter() - began
            print(f"step {step} epoch {epoch} loss {value:.4f} tokens {tokens} seconds {spent:.1f}", flush=True)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the folder that ``transformers`` loads; the tied output matrix is stored once, as the embedding."""
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    generation = {"do_sample": False, "eos_token_id": 0, "pad_token_id": 0}
    tokens = {str(at): {"content": text, "special": True} for at, text in enumerate(SPECIAL)}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": tokens,
        "eos_token": EOS,
        "pad_token": EOS,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    named = {"config": CONFIG, "generation_config": generation, "tokenizer_config": tokenizer_config}
    for name, content in named.items():
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def show(model: Any, tokenizer: Tokenizer, device: str, count: int) -> None:
    """Print greedy continuations."""
    for prompt in PROMPTS[:count]:
        ids = torch.tensor([tokenizer.encode(prompt).ids], device=device)
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=120, do_sample=False)
        print(f"--- {tokenizer.decode(made[0].tolist(), skip_special_tokens=False)}", flush=True)


def main() -> None:
    """Train and write the model."""
    parser = argparse.ArgumentParser(description="Train the bundled model.")
    parser.add_argument("--text", type=Path, required=True, help="folder of *.txt files (see tiny_corpus.py)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--steps", type=int, default=1100)
    parser.add_argument("--batch", type=int, default=128, help="rows of 1024 tokens in one step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--samples", type=int, default=len(PROMPTS), help="continuations to print at the end")
    parser.add_argument("--compile", action="store_true", help="compile the step")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    rng = random.Random(args.seed)
    sources = read_documents(args.text)
    learned: list[str] = []
    held_out: dict[str, list[str]] = {}
    for name, documents in sources.items():
        rng.shuffle(documents)
        cut = max(1, len(documents) // 100)
        held_out[name] = documents[:cut]
        learned += documents[cut:]
    tokenizer = train_tokenizer(learned)
    ids = encode(tokenizer, learned)
    print(f"{len(ids)} documents, {sum(map(len, ids))} tokens, vocabulary {tokenizer.get_vocab_size()}", flush=True)

    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(args.device, torch.float32)
    print(f"{sum(p.numel() for p in model.parameters())} parameters on {args.device}", flush=True)
    train(model, ids, args)

    args.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, args.out)
    model = LlamaForCausalLM.from_pretrained(args.out).to(args.device).eval()
    for name, documents in held_out.items():
        print(f"held-out loss of {name}: {held_out_loss(model, encode(tokenizer, documents), args.device):.4f}")
    show(model, tokenizer, args.device, args.samples)


if __name__ == "__main__":
    main()
