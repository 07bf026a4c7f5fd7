"""Questions of consoles that the gateway cannot send at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
from ppengine.gateway.bulk import CORE_FULL_S, TEXTS, BulkDesk
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
    (number,) = set(desk.asked)
    assert len(desk.asked) == 3, "tried, tried again, sent"
    assert desk.desk.on_answer(
        Fetched(nonce=number, request="r", sample=0, offset=0, token_ids=[], text_offset=0, text="", finished=True)
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


def test_an_output_that_the_process_of_texts_does_not_give_in_time_fails_and_names_it() -> None:
    desk = Desk()
    asked = list[Any]()
    desk.desk._asks[TEXTS], desk.desk._texts = lambda one: (asked.append(one.nonce) is None, ""), TEXTS
    desk.desk.handle(b"c", Fetch(nonce=8, request="r", wait_ms=1000))
    desk.desk.texts_back()
    assert len(asked) == 2 and len(set(asked)) == 1 and desk.desk._next - 1 == asked[0]
    desk.desk.expire(time.monotonic() + 10.5)
    assert not [answer for answer in desk.answers if answer.nonce == 8]
    desk.desk.expire(time.monotonic() + 11.5)
    (failed,) = [answer for answer in desk.answers if answer.nonce == 8]
    assert (failed.code, failed.text) == ("EXPIRED", "the process of texts gave no answer in time")
