"""vLLM as the other side of a comparison, in a process of its own. It imports nothing of this package.

It reads one JSON line with the start of vLLM, then one line a round, and answers each by one line. vLLM and its
processes print to stdout; so the answers go to a copy of it, and stdout itself to stderr.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

WORKER = Path(__file__).with_name("vllm_worker")
"""Folder of the module that vLLM's workers import: no other module of this package is found from there."""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `vllm.LLM`, and the scale of dummy weights; 0 for weights of a checkpoint."""

    arguments: dict[str, Any]
    dummy_scale: float = 0.0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one round."""

    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float
    top_p: float
    top_k: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the start or of a round, and the tokens that it made."""

    seconds: float
    tokens: int = 0
    version: str = ""


def start(vllm: Any, how: Start) -> Any:
    """Return a `vllm.LLM` that has its weights."""
    if not how.dummy_scale:
        return vllm.LLM(**how.arguments)
    # Its workers are processes that get this one's environment.
    paths = [str(WORKER), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, str(WORKER))
    llm = vllm.LLM(**how.arguments, worker_extension_cls="drawn_weights.DrawnWeights")
    llm.collective_rpc("draw_weights", args=(how.dummy_scale,))
    return llm


def run_round(vllm: Any, llm: Any, work: Round) -> Answer:
    """Return the seconds that vLLM takes for one round, end of sequence ignored."""
    sampled: dict[str, Any] = {"temperature": work.temperature, "top_p": work.top_p}
    if work.top_k > 0:
        sampled["top_k"] = work.top_k
    params = [
        vllm.SamplingParams(
            **sampled, max_tokens=count, ignore_eos=True, detokenize=False, seed=number if work.temperature else None
        )
        for number, count in enumerate(work.output_lens)
    ]
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in work.prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    return Answer(seconds=seconds, tokens=sum(len(output.outputs[0].token_ids) for output in outputs))


def main() -> None:
    """Serve rounds until stdin closes."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines = iter(sys.stdin.buffer.readline, b"")
    how = msgspec.json.decode(next(lines), type=Start)
    begun = time.perf_counter()
    vllm = importlib.import_module("vllm")
    llm = start(vllm, how)
    started = Answer(seconds=time.perf_counter() - begun, version=str(getattr(vllm, "__version__", "")))
    answers.write(msgspec.json.encode(started) + b"\n")
    for line in lines:
        answers.write(msgspec.json.encode(run_round(vllm, llm, msgspec.json.decode(line, type=Round))) + b"\n")


if __name__ == "__main__":
    main()
