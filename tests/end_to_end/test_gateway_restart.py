"""A gateway that is killed, three times under load: streams, commands, events and the audit log go on."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from engines import wait_until
from operators import Operator
from ppconsole.link.engine_link import EngineLink
from ppengine.gateway.audit import ENDS
from ppengine.protocol.control import Outcome
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Pause, Resume, Submit
from serving import LASTING_S, Served, audited
from streaming import stream

from profiles import small

STREAMS, STEPS, KILLS = 12, 300, 3
PROMPTS = reference.prompts(5, 100, low=20, high=60, seed=7)
BACK_S = 2.0
SLACK = 5.0
"""Other tests share the machine: the figure that is printed is the one to look at."""


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "gateway", "opt", dtype="float64", layers=4, max_position_embeddings=2048)


def serve(folder: Path) -> Served:
    return Served(small(folder, stages=2, model={"max_model_len": 2048}), step_s=LASTING_S)


@pytest.fixture
def busy(folder: Path) -> Iterator[Served]:
    """An engine for the most kills that one survives."""
    with serve(folder) as served:
        yield served


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    """An engine whose tests end its gateway once each, and the last one as often as it takes to end the engine."""
    with serve(folder) as served:
        yield served


async def kill(op: Operator) -> float:
    """Kill the gateway; return the seconds until a console has a new snapshot of the core."""
    began, gone = time.monotonic(), op.engine.pids["gateway"]
    os.kill(gone, signal.SIGKILL)
    await op.until(lambda picture: picture.engine.state in ("serving", "paused"), "a snapshot of the next one")
    took = time.monotonic() - began
    op.engine.find_pids()
    assert op.engine.pids["gateway"] != gone
    return took


def without_gap(op: Operator) -> None:
    numbers = [event.seq for event in op.events]
    first = min(numbers, default=0)
    assert numbers == list(range(first, first + len(numbers)))
    assert not any(event.kind == "link.gap" for event in op.events)


async def test_three_kills_under_streams_lose_nothing(busy: Served, expected: list[list[int]]) -> None:
    engine = busy
    async with engine.operator() as op:
        before = dict(engine.pids)
        tasks = [
            asyncio.create_task(stream(lambda: engine.record, PROMPTS[number % 5], STEPS)) for number in range(STREAMS)
        ]
        took = []
        for number in range(KILLS):
            # The first kill meets streams that are still being submitted.
            await asyncio.sleep(0.1 + number)
            took.append(await kill(op))
        assert await asyncio.gather(*tasks) == [expected[number % 5] for number in range(STREAMS)]
        await op.until(lambda picture: picture.engine.state == "serving", "a last picture")
        ended = Counter(event.request for event in op.events if event.kind == "request.finished")
        assert set(ended.values()) == {1} and len(ended) == STREAMS
        without_gap(op)
        pids = {**engine.pids, "gateway": 0}
        assert pids == {**before, "gateway": 0}
        ends = [event.text for event in op.events if event.kind == "gateway.ended"]
        assert len(ends) == KILLS and all("killed by SIGKILL; it is restarted" in text for text in ends)
        assert not [event.text for event in op.events if event.kind == "verdict.raised"]
        outcomes = audited(engine)
        assert len(outcomes) == STREAMS
        for lines in outcomes.values():
            assert lines[0] == "received" and sum(line in ENDS for line in lines) == 1, lines
        print(f"\nserving again after {', '.join(f'{seconds:.2f}' for seconds in took)} s")
        assert max(took) < BACK_S * SLACK


async def test_an_open_operation_and_an_open_incident_go_on(engine: Served) -> None:
    async with engine.operator() as op:
        (name,) = await op.submit_all([PROMPTS[0]], max_tokens=2000)
        await op.written(name, 4)
        with engine.stopped("stage1"):
            waiting = asyncio.create_task(op.link.command(Pause(mode="wait"), timeout=60))
            await op.until(lambda picture: picture.incident is not None, "it is an incident")
            begun = (await op.now()).incident
            await kill(op)
            await op.until(
                lambda picture: any(one.cause == "stopped" for one in picture.verdicts), "it is judged again"
            )
            assert (await op.now()).incident == begun is not None and begun.over_wall is None
            await op.do(Resume())
            end = await waiting
            assert isinstance(end, Outcome) and end.state == "superseded"
        over = await op.until(lambda picture: picture.incident.over_wall is not None, "it is over")
        assert over.incident.number == begun.number == 1
        without_gap(op)
        assert all(sum(line in ENDS for line in lines) == 1 for lines in audited(engine).values())
        await op.abort(name)
        await op.idle()


async def test_requests_end_with_a_console_that_does_not_come_back(engine: Served) -> None:
    async with engine.operator() as op, engine.operator("stays") as stays:
        gone = EngineLink(engine.record, find=lambda: engine.record, user="gone")
        await gone.start(lambda update: None)
        await gone.attached(60)
        verb = Submit(
            prompt_token_ids=PROMPTS[0], abort_on_detach=True,
            sampling=SamplingParams(max_tokens=1900, ignore_eos=True),
        )  # fmt: skip
        lost, kept = await gone.command(verb, timeout=60), await stays.link.command(verb, timeout=60)
        assert isinstance(lost, Outcome) and isinstance(kept, Outcome)
        await op.do(Pause(mode="keep"))
        os.kill(engine.pids["gateway"], signal.SIGKILL)
        session = gone._session
        assert session is not None and gone._runner is not None
        gone._runner.cancel()
        await asyncio.gather(gone._runner, return_exceptions=True)
        await op.until(lambda picture: [one.id for one in picture.requests] == [kept.request], "one is aborted", 30)
        await asyncio.sleep(3.0)
        assert [one.id for one in (await op.now()).requests] == [kept.request]
        engine.find_pids()
        await op.do(Resume())
        await op.abort(kept.request or "")


async def test_a_gateway_without_descriptors_is_replaced_or_goes_on(engine: Served) -> None:
    async with engine.operator() as op:
        pid = engine.pids["gateway"]
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        assert soft == hard, "the gateway takes as many as it may"
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 4, hard))
        crowd = []
        for _ in range(40):
            crowd.append(socket.socket(socket.AF_UNIX))
            crowd[-1].setblocking(False)
            try:
                crowd[-1].connect(engine.record.control_endpoint.removeprefix("ipc://"))
            except OSError:
                break
        await asyncio.sleep(1.0)
        for one in crowd:
            one.close()
        await op.until(lambda picture: picture.engine.state == "serving", "it serves")
        engine.find_pids()
        without_gap(op)
        print("\nreplaced" if engine.pids["gateway"] != pid else "\nthe same gateway goes on")


def test_five_ends_in_ten_minutes_end_the_engine(engine: Served) -> None:
    """The last test of this engine; it counts the ends of the others."""

    def restarts() -> int:
        return len(re.findall("gateway ended: .*; it is restarted", engine.engine.errors.read_text()))

    def kill_gateway() -> int:
        engine.find_pids()  # The test before this one may have ended a gateway, too.
        done = restarts()
        os.kill(engine.pids["gateway"], signal.SIGKILL)
        return done

    while (done := kill_gateway()) < 4:
        wait_until(lambda done=done: restarts() > done, "the next one")
    engine.ended(1, "gateway ended: killed by SIGKILL, and it is the end number 5 in 10 minutes")
