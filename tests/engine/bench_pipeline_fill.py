"""Time to the first token of a long prompt on two CPU stages: `python tests/engine/bench_pipeline_fill.py [ROUNDS]`.

A small Llama of dummy weights computes a prompt of 4,000 tokens as one step, and in the steps that the scheduler makes
of it for a pipeline. The sides alternate; the last line has the ratio of their medians. Each stage needs a core.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from ppengine import LLM, SamplingParams
from ppengine.common.config import load_profile

TOKENS = 4_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4,
    "intermediate_size": 1408, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 1000,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "torch_dtype": "float32", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROFILE = """
name: {name}
model: {{path: {folder}, dtype: float32, load_format: dummy, skip_tokenizer: true, max_model_len: 8000}}
parallel: {{pipeline: 2}}
memory: {{device_mib: 600}}
scheduler: {{max_num_seqs: 8, max_num_batched_tokens: 8192, schedule_ahead: true, chunked_prefill: {cut}}}
threads_per_stage: 1
"""


def first_tokens(folder: Path, cut: bool) -> list[float]:
    """Return seconds until the first token of prompts, one after the other."""
    name = "fill-cut" if cut else "fill-whole"
    path = folder / f"{name}.yaml"
    path.write_text(PROFILE.format(name=name, folder=folder, cut=str(cut).lower()))
    model, times = LLM(load_profile(str(path))), []
    for number in range(6):
        prompt = {"prompt_token_ids": [(7 * at + number) % 900 + 5 for at in range(TOKENS)]}
        begun = time.perf_counter()
        model.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
        times.append(time.perf_counter() - begun)
    model.close()
    return times[1:]


def main() -> None:
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        for _ in range(int(sys.argv[1]) if len(sys.argv) > 1 else 2):
            for cut, times in found.items():
                times += first_tokens(Path(folder), cut)
    for cut, times in found.items():
        side = "in several steps" if cut else "as one step"
        print(f"{side:17} {median(times):.3f} s ({min(times):.3f} to {max(times):.3f})")
    print(f"ratio {median(found[True]) / median(found[False]):.2f}")


if __name__ == "__main__":
    main()
