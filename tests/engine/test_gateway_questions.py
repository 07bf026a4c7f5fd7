"""Questions of consoles that the gateway cannot send at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ppengine.gateway.bulk import CORE_FULL_S, BulkDesk
from ppengine.protocol.control import Failed, Fetch, Fetched


class Desk:
    """A desk whose core takes questions once `open`."""

    def __init__(self) -> None:
        self.open = self.awaited = False
        self.asked: list[int] = []
        self.answers: list[Any] = []
        events: Any = None
        self.desk = BulkDesk(
            events, lambda question: None, lambda client, answer: self.answers.append(answer), self.ask,
            lambda question: "", core_awaited=lambda: self.awaited,
        )  # fmt: skip
        self.desk.handle(b"c", Fetch(nonce=7, request="r"))

    def ask(self, question: Any) -> tuple[bool, str]:
        self.asked.append(question.nonce)
        return self.open, ""


def test_a_question_is_sent_once_the_core_takes_it() -> None:
    desk = Desk()
    desk.desk.expire(time.monotonic())
    desk.open = True
    for _ in range(2):
        desk.desk.expire(time.monotonic())
    assert desk.asked == [1, 1, 1], "tried, tried again, sent"
    assert desk.desk.on_answer(
        Fetched(nonce=1, request="r", sample=0, offset=0, token_ids=[], text_offset=0, text="", finished=True)
    )
    assert [answer.nonce for answer in desk.answers] == [7]


@pytest.mark.parametrize("awaited", [False, True])
def test_one_that_a_core_does_not_take_fails_unless_a_core_is_awaited(awaited: bool) -> None:
    desk = Desk()
    desk.awaited = awaited
    desk.desk.expire(time.monotonic() + CORE_FULL_S + 0.1)
    assert [type(answer) for answer in desk.answers] == ([] if awaited else [Failed])
    if not awaited:
        assert (desk.answers[0].nonce, desk.answers[0].code) == (7, "NO_CORE")
