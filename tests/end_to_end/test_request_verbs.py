"""Preempt, swap out, swap in and release on running requests: states as documented, tokens as if undisturbed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.snapshot import RequestInfo
from ppengine.protocol.verbs import Abort, Preempt, Priority, Release, Resume, SwapIn, SwapOut
from serving import Served

from profiles import small

pytestmark = pytest.mark.long
SLOTS, STEPS = 4, 300
HOST_BLOCKS, BLOCK = 64, 16
PROMPTS = reference.prompts(4, 100, low=40, high=60, seed=11)


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "verbs", "qwen3", dtype="float64", layers=4)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    block_bytes = 2 * 2 * 16 * 2 * 16 * 8
    memory = {"swap_space_gib": HOST_BLOCKS * block_bytes / 2**30}
    profile = small(
        folder,
        model={"max_model_len": 512},
        memory=memory,
        scheduler={"max_num_seqs": SLOTS},
        console={"publish_hz": 50.0},
    )
    with Served(profile) as served:
        yield served


def fenced(request: RequestInfo) -> bool:
    return request.why is not None and request.why.code == "fenced"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preempt(engine: Served, expected: list[list[int]], mode: str) -> None:
    async with engine.operator() as op:
        async with op.frozen(PROMPTS[0], max_tokens=STEPS) as name:
            begun = await op.begin(Preempt(request=name, mode=mode))  # type: ignore[arg-type]
        end = await begun.applied()
        assert end.step is not None
        assert ("swapped out" if mode == "swap" else "to be recomputed") in end.text
        assert await op.tokens(name) == expected[0]
        detail = await op.detail(name)
        assert (detail.preemptions, detail.swaps) == (1, mode == "swap")
        await op.idle()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_preempt_and_hold(engine: Served, expected: list[list[int]], mode: str) -> None:
    async with engine.operator() as op:
        async with op.frozen(PROMPTS[0], max_tokens=STEPS) as name:
            verb = engine.start_cli("preempt", name, "--mode", mode, "--hold", "--json")
            await op.request(name, fenced, "is fenced")
        ran = await op.end_of(verb)
        assert ran.code == 0, ran
        assert ran.json["state"] == "applied"
        held = await op.request(name, lambda request: request.state == "held", "is held")
        assert (held.blocks, bool(held.swap_blocks)) == (0, mode == "swap")
        assert held.why is not None
        assert held.why.text.startswith("preempt by ")
        assert op.picture.queues.held == 1
        assert 5 < held.output_tokens < STEPS
        assert (await op.cli("release", name)).code == 0
        assert await op.tokens(name) == expected[0]
        await op.idle()


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK)


async def test_swap_out_and_in(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        (name,) = await op.halfway(PROMPTS[:1], max_tokens=STEPS)
        quiet = await op.request(name, lambda request: True, "is there")
        computed, known = blocks_for(quiet.computed_tokens), blocks_for(quiet.prompt_tokens + quiet.output_tokens)
        assert quiet.blocks == computed
        planned = (await op.cli("swap-out", name, "--dry-run", "--json")).json
        assert planned["figures"]["host_needed"] == computed
        assert planned["figures"]["host_free"] == HOST_BLOCKS
        ran = await op.cli("swap-out", name, "--if-rev", str(planned["revision"]), "--json")
        assert ran.json["text"].endswith(f"{computed} blocks swapped out, held")
        held = await op.request(name, lambda request: request.state == "held", "is held")
        assert (held.blocks, held.swap_blocks) == (0, computed)
        assert op.picture.stages[0].swap_blocks.used == computed
        ran = await op.cli("swap-in", name, "--json")
        assert ran.json["text"] == f"{computed} blocks swapped in"
        back = await op.request(name, lambda request: request.state == "running", "is back")
        # What is computed goes out; what is known comes back: the token that is to be computed next has its place.
        assert (back.blocks, back.swap_blocks) == (known, 0)
        assert back.computed_tokens == quiet.computed_tokens
        await op.do(Resume())
        assert await op.tokens(name) == expected[0]
        await op.idle()


async def test_swap_out_without_hold_comes_back(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        async with op.frozen(PROMPTS[0], max_tokens=STEPS) as name:
            begun = await op.begin(SwapOut(request=name, hold=False))
        await begun.applied()
        assert await op.tokens(name) == expected[0]
        assert (await op.detail(name)).swaps == 1
        await op.idle()


async def test_release_of_a_swapped_one(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        (name,) = await op.halfway(PROMPTS[:1], max_tokens=STEPS)
        await op.do(SwapOut(request=name))
        assert (await op.do(Release(request=name))).text == "release by op: no longer held"
        swapped = await op.request(name, lambda request: request.state == "swapped", "waits on the host")
        assert swapped.why is not None
        assert swapped.why.code == "paused"
        await op.do(Resume())
        assert await op.tokens(name) == expected[0]
        await op.idle()


async def test_samples_move_together(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        async with op.frozen(PROMPTS[0], max_tokens=STEPS, n=3) as name:
            begun = await op.begin(SwapOut(request=name))
        await begun.applied()
        await op.until(lambda picture: picture.queues.held == 3, "all three are held")
        await op.do(Release(request=f"{name}.1"))
        assert await op.tokens(name, 1) == expected[0]
        await op.do(Release(request=name))  # of those that are held still
        assert [await op.tokens(name, sample) for sample in (0, 2)] == [expected[0]] * 2
        await op.idle()


async def test_waiting_requests_begin_by_priority(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        running = await op.halfway(PROMPTS[: SLOTS - 1], max_tokens=STEPS)
        # One place is left: the others take it one after the other.
        waiting = await op.submit_all(PROMPTS[1:], max_tokens=8)
        first, second, third = waiting
        await op.request(third, lambda request: request.state == "waiting", "waits")
        planned = (await op.cli("priority", third, "-5", "--dry-run", "--json")).json
        assert planned["plan"] == [f"{third} is waiting, priority 0 -> -5", "position 3 -> 1 of 3 waiting"]
        ran = await op.cli("priority", third, "-5", "--if-rev", str(planned["revision"]), "--json")
        assert ran.json["text"].startswith("priority by ") and ran.json["text"].endswith(": 0 -> -5")
        assert (ran.code, ran.json["revision"]) == (0, 1)
        assert (await op.do(Priority(request=first, priority=3))).text == "priority by op: 0 -> 3"
        await op.do(Resume())
        assert [await op.tokens(name) for name in waiting] == [tokens[:8] for tokens in expected[1:]]
        ended = [event.request for event in await op.heard() if event.kind == "request.finished"]
        assert [name for name in ended if name in waiting] == [third, second, first]
        assert [await op.tokens(name) for name in running] == expected[:3]
        await op.idle()


async def test_many_verbs_at_random(engine: Served, expected: list[list[int]]) -> None:
    source = random.Random(3)
    async with engine.operator() as op:
        begun = [(index, await op.submit(prompt, max_tokens=STEPS)) for index, prompt in enumerate(PROMPTS)]
        live, applied, tried = dict(begun), 0, 0
        while tried < 40 or (applied < 9 and tried < 400):
            tried += 1
            index = source.choice(range(len(PROMPTS)))
            name = live[index]
            verb = source.choice(
                [
                    Preempt(request=name, mode="recompute"),
                    Preempt(request=name, mode="swap", hold=True),
                    SwapOut(request=name, hold=source.random() < 0.5),
                    SwapIn(request=name),
                    Release(request=name),
                ]
            )
            end = await op.ask(verb)
            applied += isinstance(end, Outcome) and end.state == "applied"
            assert not isinstance(end, Refused) or end.code in ("INVALID", "CONFLICT", "NOT_FOUND", "DOES_NOT_FIT")
            if isinstance(end, Refused) and end.code == "NOT_FOUND":  # it has finished: another one takes its place
                live[index] = await op.submit(PROMPTS[index], max_tokens=STEPS)
                begun.append((index, live[index]))
        assert applied > 8
        for _, name in begun:
            await op.ask(Release(request=name))
        for index, name in begun:
            assert await op.tokens(name) == expected[index]
        await op.idle()


async def test_refusals_are_one_line_with_numbers(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        (name,) = await op.halfway(PROMPTS[:1], max_tokens=STEPS)
        for words, code, text in (
            (["release", name], 2, f"{name} is running, not held; nothing to release (INVALID)"),
            (["swap-in", name], 2, f"{name} is running and holds no blocks on the host alone (INVALID)"),
            (["preempt", "r-none"], 7, "no request r-none (NOT_FOUND)"),
            (["swap-out", name, "--if-rev", "5"], 6, f"{name} has moved on: revision 0, you saw 5"),
        ):
            ran = await op.cli(*words)
            assert ran.code == code, ran
            assert ran.error.startswith(f"error: {words[0]} refused: {text}")
        await op.do(SwapOut(request=name))
        ran = await op.cli("swap-out", name)
        assert ran.code == 6
        assert f"{name} is held already (swap-out by op)" in ran.error
        await op.do(Resume())
        await op.do(Release(request=name))
        assert await op.tokens(name) == expected[0]
        await op.idle()


async def test_no_room_on_the_host(engine: Served) -> None:
    async with engine.operator() as op:
        prompts = reference.prompts(3, 100, low=400, high=400, seed=12)
        names = await op.halfway(prompts, 1, max_tokens=STEPS)
        for name in names[:2]:
            await op.do(SwapOut(request=name))
        held = await op.request(names[1], lambda request: request.state == "held", "is held")
        last = await op.request(names[2], lambda request: True, "is there")
        used = op.picture.stages[0].swap_blocks.used
        assert used is not None
        assert held.swap_blocks < used <= HOST_BLOCKS
        ran = await op.cli("swap-out", last.id)
        assert ran.code == 8
        text = f"{last.id} needs {last.blocks} host blocks, {HOST_BLOCKS - used} of {HOST_BLOCKS} are free"
        assert ran.error == f"error: swap-out refused: {text}; recompute fits (DOES_NOT_FIT)"
        await op.do(Preempt(request=last.id, mode="recompute"))
        for name in names:
            await op.do(Abort(request=name))
        await op.idle()
        await op.do(Resume())


async def test_no_place_to_swap_in(engine: Served) -> None:
    async with engine.operator() as op:
        (name,) = await op.halfway(PROMPTS[:1], max_tokens=STEPS)
        await op.do(SwapOut(request=name))
        async with op.crowd(PROMPTS[1:2] * SLOTS, max_tokens=STEPS) as names:
            await op.until(lambda picture: picture.queues.running == SLOTS, "all places are taken")
            text = await op.refused(SwapIn(request=name), "DOES_NOT_FIT")
            assert text == f"max_num_seqs is {SLOTS} and as many run; release lets it wait"
        await op.abort(name, *names)
        await op.idle()
