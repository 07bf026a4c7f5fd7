"""Long turns of the core: how long they held it, what it did, and the line of code."""

from __future__ import annotations

from typing import Any

import pytest
from ppengine.core import turn_watch
from ppengine.core.turn_watch import TurnWatch

SECOND = 1_000_000_000


class World:
    """A watch whose clock and processor times the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran, self.waited = 100.0, 0, 0
        monkeypatch.setattr(turn_watch, "_read_times", lambda _: (self.ran, self.waited))
        self.watch = TurnWatch(lambda: self.now)

    def go(self, seconds: float, *, ran: float = 0.0, waited: float = 0.0, look_s: float = 0.1) -> None:
        """Go on in looks; `ran` and `waited` are shares of the time."""
        for _ in range(round(seconds / look_s)):
            self.now += look_s
            self.ran += int(ran * look_s * SECOND)
            self.waited += int(waited * look_s * SECOND)
            self.watch.look()

    def turn(self, seconds: float, **how: float) -> None:
        self.watch.begin()
        self.go(seconds, **how)
        self.watch.end()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_short_turns_and_none_at_all_are_nothing(world: World) -> None:
    for _ in range(100):
        world.turn(0.05, look_s=0.05)
    world.go(3.0)
    assert world.watch.figures() is None


def test_turns_that_wait_have_their_seconds_and_their_line(world: World) -> None:
    for _ in range(4):
        world.turn(0.5)
        world.go(0.1)
    held = world.watch.figures()
    assert held is not None
    assert (held.turns, held.ran_s) == (4, 0.0)
    assert held.held_s == pytest.approx(2.0) and held.longest_s == pytest.approx(0.5)
    assert any(frame.startswith("turn engine/test_turn_watch.py:") for frame in held.frames)
    assert held.frames[0].startswith("look ppengine/core/turn_watch.py:"), "newest first, from the package on"


def test_turns_that_compute_say_so(world: World) -> None:
    world.turn(1.0, ran=0.9)
    held: Any = world.watch.figures()
    assert held.held_s == pytest.approx(1.0)
    assert 0.7 < held.ran_s < 0.91, "a look or two may be before the turn is long"


def test_a_core_without_a_processor_is_not_held(world: World) -> None:
    world.turn(2.0, waited=1.0)
    held: Any = world.watch.figures()
    assert held.held_s == pytest.approx(0.0, abs=0.11), "up to one look is not known"


def test_a_stop_in_a_turn_is_no_hold(world: World) -> None:
    world.turn(5.0, look_s=5.0)
    held: Any = world.watch.figures()
    assert held.held_s == 0.0


def test_a_turn_that_keeps_the_gil_counts_for_what_it_computed(world: World) -> None:
    world.turn(3.0, ran=1.0, look_s=3.0)
    held: Any = world.watch.figures()
    assert held.held_s == pytest.approx(3.0) == held.ran_s


def test_the_end_of_a_turn_counts_without_a_look(world: World) -> None:
    world.watch.begin()
    world.now += 0.19
    world.watch.end()
    held: Any = world.watch.figures()
    assert held.held_s == pytest.approx(0.19) and held.frames == []


def test_old_turns_are_forgotten(world: World) -> None:
    world.turn(1.0)
    world.go(turn_watch.WINDOW_S + 0.2)
    assert world.watch.figures() is None


def test_the_thread_sees_the_line_of_a_real_turn() -> None:
    watch = TurnWatch()
    watch.start()
    watch.begin()
    try:
        while not ((held := watch.figures()) and held.frames):
            watch._closed.wait(0.01)
    finally:
        watch.end()
        watch.close()
    assert any("test_the_thread_sees_the_line_of_a_real_turn" in frame for frame in held.frames)
