"""Latencies and goodput count from the arrival at the engine's first process, not from that at the core."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from core_world import CoreWorld
from http_world import world as http_world
from ppengine.common.profile_sections import SloConfig
from ppengine.core.scheduler.admission import ARRIVAL_MOST_S
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.offline import AddMany, Follow, News
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.timings import Timings
from ppengine.protocol.verbs import Submit
from test_text_desk import IDS, Desk

SLO = SloConfig(ttft_ms=500)
SAMPLING = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)


def add(world: CoreWorld, arrived: float, sampling: SamplingParams = SAMPLING) -> None:
    """Submit one request as an HTTP process does."""
    submit = Submit(prompt_token_ids=[3, 4, 5], request="r", sampling=sampling)
    world.engine.offline.add_many(b"h", AddMany(nonce=1, session="http0", submissions=[submit], arrived=arrived))


def ended(world: CoreWorld) -> FinishedInfo:
    return world.engine.requests.finished().requests[0]


@pytest.mark.parametrize(("before", "met"), [(0.375, 1), (0.625, 0)])
def test_time_before_the_core_counts_for_latencies_and_goodput(before: float, met: int) -> None:
    world = CoreWorld(slo=SLO)
    add(world, world.now - before)
    (row,) = world.engine.reporter.build().requests
    assert (row.age_s, row.prepare_s, row.queue_s) == (before, before, None)
    world.now += 0.0625
    world.run()
    info, latency = ended(world), world.engine.reporter.build().latency
    assert (info.prepare_s, info.queue_s, info.ttft_s, info.took_s) == (
        before,
        0.0625,
        before + 0.0625,
        before + 0.0625,
    )
    assert latency.slo is not None and (latency.slo.met, latency.slo.ttft_missed) == (met, 1 - met)
    assert (latency.ttft_s.p50, latency.prepare_s.p50, latency.queue_s.p50) == (before + 0.0625, before, 0.0625)
    sums = {name: each.wire().sum for name, each in world.engine.requests.metrics.histograms.items()}
    assert (sums["first_token"], sums["whole"]) == (before + 0.0625, before + 0.0625)
    assert (sums["prepare"], sums["queue"]) == (before, 0.0625), "vLLM's queue time begins in its core"


def test_all_samples_and_the_timings_have_the_arrival() -> None:
    world = CoreWorld()
    add(world, world.now - 2.0, SamplingParams(n=2, max_tokens=2, ignore_eos=True))
    world.run()
    assert [one.took_s for one in world.engine.requests.finished().requests] == [2.0, 2.0]
    world.engine.outputs.follow(b"h", Follow(nonce=2, session="http0", since=-1, wait_ms=0, timings=True))
    (news,) = (message for _, message in world.answers if isinstance(message, News))
    for piece in news.all_pieces():
        assert isinstance(piece.timings, Timings)
        assert (piece.timings.arrival, piece.timings.queued) == (world.now - 2.0, world.now)


@pytest.mark.parametrize("ago", [-0.001, -1e9, ARRIVAL_MOST_S + 1, 1e18, float("nan"), float("inf"), float("-inf")])
def test_an_arrival_that_cannot_be_falsifies_nothing(ago: float) -> None:
    world = CoreWorld(slo=SLO)
    add(world, world.now - ago)
    world.now += 0.25
    world.run()
    info = ended(world)
    assert (info.prepare_s, info.ttft_s, info.took_s) == (0.0, 0.25, 0.25)


def test_an_arrival_that_is_not_known_is_that_in_the_queue_also_on_a_host_that_has_just_booted() -> None:
    """`LLM` sends none, and the monotonic clock counts from the boot."""
    world = CoreWorld()
    world.now = 30.0
    add(world, 0.0)
    world.now += 0.25
    world.run()
    assert (ended(world).prepare_s, ended(world).ttft_s, ended(world).took_s) == (0.0, 0.25, 0.25)


def test_a_command_of_a_console_counts_from_the_gateway() -> None:
    world = CoreWorld()
    world.say(Submit(prompt_token_ids=[3, 4], sampling=SAMPLING, request="r"), arrived=world.now - 0.75)
    world.run()
    assert (ended(world).prepare_s, ended(world).ttft_s) == (0.75, 0.75)


def test_the_gateway_sets_the_arrival_whatever_the_console_says(tmp_path: Path) -> None:
    desk, before = Desk(tmp_path), time.monotonic()
    desk.say(IDS, arrived=1.0)
    (command,) = desk.core
    assert before <= command.arrived <= time.monotonic()


@pytest.mark.parametrize("full", [False, True])
def test_a_replaced_core_counts_on(full: bool) -> None:
    """From the records of a turn, and from the full state that begins a file."""
    world = CoreWorld(slo=SLO)
    add(world, world.now - 0.25)
    world.engine.commit()
    if full:
        world.journal.begin(world.journal.state)
    fresh = CoreWorld(before=world, serve=False, slo=SLO)
    fresh.now = world.now + 3.0
    fresh.ready()
    fresh.run()
    info = ended(fresh)
    assert (info.prepare_s, info.ttft_s, info.queue_s) == (0.25, 3.25, 3.0)


def test_a_call_arrives_with_the_last_byte_of_its_body() -> None:
    """The pace of a client is no latency of the engine; the chat template and the tokens are."""

    async def call() -> None:
        async with http_world("hi") as world:
            sent, rendered, render = 0.0, 0.0, world.renderer.render

            async def body() -> AsyncIterator[bytes]:
                nonlocal sent
                yield b'{"messages": [{"role": "user", '
                await asyncio.sleep(0.01)
                sent = time.monotonic()
                yield b'"content": "hi"}]}'

            async def later(*given: object) -> str:
                nonlocal rendered
                rendered = time.monotonic()
                return await render(*given)  # type: ignore[arg-type]

            world.renderer.render = later  # type: ignore[method-assign]
            answer = await world.http.post("/v1/chat/completions", content=body())
            assert answer.status_code == 200, answer.text
            assert sent <= world.model.arrived <= rendered

    asyncio.run(call())
