"""vLLM's benchmark client: `python tests/clients/vllm_bench.py http://HOST:PORT`, with vLLM's sources on PYTHONPATH.

Its command `vllm bench serve` needs an installed vLLM; this calls the same functions, which need no GPU and no kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from checks import run, until_idle
from vllm.benchmarks.serve import add_cli_args, main

MODEL = Path(__file__).resolve().parents[2] / "profiles" / "models" / "tiny"
REQUESTS, TOKENS = 8, 12


def measured(url: str, backend: str, path: str, *more: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--backend", backend, "--base-url", url, "--endpoint", path, "--model", "tiny", "--tokenizer", str(MODEL),
            "--dataset-name", "random", "--random-input-len", "20", "--random-output-len", str(TOKENS),
            "--num-prompts", str(REQUESTS), "--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed",
            "--result-dir", folder, "--result-filename", "result.json", *more,
        ]  # fmt: skip
        parser = argparse.ArgumentParser()
        add_cli_args(parser)
        main(parser.parse_args(words))
        found = json.loads((Path(folder) / "result.json").read_text())
    until_idle(url)
    assert (found["completed"], found.get("failed", 0)) == (REQUESTS, 0), found
    assert found["total_output_tokens"] == REQUESTS * TOKENS and found["output_lens"] == [TOKENS] * REQUESTS
    # Tokens that come together share an event.
    assert all(1 <= len(each) < TOKENS for each in found["itls"]), found["itls"]
    return f"TTFT {found['median_ttft_ms']:.1f} ms"


def completions(url: str) -> str:
    return measured(url, "openai", "/v1/completions")


def chats(url: str) -> str:
    return measured(url, "openai-chat", "/v1/chat/completions")


def by_rate_with_logprobs(url: str) -> str:
    return measured(url, "vllm", "/v1/completions", "--request-rate", "50", "--logprobs", "2", "--temperature", "0")


if __name__ == "__main__":
    run("vllm-bench", [completions, chats, by_rate_with_logprobs])
