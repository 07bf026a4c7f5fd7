"""`ppconsole bench --beside vllm`: the same requests here and in an installed vLLM, one after the other.

One side at a time has the devices: each round starts it, warms it up with a few of the requests, and measures once. So
each has the whole memory, and vLLM runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ppengine.bench.sides import run_engine
from ppengine.bench.vllm_side import Answer, Round
from ppengine.bench.workload import Job
from ppengine.common.config import Profile
from ppengine.offline.llm import LLM

WARM_UP = 8
"""Requests of a round that are run before it, with other ids."""
MISSING = "vLLM is not installed beside this Python: pip install vllm, or leave --beside away"


def check_installed(name: str) -> None:
    """Raise ValueError with one line that says what to install."""
    if importlib.util.find_spec(name) is None:
        raise ValueError(MISSING)


def beside_vllm(profile: Profile, work: Iterator[list[Job]], rounds: int, say: Callable[..., None]) -> None:
    """Alternate both sides and print tokens a second, and the ratio of the medians. Raises EngineError, ValueError."""
    ours, theirs, version = [], [], ""
    for number in range(rounds):
        warm, jobs = next(work)[:WARM_UP], next(work)
        tokens = sum(job.output_len for job in jobs)
        with LLM(profile) as llm:
            run_engine(llm, warm)
            ours.append(tokens / run_engine(llm, jobs))
        with Vllm(vllm_arguments(profile)) as other:
            other.run(warm)
            theirs.append(tokens / other.run(jobs))
            version = other.started.version
        say(round=number, engine_tok_s=round(ours[-1], 1), vllm_tok_s=round(theirs[-1], 1))
    ratio = statistics.median(ours) / statistics.median(theirs)
    pairs = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    say(rounds=rounds, ratio=round(ratio, 3), vllm=version)
    print(f"engine {statistics.median(ours):12.1f} output tokens/s (median of {rounds})")
    print(f"vLLM   {statistics.median(theirs):12.1f} output tokens/s, {version or 'unknown version'}, its defaults")
    print(f"ratio  {ratio:12.2f} (pairs {pairs[0]:.2f} to {pairs[-1]:.2f})")


def vllm_arguments(profile: Profile) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` that mean the same model and layout; the rest are vLLM's defaults."""
    model, parallel = profile.model, profile.parallel
    arguments: dict[str, Any] = {
        "model": model.path, "tensor_parallel_size": parallel.tensor, "pipeline_parallel_size": parallel.pipeline,
        "dtype": model.dtype, "load_format": model.load_format, "max_model_len": model.max_model_len,
    }  # fmt: skip
    if not Path(model.path, "tokenizer.json").is_file():
        arguments["skip_tokenizer_init"] = True
    return arguments


class Vllm:
    """vLLM in a process of its own. Raises ValueError if it does not start or ends early."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        command = [sys.executable, "-m", "ppengine.bench.vllm_side"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started = self._ask(arguments)

    def run(self, jobs: list[Job]) -> float:
        """Return the seconds that vLLM takes for all jobs."""
        how = jobs[0].sampling
        work = Round(
            prompts=[job.prompt for job in jobs], output_lens=[job.output_len for job in jobs],
            temperature=how.temperature, top_p=how.top_p, top_k=how.top_k,
        )  # fmt: skip
        answer, wanted = self._ask(work), sum(job.output_len for job in jobs)
        if answer.tokens != wanted:
            raise ValueError(f"vLLM made {answer.tokens} tokens where {wanted} were asked for")
        return answer.seconds

    def close(self) -> None:
        """Let it end, and wait for that: its cards are free then."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.close()
        try:
            self._process.wait(60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        stdout.close()

    def __enter__(self) -> Vllm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, question: object) -> Answer:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(msgspec.json.encode(question) + b"\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            self._process.kill()
            code = self._process.wait()
            raise ValueError(f"vLLM ended with exit code {code}; its own words are above")
        return msgspec.json.decode(line, type=Answer)
