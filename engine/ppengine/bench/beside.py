"""`ppconsole bench --beside vllm`: the same requests here and in an installed vLLM, one after the other.

One side at a time has the devices, and so the whole memory. It starts once and runs all rounds of each workload. vLLM
runs in a process of its own, by another Python if need be: its dependencies and ours may exclude each other.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ppengine.bench import vllm_side
from ppengine.bench.sides import run_engine
from ppengine.bench.vllm_side import Answer, Round, Start
from ppengine.bench.workload import Job
from ppengine.common.config import Profile
from ppengine.offline.llm import LLM

WARM_UP = 8
"""Requests of a round that are run before the first one, with other ids."""
Works = dict[str, Iterator[list[Job]]]
"""Rounds of each workload, without end."""


def check_installed(python: str) -> None:
    """Raise ValueError with one line that says what to install."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)"
    try:
        found = subprocess.run([python, "-c", code], stderr=subprocess.DEVNULL, check=False).returncode
    except OSError as error:
        raise ValueError(f"--vllm-python {python}: {error.strerror}") from None
    if found:
        raise ValueError(
            f"{python} has no vLLM: pip install vllm there, name another by --vllm-python, or leave --beside away"
        )


def beside_vllm(profile: Profile, works: Works, rounds: int, python: str, say: Callable[..., None]) -> None:
    """Measure both sides; print tokens a second and the ratio of the medians. Raises EngineError, ValueError."""
    jobs = {name: [next(work) for _ in range(rounds + 1)] for name, work in works.items()}
    began = time.perf_counter()
    with LLM(profile) as llm:
        say(side="engine", start_s=round(time.perf_counter() - began, 1))
        ours = _measured("engine", lambda each: run_engine(llm, each), jobs, say)
    with Vllm(vllm_arguments(profile), python) as other:
        version = other.started.version or "unknown version"
        say(side="vllm", start_s=round(other.started.seconds, 1), vllm=version)
        theirs = _measured("vllm", other.run, jobs, say)
    print(f"output tokens a second, medians of {rounds}; vLLM {version} with its defaults")
    print(f"{'workload':14}{'engine':>10}{'vLLM':>10}{'ratio':>8}  least to most of each")
    for name in jobs:
        mine, its = sorted(ours[name]), sorted(theirs[name])
        medians = statistics.median(mine), statistics.median(its)
        say(workload=name, rounds=rounds, ratio=round(medians[0] / medians[1], 3))
        spread = f"{mine[0]:,.1f} to {mine[-1]:,.1f}, {its[0]:,.1f} to {its[-1]:,.1f}"
        print(f"{name:14}{medians[0]:10,.1f}{medians[1]:10,.1f}{medians[0] / medians[1]:8.2f}  {spread}")


def _measured(
    side: str, run: Callable[[list[Job]], float], works: dict[str, list[list[Job]]], say: Callable[..., None]
) -> dict[str, list[float]]:
    """Return the tokens a second of each round, by workload. The first jobs of each warm the side up."""
    found: dict[str, list[float]] = {}
    for name, (warm, *rounds) in works.items():
        run(warm[:WARM_UP])
        found[name] = []
        for number, jobs in enumerate(rounds):
            found[name].append(sum(job.output_len for job in jobs) / run(jobs))
            say(side=side, workload=name, round=number, tok_s=round(found[name][-1], 1))
    return found


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

    def __init__(self, arguments: dict[str, Any], python: str) -> None:
        # By its file: the other Python need not have this package, and has msgspec because vLLM needs it.
        command = [python, str(Path(vllm_side.__file__))]
        environment = os.environ | {"PYTHONSAFEPATH": "1"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        # Torch takes seconds, also for `--help`.
        from ppengine.models.loader import DUMMY_SCALE

        dummy = DUMMY_SCALE if arguments["load_format"] == "dummy" else 0.0
        self.started = self._ask(Start(arguments=arguments, dummy_scale=dummy))

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
