"""A grow is planned with the memory that is free now: its refusals, and what is not known."""

from __future__ import annotations

import pytest
from core_world import BLOCK, CoreWorld
from ppengine.protocol.control import Refused
from ppengine.protocol.gpu import DeviceRoom, DeviceRooms, GpuProcess
from ppengine.protocol.verbs import SetMemory

OWN_CARDS = {0: "GPU-a", 1: "GPU-b"}
NEIGHBOUR = GpuProcess(pid=4242, name="python3 train.py", bytes=60 * 2**30)
GROW, SHRINK = 0.8, 0.3
MORE = 300 * BLOCK
"""Bytes of each stage by which `GROW` grows it, from 400 to 700 blocks."""


def room(device: str, free: int, age_ms: float = 500.0, holders: list[GpuProcess] | None = None) -> DeviceRoom:
    return DeviceRoom(device=device, free=free, age_ms=age_ms, holders=holders)


def served(*rooms: DeviceRoom, cards: dict[int, str] | None = None) -> CoreWorld:
    """Return a core that has served for some seconds, and knows the room of devices."""
    world = CoreWorld(cards=cards)
    world.now += 10
    world.engine.rooms.take(DeviceRooms(rooms=list(rooms)))
    return world


def answers(world: CoreWorld, utilization: float = GROW) -> str:
    """Return the text of the dry run's refusal, or its plan; the verb itself must be refused or begun alike."""
    (planned,) = world.say(SetMemory(utilization=utilization), dry_run=True)
    first, *_ = world.say(SetMemory(utilization=utilization))
    if isinstance(planned, Refused):
        assert planned.code == "DOES_NOT_FIT" and isinstance(first, Refused) and first.text == planned.text
        assert world.memory.revision == 0 and not world.steps
        return planned.text
    assert type(first).__name__ == "Accepted"
    return "\n".join(planned.plan)


def test_a_grow_that_another_process_leaves_no_room_for_names_it():
    world = served(room("GPU-a", MORE), room("GPU-b", MORE - 1, holders=[NEIGHBOUR]), cards=OWN_CARDS)
    assert answers(world) == (
        "stage 1 needs 2.9 KiB more for 700 blocks, its card has 2.9 KiB free, python3 train.py (pid 4242) holds "
        "60.0 GiB; at most 0.79 would fit"
    )
    world = served(room("GPU-a", MORE), room("GPU-b", MORE, holders=[NEIGHBOUR]), cards=OWN_CARDS)
    assert "stage 0: 2.9 KiB more; its card has 2.9 KiB free" in answers(world)
    world.run()
    assert world.memory.mapped_blocks == 700


def test_the_refused_utilization_that_would_fit_does():
    world = served(room("GPU-a", 1234), room("GPU-b", 10**6), cards=OWN_CARDS)
    assert answers(world).endswith("; at most 0.62 would fit")
    assert "stage 0: 1.2 KiB more; its card has 1.2 KiB free" in answers(world, 0.62)


def test_stages_that_share_a_card_need_their_sum():
    shared = {0: "GPU-a", 1: "GPU-a"}
    world = served(room("GPU-a", 2 * MORE - 1, holders=[]), cards=shared)
    assert answers(world) == (
        "stages 0 and 1 need 5.9 KiB more for 700 blocks, their card has 5.9 KiB free, no other process is known to "
        "hold any; at most 0.79 would fit"
    )
    assert "their card has 5.9 KiB free" in answers(served(room("GPU-a", 2 * MORE), cards=shared))


def test_stages_on_a_cpu_have_what_their_host_can_still_give():
    world = served(room("h", 1000))
    assert answers(world) == (
        "stages 0 and 1 need 5.9 KiB more for 700 blocks, their host has 1.0 KiB free; at most 0.55 would fit"
    )
    assert "their host has 9.8 KiB free" in answers(served(room("h", 10_000)))


def test_holders_that_are_not_known_and_those_that_are_too_many_to_name():
    world = served(room("GPU-a", 10), room("GPU-b", MORE), cards=OWN_CARDS)
    assert ", who holds the rest is not known; at most 0.5 would fit" in answers(world)
    many = [GpuProcess(pid=pid, name="p", bytes=pid * 2**30) for pid in (9, 8, 7, 6, 5)]
    text = answers(served(room("GPU-a", 10, holders=many), room("GPU-b", MORE), cards=OWN_CARDS))
    assert "p (pid 9) holds 9.0 GiB, p (pid 8) holds 8.0 GiB, p (pid 7) holds 7.0 GiB, 2 others hold 11.0 GiB" in text
    hidden = GpuProcess(pid=77, bytes=2**30)
    text = answers(served(room("GPU-a", 10, holders=[hidden]), room("GPU-b", MORE), cards=OWN_CARDS))
    assert "a process that is not visible here (pid 77) holds 1.0 GiB" in text


@pytest.mark.parametrize(
    ("rooms", "doubt"),
    [
        ([], "free memory of stage 0 is not known (no figures)"),
        ([room("GPU-a", MORE)], "free memory of stage 1 is not known (no figures)"),
        ([room("GPU-a", MORE), room("GPU-b", 0, 3100.0)], "of stage 1 is not known (its figures are 3.1 s old)"),
    ],
)
def test_room_that_is_not_known_refuses_nothing_and_the_plan_says_so(rooms, doubt):
    assert f"{doubt}: planned without it" in answers(served(*rooms, cards=OWN_CARDS))


def test_room_grows_old_in_the_core():
    world = served(room("GPU-a", 0), room("GPU-b", 0), cards=OWN_CARDS)
    world.now += 2.4
    assert "at most 0.5 would fit" in answers(world)
    world.now += 0.2
    assert "its figures are 3.1 s old" in answers(world)


def test_room_that_was_read_before_the_last_change_is_not_known():
    world = served(room("GPU-a", MORE), room("GPU-b", MORE), cards=OWN_CARDS)
    world.set_memory(SHRINK)
    world.run()
    assert world.memory.mapped_blocks == 200
    (planned,) = world.say(SetMemory(utilization=GROW), dry_run=True)
    assert "stage 0 is not known (its figures are older than the last change): planned without it" in planned.plan[1]
    world.now += 1
    world.engine.rooms.take(DeviceRooms(rooms=[room("GPU-a", MORE), room("GPU-b", MORE)]))
    (refused,) = world.say(SetMemory(utilization=GROW), dry_run=True)
    assert isinstance(refused, Refused) and "stage 0 needs 4.9 KiB more" in refused.text


def test_while_a_change_is_under_way_room_is_not_known():
    world = served(room("GPU-a", 0), room("GPU-b", 0), cards=OWN_CARDS)
    world.set_memory(SHRINK)
    (planned,) = world.say(SetMemory(utilization=GROW), dry_run=True)
    assert planned.plan[1] == "free memory is not known while a change is under way: planned without it"


def test_a_shrink_needs_no_room_and_names_its_modes():
    world = served(room("GPU-a", 0), room("GPU-b", 0), cards=OWN_CARDS)
    (idle,) = world.say(SetMemory(utilization=SHRINK), dry_run=True)
    assert idle.text == "KV 400 -> 200 blocks (-50.0 %, -3.9 KiB)"
    assert idle.plan[1] == "no mode: every request keeps its blocks"
    for index in range(12):
        world.submit([1 + index] * 50, name=f"r{index}", max_tokens=10)
    world.run(4)
    assert world.scheduler.blocks.device.used >= 12 * 7
    (busy,) = world.say(SetMemory(utilization=0.12), dry_run=True)
    figures = busy.figures
    assert figures["swap_requests"] > 1 and figures["recompute_requests"] > 0, "the host holds 50 blocks"
    swapped, recomputed = int(figures["swap"]), int(figures["recompute"])
    assert busy.plan[1] == (
        f"mode swap: {figures['swap_requests']:g} requests, {swapped} blocks ({20 * swapped / 1024:.1f} KiB) "
        "go to the host"
    )
    assert busy.plan[2].startswith(f"mode recompute: {figures['recompute_requests']:g} request")
    assert f"{recomputed} blocks ({20 * recomputed / 1024:.1f} KiB) are computed again" in busy.plan[2]
