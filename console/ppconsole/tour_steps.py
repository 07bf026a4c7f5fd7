"""The steps of the tour: each presses keys, waits for the real effect, and returns the fact that shows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import cycle
from typing import NamedTuple

from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Verdict
from ppengine.protocol.verbs import Submit

from ppconsole.model.facts import root_verdict
from ppconsole.screens.diagnosis_screen import DiagnosisScreen
from ppconsole.screens.memory import MemoryDialog
from ppconsole.tour import DidNotHappen, TourApp

STAGE = 1
PROMPTS = ("Once upon a time", "The little fox", "In the morning the old man", "She opened the door and")
_TOKENS = 900
_BUSY = 3
"""Requests that run while something is changed."""
_FEED_S = 0.3
"""Seconds from one look at their number to the next."""


class Step(NamedTuple):
    """One step; `play` returns the fact that shows that it happened."""

    name: str
    play: Callable[[TourApp], Awaitable[str]]


async def _attach(tour: TourApp) -> str:
    tour.say("Two CPU stages, started for this tour. A row a stage: state, memory, KV.")
    await tour.until(lambda: tour.model.state.snapshot is not None, "snapshot of the engine")
    await tour.until(lambda: tour.snapshot.engine.state == "serving", "engine that serves", 60.0)
    engine = tour.snapshot.engine
    return f"{engine.name} serves {engine.model} in {engine.pipeline_parallel_size} stages"


async def _submit(tour: TourApp) -> str:
    tour.say("i opens the prompt line, Enter sends. The answer is below its prompt.")
    for option in (f"max-tokens {_TOKENS}", "ignore-eos on"):
        await tour.enter(":", f"set {option}")
    await tour.enter("i", PROMPTS[0])
    await tour.until(lambda: _written(tour), "text of the answer")
    return f"{tour.following.request} wrote {_written(tour)} tokens"


async def _load(tour: TourApp) -> str:
    tour.say("More requests: a row each, with state, blocks, and the stage that has it.")
    await _keep_busy(tour)
    return f"{tour.snapshot.queues.running} requests run"


async def _break(tour: TourApp) -> str:
    tour.say(f"Now a fault: SIGSTOP for stage {STAGE}. As every verb, it shows its plan first.")
    await _keep_busy(tour)
    async with _load_behind(tour):
        await tour.enter(":", f"fault sigstop --stage {STAGE}")
        await tour.confirm()
    tour.say(f"Output stops. The banner is red: it names stage {STAGE} and the cause.")
    await tour.until(lambda: _root(tour) is not None, "verdict")
    verdict = _root(tour)
    if verdict is None or (verdict.stage, verdict.cause) != (STAGE, "stopped"):
        raise DidNotHappen(f"stage {STAGE} was stopped, the verdict is {verdict}")
    return f"{verdict.cause} stage {verdict.stage} with {tour.snapshot.queues.running} running: {verdict.summary}"


async def _diagnose(tour: TourApp) -> str:
    tour.say("d opens the diagnosis: the waits, the evidence, and the fix behind do.")
    await tour.press("d")
    await tour.until(lambda: isinstance(tour.screen, DiagnosisScreen), "diagnosis")
    verdict = root_verdict(tour.snapshot)
    if verdict is None or not verdict.suggest:
        raise DidNotHappen("no suggestion in the verdict")
    return f"suggests {verdict.suggest}"


async def _mend(tour: TourApp) -> str:
    tour.say("Enter previews the suggested fix, then runs it.")
    await tour.press("enter")
    await tour.confirm()
    await tour.until(lambda: _root(tour) is None and _healed(tour), "end of the incident", 30.0)
    incident = tour.snapshot.incident
    return f"incident {incident.number} ended: {incident.ended}" if incident else "the incident ended"


async def _recovered(tour: TourApp) -> str:
    tour.say("Esc goes back. The requests go on at the same token; none is lost.")
    await tour.press("escape")
    before = tour.snapshot.engine.retired_step
    await _keep_busy(tour)
    await tour.until(lambda: tour.snapshot.engine.retired_step > before, "next step of the engine")
    return f"step {before} is followed by step {tour.snapshot.engine.retired_step}"


async def _halve(tour: TourApp) -> str:
    before = tour.snapshot.engine.memory_utilization
    tour.say(f"m changes memory while requests run: {before:g} to {before / 2:g}. The plan is first.")
    await _set_memory(tour, before / 2)
    return f"utilization {before:g} to {tour.snapshot.engine.memory_utilization:g}"


async def _undo(tour: TourApp) -> str:
    before = tour.snapshot.engine.memory_utilization
    tour.say(f"And back to {before * 2:g}: stages agree on each change, and no token is lost.")
    await _set_memory(tour, before * 2)
    return f"utilization {before:g} to {tour.snapshot.engine.memory_utilization:g}"


async def _end(tour: TourApp) -> str:
    tour.say("? explains a screen. serve PROFILE starts your engine, attach opens it.")
    return f"{tour.snapshot.engine.state} at step {tour.snapshot.engine.step}"


STEPS = (
    Step("attach", _attach), Step("submit", _submit), Step("load", _load), Step("break", _break),
    Step("diagnose", _diagnose), Step("mend", _mend), Step("recovered", _recovered), Step("halve", _halve),
    Step("undo", _undo), Step("end", _end),
)  # fmt: skip


async def _keep_busy(tour: TourApp) -> None:
    """Submit prompts until some run: a fault or a change of memory without load would show nothing."""
    for prompt in PROMPTS[1:]:
        if tour.snapshot.queues.running < _BUSY:
            await tour.enter("i", prompt)
    await tour.until(lambda: tour.snapshot.queues.running > 0, "request that runs")


@asynccontextmanager
async def _load_behind(tour: TourApp) -> AsyncIterator[None]:
    """Keep requests running without keys: to type a verb and read its plan takes longer than an answer."""
    feeding = asyncio.create_task(_feed(tour))
    try:
        yield
    finally:
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)


async def _feed(tour: TourApp) -> None:
    sampling = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    for prompt in cycle(PROMPTS):
        if tour.snapshot.queues.running < _BUSY:
            await tour.source.command(Submit(prompt=prompt, sampling=sampling))
        await asyncio.sleep(_FEED_S)


async def _set_memory(tour: TourApp, utilization: float) -> None:
    """Change the memory under load through its dialog, and wait until all stages have it."""
    await _keep_busy(tour)
    async with _load_behind(tour):
        await tour.press("m")
        await tour.until(lambda: isinstance(tour.screen, MemoryDialog) and tour.focused is not None, "memory dialog")
        await tour.press("ctrl+u", *f"{utilization:g}", "enter")
        await tour.confirm()
    await tour.until(
        lambda: abs(tour.snapshot.engine.memory_utilization - utilization) < 1e-6, f"utilization {utilization:g}", 60.0
    )


def _written(tour: TourApp) -> int:
    """Return the tokens of the followed request."""
    output = tour.model.state.outputs.get(tour.following.request or "")
    return output.tokens if output else 0


def _root(tour: TourApp) -> Verdict | None:
    """Return the root verdict."""
    verdict = root_verdict(tour.snapshot)
    return verdict if verdict is not None and verdict.root else None


def _healed(tour: TourApp) -> bool:
    """Whether the newest incident is over and the engine serves."""
    incident = tour.snapshot.incident
    return tour.snapshot.engine.state == "serving" and (incident is None or incident.over_wall is not None)
