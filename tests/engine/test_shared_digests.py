"""Prompts that begin as an earlier one take over its digests."""

from __future__ import annotations

import pytest
from ppengine.core.scheduler import shared_digests
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.shared_digests import SharedDigests
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.token_ids import compact


def request(ids: list[int], salt: str = "") -> Request:
    return Request(id="r", prompt_ids=compact(ids), sampling=SamplingParams(), seed=0, cache_salt=salt)


def test_a_prompt_with_another_salt_takes_over_none() -> None:
    shared, ids = SharedDigests(4), list(range(16))
    for salt in ("", "a", "b"):
        first, second = request(ids, salt), request(ids, salt)
        shared.take(first)
        assert not first.digests
        first.full_digests(4, 4)
        shared.take(second)
        assert second.digests == first.digests


@pytest.mark.parametrize("equal", range(45))
def test_digests_of_a_shared_prefix_are_those_of_the_prompt(equal: int) -> None:
    shared = SharedDigests(4)
    first, second = request(list(range(43))), request([place + 100 * (place >= equal) for place in range(41)])
    shared.take(first)
    assert first.digests == []
    first.full_digests(9, 4)
    first.output_ids = [43, 44]
    shared.take(second)
    taken = list(second.digests)
    assert taken == first.digests[: min(9, equal // 4)], "those of all blocks that are equal"
    assert second.full_digests(10, 4) == request(second.prompt_ids.tolist()).full_digests(10, 4)
    assert len(first.digests) == 9, "each has its own list"


def test_digests_are_shared_by_the_newest_prompts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_digests, "KEPT_MOST", 2)
    shared = SharedDigests(2)

    def taken(*ids: int) -> int:
        one = request(list(ids))
        shared.take(one)
        count = len(one.digests)
        one.full_digests(len(ids) // 2, 2)
        return count

    assert [taken(1, 1, 5, 5), taken(2, 2), taken(1, 1, 5, 5, 6)] == [0, 0, 2]
    assert [taken(3, 3), taken(2, 2), taken(3, 3), taken(7)] == [0, 0, 1, 0]
    assert taken(1, 1, 5, 5) == 0, "the oldest went"
