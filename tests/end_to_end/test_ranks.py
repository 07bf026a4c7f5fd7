"""Two stages of two ranks: a rank that dies, stops or is late is named as that rank, and no request is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
from checkpoints import make_checkpoint
from operators import Operator
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Snapshot, Verdict
from ppengine.protocol.verbs import Continue, Cordon, RestartStage
from serving import Served, process_state

from profiles import small

pytestmark = pytest.mark.long
STOPPED_S, KILLED_S = 2.0, 1.0
STEPS = 90
PROMPTS = reference.prompts(2, 100, low=20, high=40, seed=17)
PLACES = [Place(0, 1), Place(1, 0)]


@pytest.fixture(scope="module")
def folder(checkpoint_root: Path) -> Path:
    return make_checkpoint(checkpoint_root / "ranks", "opt", dtype="float64", layers=2, max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Served]:
    with Served(small(folder, model={"max_model_len": 512}, parallel={"tensor": 2})) as served:
        yield served


def role(place: Place) -> str:
    """Return the place as the test's engine calls its process."""
    return f"stage{place.stage}.{place.rank}" if place.rank else f"stage{place.stage}"


def roots(picture: Snapshot) -> list[Verdict]:
    return [verdict for verdict in picture.verdicts if verdict.root]


def named(place: Place, cause: str) -> Callable[[Snapshot], bool]:
    """Return whether a picture names that place and no other."""
    return lambda picture: [(each.stage, each.rank, each.cause) for each in roots(picture)] == [(*place, cause)]


async def judged(op: Operator, place: Place, cause: str, since: float) -> float:
    """Wait for the verdict; return the engine's seconds until it published it, without its waits for a CPU."""
    before = op.engine.queued()
    picture = await op.until(lambda seen: bool(roots(seen)), f"{place} is {cause}", core=False)
    assert named(place, cause)(picture), picture.verdicts
    took, queued = picture.sampled_at - since, op.engine.queued() - before
    print(f"{place} is {cause}: named after {took:.2f} s, with {queued:.2f} s in queues for a CPU")
    return took - queued


async def begun(op: Operator) -> list[str]:
    """Return requests that are written under way."""
    names = await op.submit_all(PROMPTS, max_tokens=STEPS)
    for name in names:
        await op.written(name, 4)
    return names


async def over(op: Operator) -> Snapshot:
    return await op.until(lambda seen: seen.engine.state == "serving" and not seen.verdicts, "nothing is wrong", 60)


@pytest.mark.parametrize("place", PLACES, ids=role)
async def test_a_stopped_rank_is_named_and_not_those_that_wait_for_it(
    engine: Served, expected: list[list[int]], place: Place
) -> None:
    async with engine.operator() as op:
        await over(op)
        names = await begun(op)
        with engine.stopped(role(place)) as since:
            assert await judged(op, place, "stopped", since) < STOPPED_S
            verdict = roots(op.picture)[0]
            pid = engine.pids[role(place)]
            text = f"stage {place.stage} rank {place.rank}"
            assert verdict.summary.startswith(f"{text} is stopped by a signal (pid {pid}, state T)")
            assert f"ppconsole continue {place.stage} " in verdict.suggest
            seen = await op.until(lambda seen: len(seen.verdicts) > 1, "those that wait are named too", core=False)
            assert named(place, "stopped")(seen)
            assert all(each.cause in ("starved", "blocked") and text in each.summary for each in seen.verdicts[1:])
            states = {(stage.index, stage.tensor_rank): stage.state for stage in seen.stages}
            assert len(states) == 4 and states[place] == "stopped"
            done = await op.do(Continue(stage=place.stage))
            assert done.text == f"sent SIGCONT to {text} (pid {pid})" and process_state(pid) != "T"
        assert await op.all_tokens(names) == expected
        await over(op)


@pytest.mark.parametrize("place", PLACES, ids=role)
async def test_a_killed_rank_is_named_and_no_request_is_lost(
    engine: Served, expected: list[list[int]], place: Place
) -> None:
    async with engine.operator() as op:
        await over(op)
        names = await begun(op)
        since = time.time()
        os.kill(engine.pids[role(place)], signal.SIGKILL)
        assert await judged(op, place, "dead", since) < KILLED_S
        assert roots(op.picture)[0].summary == f"stage {place.stage} rank {place.rank} was killed by SIGKILL"
        others = [seen for seen in await _until_over(op) if roots(seen) and not named(place, "dead")(seen)]
        assert others == [], "one fault and no cascade"
        assert await op.all_tokens(names) == expected
        engine.find_pids()


async def _until_over(op: Operator) -> list[Snapshot]:
    """Return the pictures until nothing is wrong."""
    seen: list[Snapshot] = []
    await op.until(
        lambda now: seen.append(now) or (now.engine.state == "serving" and not now.verdicts), "it serves again", 60,
        core=False,
    )  # fmt: skip
    return seen


async def test_a_stage_is_restarted_with_its_ranks_and_cordoned(engine: Served, expected: list[list[int]]) -> None:
    async with engine.operator() as op:
        await over(op)
        engine.find_pids()
        names, before = await begun(op), dict(engine.pids)
        await (await op.begin(RestartStage(stage=1))).applied()
        assert await op.all_tokens(names) == expected
        picture = await over(op)
        engine.find_pids()
        assert {name for name in before if engine.pids[name] != before[name]} == {"stage1", "stage1.1"}
        shown = {(stage.index, stage.tensor_rank): stage.pid for stage in picture.stages}
        assert shown == {place: engine.pids[role(Place(*place))] for place in shown}
        await op.do(Cordon(stage=1))
        seen = await op.until(lambda now: all(each.cordon for each in now.stages[2:]), "all its ranks are cordoned")
        assert [each.cordon for each in seen.stages[:2]] == [None, None]
        await op.do(Cordon(stage=1, undo=True))
        seen = await op.until(lambda now: not any(each.cordon for each in now.stages), "no more")
        assert all(each.rank_wait is not None for each in seen.stages)
