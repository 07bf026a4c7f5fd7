"""Throughput of structured outputs beside free ones.

    python tests/engine/bench_structured.py [--answers N] [--schemas N] [--batch N] [--profile P] [--set a.b=c]

Two stages of the bundled model by default. Each round has the same number of requests and tokens a request. The free
round runs to the lengths of the structured one, so that both compute the same number of tokens. The first structured
round is cold: each of its schemas is new. Every answer that ended by itself must be valid.
Needs jsonschema, which comes with the extra `ray`.
"""

from __future__ import annotations

import argparse
import json
import time
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


def constrained(number: int, seed: int) -> SamplingParams:
    form = StructuredOutputsParams(json=schema(number), disable_any_whitespace=True)
    return SamplingParams(max_tokens=MOST, seed=seed, structured_outputs=form)


def run(llm: LLM, params: list[SamplingParams]) -> tuple[list[RequestOutput], float]:
    """Return the answers, and tokens a second."""
    began = time.monotonic()
    outputs = llm.generate([PROMPT] * len(params), params, use_tqdm=False)
    took = time.monotonic() - began
    return outputs, sum(len(one.outputs[0].token_ids) for one in outputs) / took


def is_valid(number: int, output: RequestOutput) -> bool:
    """Return whether an answer is JSON of its schema."""
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


def main() -> None:
    """Print rates, their quotient and the number of invalid answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", help="instead of the bundled model on two stages; it needs a tokenizer")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    for name, default in (("answers", 10000), ("schemas", 256), ("batch", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    answers, schemas, batch = options.answers, options.schemas, options.batch
    warm_up = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(load_profile(options.profile, options.settings) if options.profile else two_stages(batch)) as llm:
        run(llm, [warm_up] * batch)
        done = invalid = cut = 0
        quotients: list[float] = []
        while done < answers:
            numbers = [(done + index) % schemas for index in range(min(batch, answers - done))]
            outputs, rate = run(llm, [constrained(number, done + index) for index, number in enumerate(numbers)])
            free = [
                SamplingParams(max_tokens=len(one.outputs[0].token_ids), ignore_eos=True, seed=done + index)
                for index, one in enumerate(outputs)
            ]
            _, free_rate = run(llm, free)
            ended = [one.outputs[0].finish_reason == "stop" for one in outputs]
            cut += ended.count(False)
            invalid += sum(
                stop and not is_valid(number, one) for number, one, stop in zip(numbers, outputs, ended, strict=True)
            )
            kind = "cold" if done < schemas else "warm"
            done += len(numbers)
            quotients.append(rate / free_rate)
            if len(quotients) <= 3 or done >= answers:
                print(
                    f"{done:6d} {kind}: {rate:8.0f} tokens/s, free {free_rate:8.0f}, {rate / free_rate:.2f}", flush=True
                )
        warm = sorted(quotients[1:]) or quotients
        print(f"{done} answers: {invalid} invalid, {cut} cut by max_tokens; warm quotient {warm[len(warm) // 2]:.2f}")


if __name__ == "__main__":
    main()
