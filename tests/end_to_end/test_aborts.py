"""Aborts in every state give all blocks back once the request's last step has retired everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import reference
from checkpoints import make_checkpoint
from operators import Operator
from ppengine.protocol.control import Outcome
from ppengine.protocol.snapshot import RequestInfo
from ppengine.protocol.verbs import Abort, Pause, Preempt, Resume, SwapIn, SwapOut
from serving import LASTING_S, Served

from profiles import small

SLOTS, BUDGET, LONG = 4, 32, 1500
PROMPT, CHUNKED, FORKED = reference.prompts(3, 100, low=150, high=150, seed=5)
"""The second and third are used once, so that no block of them is in the prefix cache."""
SHORT = PROMPT[:20]


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "aborts", "llama", dtype="float64", layers=4, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    scheduler = {"max_num_seqs": SLOTS, "max_num_batched_tokens": BUDGET, "schedule_ahead": True}
    # Requests that nobody ends write for seconds; fifty pictures a second show them in between.
    profile = small(folder, model={"max_model_len": 2048}, scheduler=scheduler, console={"publish_hz": 50.0})
    with Served(profile, step_s=LASTING_S) as served:
        yield served


def state(name: str) -> Callable[[RequestInfo], bool]:
    return lambda request: request.state == name


async def ended(op: Operator, name: str, sample: int = 0) -> None:
    """Check that the output was cut off by the abort."""
    tokens, _, reason = await op.output(name, sample)
    assert reason == "abort"
    assert len(tokens) < LONG


async def test_running(engine: Served) -> None:
    async with engine.operator() as op:
        async with op.frozen(SHORT, max_tokens=LONG) as name:
            begun = await op.begin(Abort(request=name))
        end = await begun.applied()
        assert end.step is not None
        assert re.search(r"abort by op: ended after \d+ tokens", end.text)
        await ended(op, name)
        await op.idle()


async def test_waiting(engine: Served) -> None:
    async with engine.operator() as op:
        async with op.crowd([SHORT] * (SLOTS + 1), max_tokens=LONG) as names:
            # Until the others run it is behind them; then no place is left.
            full = lambda request: request.why and request.why.code == "max_num_seqs"  # noqa: E731
            waits = await op.request(names[-1], full, "waits for a place")
            assert waits.state == "waiting"
            await op.do(Abort(request=names[-1]))
        assert await op.output(names[-1]) == ([], "", "abort")
        for other in names[:-1]:
            await op.do(Abort(request=other))
        await op.idle()


async def test_prefill_chunk_in_flight(engine: Served) -> None:
    async with engine.operator() as op:
        with engine.stopped("stage1"):
            name = await op.submit(CHUNKED, max_tokens=10)
            chunked = lambda request: request.in_flight and 0 < request.computed_tokens < len(CHUNKED)  # noqa: E731
            request = await op.stuck(name)
            assert chunked(request), "it has chunks in flight"
            begun = await op.begin(Abort(request=name))
            held = await op.request(name, lambda request: request.why and request.why.code == "fenced", "is fenced")
            assert held.blocks == request.blocks, "blocks stay until the chunk has retired"
            await op.until(lambda _: begun.deferred, "it is told what the abort waits for")
            assert re.fullmatch(r"in flight: m\d+ at stage [01]", begun.deferred[0])
            at_the_stopped = rf"in flight: m{request.in_flight[0]} at stage 1"
            await op.until(lambda _: begun.deferred[-1] == at_the_stopped, "it waits for the stage that is stopped")
            assert not begun.end.done()
        end = await begun.applied()
        assert end.step == max(request.in_flight)
        assert await op.output(name) == ([], "", "abort")
        await op.idle()


async def test_swapped(engine: Served) -> None:
    async with engine.operator() as op:
        (name,) = await op.halfway([PROMPT], 2, max_tokens=LONG)
        await op.do(Preempt(request=name, mode="swap"))
        swapped = await op.request(name, state("swapped"), "is swapped")
        assert swapped.blocks == 0
        assert swapped.swap_blocks > 0
        await op.do(Abort(request=name))
        await ended(op, name)
        await op.idle()
        await op.do(Resume())


@pytest.mark.parametrize("verb", [SwapOut(request=""), Preempt(request="", mode="recompute", hold=True)])
async def test_held(engine: Served, verb: SwapOut | Preempt) -> None:
    async with engine.operator() as op:
        async with op.frozen(PROMPT, 2, max_tokens=LONG) as name:
            verb.request = name
            begun = await op.begin(verb)
        await begun.applied()
        held = await op.request(name, state("held"), "is held")
        assert held.blocks == 0
        assert bool(held.swap_blocks) == isinstance(verb, SwapOut)
        await op.do(Abort(request=name))
        await ended(op, name)
        await op.idle()


async def test_copies_to_the_host_in_flight(engine: Served) -> None:
    async with engine.operator() as op:
        (name,) = await op.halfway([PROMPT], 2, max_tokens=LONG)
        with engine.stopped("stage1"):
            swap = await op.begin(SwapOut(request=name))
            await op.request(name, lambda request: request.in_flight, "is being copied")
            abort = await op.begin(Abort(request=name))
        await abort.applied()
        await swap.superseded()
        await ended(op, name)
        await op.idle()
        await op.do(Resume())


async def test_loading(engine: Served) -> None:
    async with engine.operator() as op:
        (name,) = await op.halfway([PROMPT], 2, max_tokens=LONG)
        await op.do(SwapOut(request=name))
        await op.do(Resume())
        with engine.stopped("stage0"):
            load = await op.begin(SwapIn(request=name))
            loading = await op.request(name, state("loading"), "is loading")
            assert loading.blocks > 0
            assert loading.swap_blocks > 0
            abort = await op.begin(Abort(request=name))
            await op.request(name, lambda request: request.why and request.why.code == "fenced", "is fenced")
        await abort.applied()
        assert isinstance(await load.end, Outcome)
        await ended(op, name)
        await op.idle()


async def test_paused_engine(engine: Served) -> None:
    async with engine.operator() as op:
        async with op.crowd([SHORT] * (SLOTS + 2), max_tokens=LONG) as names:
            await op.until(lambda picture: picture.queues.running == SLOTS, "all slots are taken")
            await op.do(Pause(mode="keep"))
        picture = await op.quiet()
        assert (picture.queues.running, picture.queues.waiting) == (SLOTS, 2)
        for name in names:
            await op.do(Abort(request=name))
        picture = await op.idle()
        assert picture.engine.state == "paused"
        await op.do(Resume())
        await op.until(lambda picture: picture.engine.state == "serving", "it serves again")


async def test_samples_of_one_prompt(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        async with op.frozen(PROMPT, 1, max_tokens=LONG, n=3) as name:
            begun = await op.begin(Abort(request=f"{name}.1"))
        await begun.applied()
        await ended(op, name, 1)
        await op.do(Abort(request=name))
        for sample in (0, 2):
            await ended(op, name, sample)
        await op.idle()

        with engine.stopped("stage1"):
            name = await op.submit(PROMPT, max_tokens=40, n=3)
            await op.until(lambda picture: picture.requests_total == 3, "three samples")
            begun = await op.begin(Abort(request=f"{name}.2"))
        await begun.applied()
        expected = await reference.greedy_aside(folder, PROMPT, 40)
        assert await op.tokens(name, 0) == expected
        assert await op.tokens(name, 1) == expected
        await op.idle()


async def test_samples_that_wait_for_their_prompt(engine: Served) -> None:
    async with engine.operator() as op:
        with engine.stopped("stage0"):
            name = await op.submit(FORKED, max_tokens=10, n=3)
            await op.request(name, lambda request: request.in_flight, "has a chunk in flight")
            begun = await op.begin(Abort(request=name))
            await op.until(lambda picture: picture.requests_total == 1, "the samples without blocks are gone")
        await begun.applied()
        for sample in range(3):
            assert await op.output(name, sample) == ([], "", "abort")
        await op.idle()


async def test_twice(engine: Served) -> None:
    async with engine.operator() as op:
        async with op.frozen(SHORT, 2, max_tokens=LONG) as name:
            begun = await op.begin(Abort(request=name))
            text = await op.refused(Abort(request=name), "CONFLICT")
            assert "is ending already: abort by op" in text
            paused = await op.begin(Pause(mode="abort"))  # what is ending already is no obstacle
            assert isinstance(await paused.end, Outcome)
        await begun.applied()
        text = await op.refused(Abort(request=name), "NOT_FOUND")
        assert re.fullmatch(rf"request {name} has finished \(abort, \d+ tokens\)", text)
        await op.do(Resume())
        await op.idle()


async def test_pause_aborts_all_states(engine: Served, folder: Path) -> None:
    async with engine.operator() as op:
        names = await op.halfway([PROMPT] * SLOTS, 2, max_tokens=LONG)
        names.append(await op.submit(PROMPT, max_tokens=LONG))
        await op.do(Preempt(request=names[-1], hold=True))
        await op.do(SwapOut(request=names[0]))
        with engine.stopped("stage1"):
            loading = await op.begin(SwapIn(request=names[0]))
            await op.request(names[0], state("loading"), "is loading")
            await op.do(Resume())
            names.append(await op.submit(PROMPT, max_tokens=LONG))
            await op.stuck(names[1])
            states = {"running": SLOTS - 1, "loading": 1, "held": 1, "waiting": 1}
            await op.until(lambda p: states.items() <= msgspec.structs.asdict(p.queues).items(), "one in every state")
            await op.do(Pause(mode="abort"))
        await loading.end
        picture = await op.idle()
        assert picture.engine.state == "paused"
        for name in names:
            assert (await op.output(name))[2] == "abort"
        await op.do(Resume())
        expected = await reference.greedy_aside(folder, PROMPT, 20)
        assert await op.tokens(await op.submit(PROMPT, max_tokens=20)) == expected
