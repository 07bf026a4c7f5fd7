"""CPU time of a call of `generate` until the stages have begun its first step, without sockets.

    python tests/engine/bench_start.py prefix offline [--beside CHECKOUT] [--rounds N]

Client, core and a stage work one after another in one thread, on named workloads with a vocabulary of 128,256. Beside
another checkout, both take turns. Figures are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import core_world
from ppengine.bench.named_workloads import WORKLOADS
from ppengine.common.profile_sections import MemoryConfig
from ppengine.offline.llm_engine import LLMEngine
from ppengine.offline.open_requests import OpenRequests
from ppengine.offline.program_texts import ProgramTexts
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.stage_lifecycle import StageReady
from ppengine.protocol.steps import ToStage
from ppengine.stage.batch_state import BatchState

VOCABULARY, MAX_MODEL_LEN, BLOCK_SIZE = 128_256, 4096, 16
PARTS = ("client", "decode", "requests", "schedule", "stage")
ROOT = Path(__file__).resolve().parents[2]


class Taker:
    """Takes the message of a client in place of its core."""

    payload = b""

    def nonce(self) -> int:
        """Return a number of a message."""
        return 1

    def ask(self, message: AddMany, _: type) -> Added:
        """Encode a message."""
        self.payload = encode(message)
        return Added(nonce=1, requests=[str(number) for number in range(len(message.submissions))])


def serving() -> core_world.CoreWorld:
    """Return a core with one stage of four ranks that have room for all requests."""
    core_world.MemoryConfig = functools.partial(MemoryConfig, block_size=BLOCK_SIZE)  # type: ignore[misc,assignment]
    world = core_world.CoreWorld(
        stages=1, tensor=4, max_model_len=MAX_MODEL_LEN, vocabulary=VOCABULARY, max_num_seqs=512,
        max_num_batched_tokens=8192, schedule_ahead=True, serve=False,
    )  # fmt: skip
    for stage, rank in world.engine.stages.places:
        world.engine.stage_messages.take(
            StageReady(
                stage=stage, rank=rank, generation=world.generation, pid=1, host="h", layers=[0, 1], device_kind="cpu",
                device_name="", device_uuid=None, total_bytes=10_000_000, weights_bytes=1000, peak_bytes=1000,
                block_bytes=50, quantum_blocks=1, reserved_blocks=200_000, swap_blocks=50,
            )
        )  # fmt: skip
    world.run()
    return world


def start(workload: str, number: int) -> dict[str, float]:
    """Return the milliseconds of each part for one call."""
    world, client, steps = serving(), LLMEngine.__new__(LLMEngine), list[bytes]()
    taker = Taker()
    client._engine, client._session, client._open = taker, "s", OpenRequests(lambda: None)  # type: ignore[assignment]
    client._texts = ProgramTexts(ROOT, MAX_MODEL_LEN, absent=True)
    jobs = WORKLOADS[workload].jobs(VOCABULARY, number)
    params = [
        SamplingParams(temperature=0.0, max_tokens=job.output_len, ignore_eos=True, seed=place)
        for place, job in enumerate(jobs)
    ]
    from_client, to_stage, state = Codec(AddMany), Codec(ToStage), BatchState(MAX_MODEL_LEN, BLOCK_SIZE)
    first: list[int] = []

    def send(_: bytes, payload: bytes) -> None:
        first.append(time.thread_time_ns())
        steps.append(payload)

    world.engine.tracker._send = send
    gc.collect()
    gc.freeze()
    at = [time.thread_time_ns()]

    def done(result: Any) -> Any:
        at.append(time.thread_time_ns())
        return result

    done(client.add_many([{"prompt_token_ids": job.prompt} for job in jobs], params))
    message = done(from_client.decode(taker.payload))
    done(world.engine.offline.add_many(b"c", message))
    done(world.engine.advance())
    scheduled, at[-1] = at[-1], first[0]
    begin = time.thread_time_ns()
    step: Any = to_stage.decode(steps[0])
    state.register(step.register)
    state.set_tables(step.tables)
    at.append(at[-1] + time.thread_time_ns() - begin)
    parts = {name: (after - before) / 1e6 for name, before, after in zip(PARTS, at, at[1:], strict=False)}
    return {**parts, "to the first step": (at[-1] - at[0]) / 1e6, "second step": (scheduled - first[0]) / 1e6}


def sides(beside: str) -> Iterator[tuple[str, Callable[[str, int], dict[str, float]]]]:
    """Yield the checkouts, each with what measures a call in a process of its own."""
    for name, root in (("before", beside), ("now", str(ROOT))):
        if not root:
            continue
        paths = [f"{root}/{part}" for part in ("tests/engine", "engine", "kernels", "console")]
        environment = {**os.environ, "PYTHONPATH": ":".join(paths)}

        def measure(workload: str, number: int, environment: dict[str, str] = environment) -> dict[str, float]:
            words = [sys.executable, "-P", __file__, workload, "--only", str(number)]
            printed = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
            found: dict[str, float] = json.loads(printed)
            return found

        yield name, measure


def main() -> None:
    """Print a table for each workload, with a row for each checkout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS))
    parser.add_argument("--beside", default="")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=int)
    words = parser.parse_args()
    if words.only is not None:
        start(words.workloads[0], 0)  # What is made once is no part of a call.
        print(json.dumps(start(words.workloads[0], words.only + 1)))
        return
    for workload in words.workloads:
        found: dict[str, list[dict[str, float]]] = {}
        for number in range(words.rounds):
            for name, measure in sides(words.beside):
                found.setdefault(name, []).append(measure(workload, number))
        for name, rounds in found.items():
            row = {part: statistics.median(one[part] for one in rounds) for part in rounds[0]}
            print(f"{workload:8} {name:7}" + "".join(f"  {part} {value:.1f}" for part, value in row.items()))


if __name__ == "__main__":
    main()
