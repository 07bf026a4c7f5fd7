"""Throughput of structured outputs beside free ones: `python tests/engine/bench_structured.py [ANSWERS] [SCHEMAS]`.

Two stages of the bundled model on the CPU. Each round has the same number of requests and tokens a request. The free
round runs to the lengths of the structured one, so that both compute the same number of tokens. The first structured
round is cold: each of its schemas is new. Every answer that ended by itself must be valid.
Needs jsonschema, which comes with the extra `ray`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from ppengine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams

MODEL = str(Path(__file__).resolve().parents[2] / "profiles" / "models" / "tiny")
BATCH = 256
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


def main() -> None:
    """Print rates, their quotient and the number of invalid answers."""
    warm_up = SamplingParams(max_tokens=8, ignore_eos=True)
    answers, schemas = [int(each) for each in [*sys.argv[1:], "10000", "256"][:2]]
    with LLM(
        MODEL, pipeline_parallel_size=2, gpu_memory_utilization=0.05, swap_space=0.01, max_num_seqs=BATCH,
        enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        run(llm, [warm_up] * BATCH)
        done = invalid = cut = 0
        quotients: list[float] = []
        while done < answers:
            numbers = [(done + index) % schemas for index in range(min(BATCH, answers - done))]
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
