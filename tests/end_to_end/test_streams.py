"""Output as it comes: by offset, past a killed console, past pause and drain, and every way to end it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from operators import CATCHES
from ppengine.common.config import load_profile
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Drain, Pause, Preempt, Resume, Submit, SwapOut
from serving import Served

pytestmark = pytest.mark.long
PROMPT = "Once upon a time"
STEPS, LONG, LENGTH, SLOTS = 60, 120, 256, 4
GREEDY = ("--temperature", "0", "--ignore-eos", "--max-tokens", str(STEPS))


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    settings = [
        "threads_per_stage=1", "model.dtype=float64", f"model.max_model_len={LENGTH}", "memory.device_mib=128",
        f"scheduler.max_num_seqs={SLOTS}", "console.publish_hz=50",
    ]  # fmt: skip
    with Served(load_profile("tiny", settings)) as served:
        yield served


@pytest.fixture(scope="module")
def written(engine: Served) -> tuple[list[int], str]:
    """Tokens and text of the prompt, greedy and undisturbed."""

    async def run() -> tuple[list[int], str]:
        async with engine.operator() as op:
            tokens, text, reason = await op.output(await op.submit(PROMPT, max_tokens=STEPS))
            assert reason == "length"
            return tokens, text

    tokens, text = asyncio.run(run())
    assert len(tokens) == STEPS
    assert len(text.split()) > 10, "words"
    return tokens, text


# --- reading ------------------------------------------------------------------------------------------------


def lines_of(out: str) -> tuple[str, list[int], str | None]:
    """Return text, tokens and finish reason of the lines of `submit --json`."""
    parts = [line for line in map(json.loads, out.splitlines()) if "token_ids" in line]
    reasons = [part["finish_reason"] for part in parts if "finish_reason" in part]
    tokens = [token for part in parts for token in part["token_ids"]]
    return "".join(part["text"] for part in parts), tokens, reasons[-1] if reasons else None


def test_submit_streams(engine: Served, written: tuple[list[int], str]) -> None:
    tokens, text = written
    ran = engine.cli("submit", PROMPT, *GREEDY)
    assert (ran.code, ran.out) == (0, text + "\n")
    ran = engine.cli("submit", PROMPT, *GREEDY, "--json")
    assert list(json.loads(ran.out.splitlines()[0])) == ["id"]
    assert lines_of(ran.out) == (text, tokens, "length")


async def test_fetch_from_any_offset(engine: Served, written: tuple[list[int], str]) -> None:
    tokens, text = written
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=STEPS)
        await op.output(name)
        for offset in (0, 1, STEPS // 2, STEPS):
            part = await op.link.fetch(name, offset=offset, text_offset=7)
            assert (part.token_ids, part.text, part.finished) == (tokens[offset:], text[7:], True)


async def test_killed_console_loses_nothing(engine: Served, written: tuple[list[int], str]) -> None:
    tokens, text = written
    async with engine.operator() as op:
        for _ in range(CATCHES):
            console = engine.start_cli("submit", PROMPT, *GREEDY, "--json")
            assert console.stdout is not None
            name = json.loads(await asyncio.to_thread(console.stdout.readline))["id"]
            await op.written(name, 3)
            with engine.stopped("stage1"):
                console.kill()
                ran = await op.end_of(console)
                # Behind its end: tokens may have been on their way when the stage was stopped.
                written_so_far = len((await op.detail(name)).output_token_ids)
            if written_so_far < STEPS:  # else it was through before it could be held
                break
            await op.output(name)
        assert written_so_far < STEPS
        assert ran.code == -9
        assert len(lines_of(ran.out)[1]) <= written_so_far
        follower = await op.cli("follow", name, "--json")
        assert lines_of(follower.out) == (text, tokens, "length")
        assert (await op.cli("follow", name)).out == text + "\n", "as often as one likes"
        assert (await op.output(name))[0] == tokens


# --- pause and drain ----------------------------------------------------------------------------------------


async def test_pause_keep_and_resume(engine: Served, written: tuple[list[int], str]) -> None:
    async with engine.operator() as op:
        async with op.frozen(PROMPT, max_tokens=LONG) as name:
            ran = await op.cli("pause", "--mode", "keep", "--json")
            assert (ran.code, ran.json["state"]) == (0, "applied")
        await op.quiet()
        part = await op.link.fetch(name, wait_ms=0)
        assert not part.finished
        later = await op.link.fetch(name, offset=len(part.token_ids), text_offset=len(part.text), wait_ms=200)
        assert (later.token_ids, later.text) == ([], ""), "nothing is written while it is paused"
        assert (await op.cli("resume")).code == 0
        assert (await op.output(name))[0][:STEPS] == written[0]


async def test_pause_wait_finishes_what_runs(engine: Served, written: tuple[list[int], str]) -> None:
    async with engine.operator() as op:
        async with op.crowd([PROMPT] * (SLOTS + 2), max_tokens=STEPS) as names:
            await op.until(lambda picture: picture.queues.running == SLOTS, "all places are taken")
            begun = await op.begin(Pause(mode="wait"))
        end = await begun.applied()
        assert end.text == "paused: nothing runs"
        for name in names[:SLOTS]:
            part = await op.link.fetch(name)
            assert part.finished
            assert part.token_ids == written[0]
        picture = await op.until(lambda picture: picture.requests_total == picture.queues.waiting == 2, "two wait")
        assert picture.engine.state == "paused"
        assert picture.requests[0].why is not None
        assert picture.requests[0].why.code == "paused"
        await op.do(Resume())
        for name in names[SLOTS:]:
            assert (await op.output(name))[0] == written[0]


async def test_resume_supersedes_a_pause_that_waits(engine: Served) -> None:
    async with engine.operator() as op:
        async with op.crowd([PROMPT] * SLOTS, max_tokens=STEPS) as names:
            await op.until(lambda picture: picture.queues.running == SLOTS, "all places are taken")
            waits = await op.begin(Pause(mode="wait"))
            await op.do(Resume())
            end = await waits.superseded()
        assert end.text == "resumed by op"
        for name in names:
            assert (await op.output(name))[2] == "length"


async def test_drain_and_undo(engine: Served, written: tuple[list[int], str]) -> None:
    async with engine.operator() as op:
        async with op.crowd([PROMPT] * (SLOTS + 2), max_tokens=STEPS) as names:
            drain = await op.begin(Drain())
            await op.until(lambda picture: picture.engine.state == "draining", "it drains")
            ran = await op.cli("submit", "x")
            assert ran.code == 1
            assert "the engine is draining and takes no new requests; drain --undo ends that" in ran.error
            assert (await op.cli("drain", "--undo")).code == 0
            await drain.superseded()
        names.append(await op.submit(PROMPT, max_tokens=STEPS))
        end = await op.do(Drain())
        assert end.text == "drained: no request left"
        for name in names:
            part = await op.link.fetch(name)
            assert part.finished
            assert part.token_ids == written[0]
        await op.do(Drain(undo=True))
        assert (await op.output(await op.submit(PROMPT, max_tokens=STEPS)))[0] == written[0]


# --- ends and choices ---------------------------------------------------------------------------------------


async def test_stop_texts(engine: Served, written: tuple[list[int], str]) -> None:
    _, text = written
    words = text.split()
    stop = f"{words[5]} {words[6]}"
    cut = text[: text.index(stop)]
    async with engine.operator() as op:
        tokens, short, reason = await op.output(await op.submit(PROMPT, max_tokens=STEPS, stop=["never so", stop]))
        assert (short, reason) == (cut, "stop")
        assert len(tokens) < STEPS
        # With min_tokens the first one does not count; text that was not cut stays.
        name = await op.submit(PROMPT, max_tokens=STEPS, stop=[stop], min_tokens=len(tokens) + 5)
        more, longer, _ = await op.output(name)
        assert len(more) >= len(tokens) + 5
        assert longer.startswith(cut + stop)
        await op.idle()
    ran = engine.cli("submit", PROMPT, *GREEDY, "--stop", stop)
    assert (ran.code, ran.out) == (0, cut + "\n")


async def test_stop_tokens(engine: Served, written: tuple[list[int], str]) -> None:
    tokens, _ = written
    stop = tokens[10]
    first = tokens.index(stop)
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=STEPS, stop_token_ids=[stop])
        assert (await op.output(name))[::2] == (tokens[: first + 1], "stop")
        name = await op.submit(PROMPT, max_tokens=STEPS, stop_token_ids=[stop], min_tokens=first + 2)
        assert len((await op.output(name))[0]) >= first + 2
        await op.idle()


async def test_as_long_as_the_model_allows(engine: Served, written: tuple[list[int], str]) -> None:
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=None)
        tokens, _, reason = await op.output(name)
        part = await op.link.fetch(name)
        assert (part.prompt_tokens + len(tokens), reason) == (LENGTH, "length")
        assert tokens[:STEPS] == written[0]


async def test_logprobs(engine: Served) -> None:
    async with engine.operator() as op:
        name = await op.submit(PROMPT, max_tokens=10, logprobs=3)
        tokens, *_ = await op.output(name)
        part = await op.link.fetch(name)
        assert len(part.logprobs) == len(tokens)
        for token, entry in zip(tokens, part.logprobs, strict=True):
            assert len(entry.top) == 3
            assert entry.top[0] == (token, entry.chosen), "greedy takes the best one"
            values = [value for _, value in entry.top]
            assert values == sorted(values, reverse=True)
            assert values[0] <= 0.0
        assert (await op.link.fetch(name, offset=4)).logprobs == part.logprobs[4:]


@pytest.mark.parametrize("verb", [None, Preempt(request="", mode="recompute"), SwapOut(request="", hold=False)])
async def test_same_seed_same_tokens(engine: Served, verb: Preempt | SwapOut | None) -> None:
    sampling = {"temperature": 1.0, "seed": 1234, "n": 2, "max_tokens": 120}
    async with engine.operator() as op:
        first = await op.submit(PROMPT, **sampling)
        expected = [await op.tokens(first, sample) for sample in range(2)]
        assert expected[0] != expected[1], "samples draw by themselves"
        if verb is None:
            again = await op.submit(PROMPT, **sampling)
        else:
            async with op.frozen(PROMPT, **sampling) as again:
                verb.request = again
                begun = await op.begin(verb)
            await begun.applied()
        assert [await op.tokens(again, sample) for sample in range(2)] == expected
        other = await op.submit(PROMPT, **{**sampling, "seed": 1235})
        assert await op.tokens(other) != expected[0]
        await op.idle()


async def test_detached_request_is_picked_up(engine: Served, written: tuple[list[int], str]) -> None:
    ran = engine.cli("submit", PROMPT, *GREEDY, "--detach")
    assert ran.code == 0
    assert engine.cli("follow", ran.out.strip()).out == written[1] + "\n"


async def test_submit_names_its_request(engine: Served) -> None:
    async with engine.operator() as op:
        sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        end = await op.do(Submit(prompt=PROMPT, sampling=sampling, request="mine"))
        assert end.request == "mine"
        assert len(await op.tokens("mine")) == 3
