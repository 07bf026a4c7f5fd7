"""The two sides of the comparison: our engine, and transformers' `generate` with padding on the same cores."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from ppengine.bench.workload import Job
from ppengine.offline.llm import LLM
from ppengine.offline.prompts import Prompt
from ppengine.protocol.sampling import SamplingParams


def run_engine(llm: LLM, jobs: list[Job]) -> float:
    """Return the seconds that the engine takes for all jobs, end of sequence ignored."""
    params = [
        SamplingParams(
            temperature=job.sampling.temperature, top_p=job.sampling.top_p, top_k=job.sampling.top_k, seed=number,
            max_tokens=job.output_len, ignore_eos=True,
        )
        for number, job in enumerate(jobs)
    ]  # fmt: skip
    prompts: list[Prompt] = [{"prompt_token_ids": job.prompt} for job in jobs]
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    if made != sum(job.output_len for job in jobs):
        raise RuntimeError(f"the engine made {made} tokens where {sum(job.output_len for job in jobs)} were asked for")
    return seconds


class Baseline:
    """transformers on all cores that this process may use, prompts padded on the left to the longest one."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        self._torch = torch
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def run(self, jobs: list[Job]) -> float:
        """Return the seconds that one padded batch takes for the same tokens."""
        torch = self._torch
        longest = max(len(job.prompt) for job in jobs)
        steps = max(job.output_len for job in jobs)
        ids = torch.zeros(len(jobs), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(jobs):
            ids[row, longest - len(job.prompt) :] = torch.tensor(job.prompt)
            mask[row, longest - len(job.prompt) :] = 1
        begun = time.perf_counter()
        with torch.inference_mode():
            made = self._model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=steps, min_new_tokens=steps, pad_token_id=0
            )
        seconds = time.perf_counter() - begun
        if made.shape[1] != longest + steps:
            raise RuntimeError(f"transformers made {made.shape[1] - longest} tokens where {steps} were asked for")
        return seconds
