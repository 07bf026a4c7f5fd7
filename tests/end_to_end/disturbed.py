"""One scenario for the same-tokens rule: greedy requests that meet all that may befall one, and what they should write.

Prompts share a prefix and come in chunks; one request is recomputed, one moved to the host and back; most of the memory
goes while they run, so that others are swapped out, and preempted for want of blocks, and then it comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import reference
from injected import Injector
from operators import CATCHES, Operator
from ppengine import SamplingParams
from ppengine.common.config import Profile
from ppengine.protocol.control import Outcome
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import Preempt, Resume, SetMemory, SwapIn, SwapOut
from serving import Served

from profiles import small

REQUESTS, STEPS, LATE = 8, 60, 20
"""Who has written more than `LATE` when the engine is paused is too far for what comes then."""
SHARED, BUDGET = 32, 32
"""Tokens: of the prompts' common prefix, and of a step at most."""
FULL = 0.9
STEP_S = 0.03
"""Added to each step, so that commands come in time on a slow machine, and on a fast one."""
ROOM, LITTLE = 80, 12
"""Blocks: more than all need at their full length; two of them have room, and not until their end."""

GREEDY: Mapping[str, Any] = {}


class WrongTokensError(AssertionError):
    """A request wrote something else than transformers."""


def profile(folder: Path, stages: int, threads: int, device_mib: int, **sections: Any) -> Profile:
    """Return a profile for the scenario; `sections` as for `small`."""
    return small(
        folder,
        stages=stages,
        threads=threads,
        model={"max_model_len": 144},
        memory={"device_mib": device_mib, "utilization": FULL},
        console={"publish_hz": 100.0},
        scheduler={"max_num_batched_tokens": BUDGET, **sections.pop("scheduler", {})},
        **sections,
    )


async def check(
    engine: Served,
    folder: Path,
    vocab: int = 100,
    seed: int = 0,
    injector: Injector | None = None,
    sampling: Mapping[str, Any] = GREEDY,
) -> None:
    """Run the scenario. Raises WrongTokensError; any other AssertionError means that something did not happen.

    Requests are greedy unless `sampling` has other parameters.
    With an `injector` stage 0 is slow while that matters. The scenario is repeated, with other prompts, if requests
    were through before all could befall them.
    """
    async with engine.operator() as op:
        for again in range(CATCHES):
            prompts = make_prompts(vocab, seed + 2 * again)
            outputs = await disturb(op, prompts, injector, sampling)
            if outputs:
                break
            await op.clean(FULL)
        else:
            raise AssertionError(f"{CATCHES} times, requests were through too early")
    for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        if sampling:
            expected = reference.sampled(folder, prompt, STEPS, SamplingParams(**sampling), draft=output)
        else:
            expected = reference.greedy(folder, prompt, STEPS, draft=output)
        if output != expected:
            raise WrongTokensError(f"request {number} wrote {output}, transformers {expected}")


def make_prompts(vocab: int, seed: int) -> list[list[int]]:
    """Return prompts that share a prefix, and do not fit into a step without it either."""
    (shared,) = reference.prompts(1, vocab, low=SHARED, high=SHARED, seed=seed)
    return [shared + tail for tail in reference.prompts(REQUESTS, vocab, low=BUDGET + 2, high=44, seed=seed + 1)]


async def disturb(
    op: Operator, prompts: list[list[int]], injector: Injector | None, sampling: Mapping[str, Any]
) -> list[list[int]]:
    """Return what the prompts gave, or nothing if some were through too early; asserts what befell them."""
    wide, narrow = [await utilization_for(op, blocks) for blocks in (ROOM, LITTLE)]
    await op.do(SetMemory(utilization=wide))
    first = await op.tokens(
        await op.submit(prompts[0], max_tokens=STEPS, **sampling)
    )  # brings the prefix into the cache
    with injector.paced(op.engine.pids["stage0"], STEP_S) if injector else contextlib.nullcontext():
        names = await op.submit_all(prompts[1:], max_tokens=STEPS, **sampling)
        for name in names:
            await op.written(name, 4)
        requests = (await op.pause()).requests
        if len(requests) < len(names) or any(request.output_tokens > LATE for request in requests):
            return []
        assert {request.cached_tokens for request in requests} == {SHARED}, "the prefix was found, and nothing else"
        recomputed, swapped, *_ = names
        blocks = await preempt_and_swap(op, recomputed, swapped)
        if not await squeeze(op, wide, narrow):
            return []
    back = await op.do(SwapIn(request=swapped))
    assert back.text == f"{blocks} blocks swapped in"
    outputs = [first, *await op.all_tokens(names)]
    details = [await op.detail(name) for name in (recomputed, swapped)]
    assert all(detail.preemptions for detail in details)
    assert details[1].swaps
    await op.idle()
    return outputs


async def preempt_and_swap(op: Operator, recomputed: str, swapped: str) -> int:
    """Have one request of a paused engine recomputed, and one held on the host; return the blocks of that one."""
    await op.do(Preempt(request=recomputed, mode="recompute"))
    await op.do(SwapOut(request=swapped))
    again = await op.request(recomputed, lambda request: request.state == "waiting", "waits")
    assert (again.blocks, again.computed_tokens) == (0, 0)
    away = await op.request(swapped, lambda request: request.state == "held", "is held")
    assert (away.blocks, away.swap_blocks > 0) == (0, True)
    return away.swap_blocks


async def squeeze(op: Operator, wide: float, narrow: float) -> bool:
    """Let a paused engine go on, take most of its memory meanwhile, and give it back once that has hurt.

    Tells whether it did hurt, and some are not through yet.
    """
    preempted = (await op.now()).preemptions_total
    _, shrunk = await asyncio.gather(op.do(Resume()), op.do(SetMemory(utilization=narrow)))
    assert LITTLE <= shrunk.figures["blocks_after"] < ROOM <= shrunk.figures["blocks_before"]
    assert shrunk.figures["swap_requests"] > 0, "not all could stay"
    preempted += int(shrunk.figures["swap_requests"] + shrunk.figures["recompute_requests"])

    def hurt(picture: Snapshot) -> bool:
        return picture.preemptions_total > preempted or picture.requests_total == 1

    await op.until(hurt, "they grow until blocks are short")
    restored = await op.do(SetMemory(utilization=wide))
    assert restored.figures["blocks_after"] == shrunk.figures["blocks_before"]
    picture = await op.now()
    assert picture.queues.held == 1
    return picture.preemptions_total > preempted and picture.queues.running > 0


async def utilization_for(op: Operator, blocks: int) -> float:
    """Return about the smallest utilization that maps `blocks`, however much the profile run has taken."""
    low, high = 0.0, FULL
    for _ in range(14):
        middle = (low + high) / 2
        plan = await op.ask(SetMemory(utilization=middle), dry_run=True)
        fits = isinstance(plan, Outcome) and plan.figures["blocks_after"] >= blocks
        low, high = (low, middle) if fits else (middle, high)
    return high
