"""Throughput and CPU time of structured outputs beside free ones.

    python tests/engine/bench_structured.py [--answers N] [--schemas N] [--batch N] [--profile P] [--set a.b=c]
        [--form fields|spaced|text]

Forms: `fields`, JSON without white space, most of whose tokens are forced; `spaced`, the same schemas with any white
space; `text`, a regular expression that forces no token.

Two stages of the bundled model by default. Each round has the same number of requests and tokens a request. The free
round runs to the lengths of the structured one, so that both compute the same number of tokens. The first structured
round is cold: each of its schemas is new. One structured request comes before it, which starts the grammar processes.
Every answer that ended by itself must be valid. Then comes the CPU time a token of each process, and the digest of all
tokens: two versions of the engine must choose the same.
Needs jsonschema, which comes with the extra `ray`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from ppengine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from ppengine.common.config import Profile, load_profile
from ppengine.offline.arguments import make_profile

MODEL = str(Path(__file__).resolve().parents[2] / "profiles" / "models" / "tiny")
MOST = 64
PROMPT = "Once upon a time"


def schema(number: int) -> dict[str, Any]:
    """Return a schema that no other number has."""
    fields: dict[str, Any] = {
        f"name{number}": {"type": "string", "minLength": 1, "maxLength": 4 + number % 4},
        "kind": {"enum": [f"{number} cats", f"{number} dogs", "none"]},
        "count": {"type": "integer", "minimum": number, "maximum": number + 500},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 1 + number % 2},
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def pattern(number: int) -> str:
    """Return an expression that no other number has, for a text that `MOST` tokens cut."""
    return f"[a-zA-Z ,.]{{{200 + number}}}"


def constrained(number: int, seed: int, form: str) -> SamplingParams:
    wanted = StructuredOutputsParams(json=schema(number), disable_any_whitespace=form == "fields")
    if form == "text":
        wanted = StructuredOutputsParams(regex=pattern(number))
    return SamplingParams(max_tokens=MOST, seed=seed, structured_outputs=wanted)


def cpu_s() -> Counter[str]:
    """Return the CPU seconds of the processes that this one has started, by their module and stage."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue
    found: Counter[str] = Counter()
    for pid in parents:
        above = pid
        while above not in (0, os.getpid()):
            above = parents.get(above, 0)
        if above and pid != os.getpid():
            found[_role(pid)] += _cpu_ns(pid) / 1e9
    return found


def _cpu_ns(pid: int) -> int:
    """Return the nanoseconds of a process's threads, more exact than the ticks of its stat file."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total += int(thread.read_text().split()[0])
        except OSError:
            continue
    return total


def _role(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return "ended"
    module = re.search(r"ppengine\.([a-z]+)", command)
    stage = re.search(r"--stage (\d+)", command)
    return (module[1] if module else "other") + (f" {stage[1]}" if stage else "")


def run(llm: LLM, params: list[SamplingParams]) -> tuple[list[RequestOutput], float]:
    """Return the answers, and tokens a second."""
    began = time.monotonic()
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    took = time.monotonic() - began
    return outputs, sum(len(one.outputs[0].token_ids) for one in outputs) / took


def is_valid(number: int, output: RequestOutput, form: str) -> bool:
    """Return whether an answer has its form."""
    if form == "text":
        return re.fullmatch(pattern(number), output.outputs[0].text) is not None
    try:
        return bool(Draft202012Validator(schema(number)).is_valid(json.loads(output.outputs[0].text)))
    except ValueError:
        return False


def two_stages(batch: int) -> Profile:
    """Return the bundled model on two stages."""
    return make_profile(
        MODEL, pipeline_parallel_size=2, gpu_memory_utilization=0.05, swap_space=0.01, max_num_seqs=batch,
        enable_prefix_caching=False,
    )  # fmt: skip


def measured(llm: LLM, params: list[SamplingParams]) -> tuple[list[RequestOutput], float, Counter[str]]:
    """Return the answers, tokens a second, and the CPU microseconds a token of each process."""
    before = cpu_s()
    outputs, rate = run(llm, params)
    tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    spent = Counter({role: 1e6 * (now - before[role]) / tokens for role, now in cpu_s().items()})
    return outputs, rate, spent


def report(rounds: list[tuple[float, Counter[str], Counter[str]]]) -> None:
    """Print medians of the warm rounds: quotients, and CPU time by process."""
    print(f"median quotient of rates {statistics.median(quotient for quotient, *_ in rounds):.2f}")
    times = [free.total() / structured.total() for _, structured, free in rounds]
    print(f"median quotient of CPU times {statistics.median(times):.2f}")
    for role in sorted({role for _, *both in rounds for spent in both for role in spent}):
        structured, free = (statistics.median(each[place][role] for each in rounds) for place in (1, 2))
        print(f"{role:12s} structured {structured:6.1f} us a token, free {free:6.1f}, {structured - free:+6.1f}")


def main() -> None:
    """Print rates, CPU times, their quotients and the number of invalid answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", help="instead of the bundled model on two stages; it needs a tokenizer")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    for name, default in (("answers", 10000), ("schemas", 256), ("batch", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--form", choices=["fields", "spaced", "text"], default="fields")
    options = parser.parse_args()
    form, digest = options.form, hashlib.sha256()
    answers, schemas, batch = options.answers, options.schemas, options.batch
    warm_up = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(load_profile(options.profile, options.settings) if options.profile else two_stages(batch)) as llm:
        run(llm, [warm_up] * batch)
        run(llm, [constrained(schemas, 0, form)])
        done = invalid = cut = 0
        rounds: list[tuple[float, Counter[str], Counter[str]]] = []
        while done < answers:
            numbers = [(done + index) % schemas for index in range(min(batch, answers - done))]
            params = [constrained(number, done + index, form) for index, number in enumerate(numbers)]
            outputs, rate, spent = measured(llm, params)
            digest.update(repr([list(one.outputs[0].token_ids) for one in outputs]).encode())
            free = [
                SamplingParams(max_tokens=len(one.outputs[0].token_ids), ignore_eos=True, seed=done + index)
                for index, one in enumerate(outputs)
            ]
            _, free_rate, free_spent = measured(llm, free)
            ended = [one.outputs[0].finish_reason == "stop" for one in outputs]
            cut += ended.count(False)
            invalid += sum(
                stop and not is_valid(number, one, form)
                for number, one, stop in zip(numbers, outputs, ended, strict=True)
            )
            kind = "cold" if done < schemas else "warm"
            done += len(numbers)
            rounds.append((rate / free_rate, spent, free_spent))
            if len(rounds) <= 3 or done >= answers:
                print(
                    f"{done:6d} {kind}: {rate:8.0f} tokens/s, free {free_rate:8.0f}, {rate / free_rate:.2f}", flush=True
                )
        report(rounds[1:] or rounds)
        print(f"{done} answers: {invalid} invalid, {cut} cut by max_tokens; digest {digest.hexdigest()[:12]}")


if __name__ == "__main__":
    main()
