"""Parts of a card's memory add up, also of those that grew meanwhile."""

from __future__ import annotations

import random

import pytest
from ppengine.stage.backends.cuda.memory_accounts import Account, Parts, Reading

GIB = 2**30


def world(own_known: bool) -> tuple[Account, Reading]:
    """A stage that comes up on a card on which another process holds 3 GiB."""
    other, shown = 3 * GIB, [0]

    def at(hidden: int, torch: int = 0, pools: int = 0, kv: int = 0) -> Reading:
        shown[0] = hidden + torch + kv
        return Reading(other + shown[0], shown[0] if own_known else None, torch, pools, kv)

    account = Account(at(0))
    account.close("context", at(600, torch=20 * GIB))
    account.close("communicator", at(600 + 400, torch=21 * GIB))
    account.close("graphs", at(600 + 400 + 50, torch=22 * GIB, pools=700))
    return account, at(600 + 400 + 50 + 7, torch=22 * GIB, pools=700, kv=40 * GIB)


@pytest.mark.parametrize("own_known", [True, False])
def test_what_grew_is_booked_where_it_grew(own_known: bool) -> None:
    account, now = world(own_known)
    parts = account.parts(now, weights=19 * GIB)
    assert parts == Parts(
        weights=19 * GIB,
        kv_mapped=40 * GIB,
        activations=3 * GIB - 700,
        graphs=750,
        communicator=400,
        context=600,
        other_processes=3 * GIB,
        unexplained=7,
    )
    assert parts.used == now.used
    assert parts.beside_kv == 22 * GIB + 1050


def test_a_neighbour_that_grows_is_not_taken_for_ones_own() -> None:
    account = Account(Reading(3 * GIB, 0))
    account.close("context", Reading(3 * GIB + 600, 600))
    # Meanwhile the other process takes 5 GiB more.
    account.close("communicator", Reading(8 * GIB + 1000, 1000))
    parts = account.parts(Reading(8 * GIB + 1000, 1000), weights=0)
    assert (parts.communicator, parts.other_processes, parts.unexplained) == (400, 8 * GIB, 0)
    # Without figures by process, it cannot be told apart: it is left over where no phase was booked.
    blind = Account(Reading(3 * GIB, None))
    blind.close("context", Reading(3 * GIB + 600, None))
    parts = blind.parts(Reading(8 * GIB + 600, None), weights=0)
    assert (parts.context, parts.other_processes, parts.unexplained) == (600, 3 * GIB, 5 * GIB)


@pytest.mark.parametrize("seed", range(20))
def test_parts_always_add_up_to_the_card(seed: int) -> None:
    generator = random.Random(seed)

    def reading() -> Reading:
        own = generator.randrange(50, 100) * GIB
        used = own + generator.randrange(10) * GIB
        return Reading(used, generator.choice([own, None]), generator.randrange(20) * GIB, 0, generator.randrange(20))

    account = Account(Reading(5, 0))
    for phase in ("context", "communicator", "graphs", "graphs"):
        account.close(phase, reading())
    last = reading()
    assert account.parts(last, weights=generator.randrange(9) * GIB).used == last.used
    with pytest.raises(KeyError):
        account.close("weights", last)
