"""The state of the engine as probes of an HTTP process see it."""

from __future__ import annotations

import asyncio
import time

import pytest
from ppengine.http import engine_state
from ppengine.http.engine_state import EngineState
from ppengine.protocol.offline import StateAnswer


class Core:
    """Answers with its state; `answers` is cleared while it is busy."""

    def __init__(self) -> None:
        self.state, self.asked = "serving", 0
        self.answers = asyncio.Event()
        self.answers.set()

    async def ask(self, wait_ms: int) -> StateAnswer:
        self.asked += 1
        await self.answers.wait()
        until = time.monotonic() + wait_ms / 1e3
        while self.state == "loading" and time.monotonic() < until:
            await asyncio.sleep(0.001)
        return StateAnswer(nonce=0, state=self.state, message="", max_model_len=9, num_blocks=9)


async def test_the_end_of_loading_is_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor announces it, and the first requests come."""
    monkeypatch.setattr(engine_state, "STATE_S", 60.0)
    monkeypatch.setattr(engine_state, "WAIT_MS", 20)
    core = Core()
    core.state = "loading"
    state = EngineState(core.ask, lambda newest: None)
    watching = asyncio.create_task(state.watch())
    async with asyncio.timeout(20):
        while core.asked < 3:  # It takes longer than a question may wait.
            await asyncio.sleep(0.005)
        core.state = "serving"
        while not state.served:
            await asyncio.sleep(0.005)
    watching.cancel()


async def test_a_probe_sees_a_loss_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_state, "STATE_S", 60.0)
    monkeypatch.setattr(engine_state, "FRESH_S", 0.0)
    core = Core()
    state = EngineState(core.ask, lambda newest: None)
    watching = asyncio.create_task(state.watch())
    await asyncio.sleep(0)
    assert state.newest is not None and state.newest.state == "serving" and not state.silent
    core.state = "degraded"
    await state.look()
    assert state.newest.state == "degraded"
    watching.cancel()


async def test_probes_share_a_question_and_wait_for_a_busy_core_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_state, "LOOK_S", 0.05)
    monkeypatch.setattr(engine_state, "FRESH_S", 60.0)
    core = Core()
    state = EngineState(core.ask, lambda newest: None)
    core.answers.clear()
    await asyncio.gather(*(state.look() for _ in range(9)))
    assert (core.asked, state.newest) == (1, None)
    monkeypatch.setattr(engine_state, "LOOK_S", 60.0)
    looks = [asyncio.create_task(state.look()) for _ in range(9)]
    await asyncio.sleep(0)
    core.answers.set()
    await asyncio.gather(*looks)
    assert core.asked == 1 and state.newest is not None
    await asyncio.gather(*(state.look() for _ in range(9)))
    assert core.asked == 1, "the state is new"


async def test_a_request_waits_for_a_state_that_others_have_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is reported as serving once it is open, and its process may be late."""
    monkeypatch.setattr(engine_state, "LOOK_S", 0.0)
    monkeypatch.setattr(engine_state, "FRESH_S", 0.0)
    core = Core()
    state = EngineState(core.ask, lambda newest: None)
    core.answers.clear()
    core.state = "loading"
    request = asyncio.create_task(state.confirm())
    await asyncio.sleep(0.05)
    assert not request.done(), "there is no state yet"
    core.answers.set()
    await asyncio.wait_for(request, 20)
    assert state.newest is not None and state.newest.state == "loading"
    monkeypatch.setattr(engine_state, "LOOK_S", 20.0)
    core.state = "serving"
    await state.confirm()
    assert state.newest.state == "serving" and core.asked == 2
    await state.confirm()
    assert core.asked == 2, "an engine that serves is not asked for each request"


async def test_a_core_is_silent_for_the_time_in_which_this_process_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_state, "STATE_S", 0.01)
    monkeypatch.setattr(engine_state, "TICK_S", 0.02)
    monkeypatch.setattr(engine_state, "SILENT_S", 0.2)
    core = Core()
    state = EngineState(core.ask, lambda newest: None)
    assert state.silent, "it has never answered"
    watching = asyncio.create_task(state.watch())
    await asyncio.sleep(0.05)
    time.sleep(0.5)  # as if a signal had stopped this process
    assert not state.silent
    core.answers.clear()
    async with asyncio.timeout(60):
        while not state.silent:
            await asyncio.sleep(0.02)
        core.answers.set()
        while state.silent:
            await asyncio.sleep(0.02)
    watching.cancel()
