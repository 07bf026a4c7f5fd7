"""`Follow`: a reader has every token once and every end, also if answers are lost."""

from __future__ import annotations

import random
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.core.output_state import Output
from ppengine.core.outputs import OutputHub
from ppengine.protocol.offline import Follow, News
from ppengine.protocol.sampling import SamplingParams
from pushed_tokens import push


class World:
    def __init__(self) -> None:
        self.answers: list[News] = []
        self.now = 0.0
        self.asked = 0
        self.hub = OutputHub(lambda client, answer: self.answers.append(answer), lambda: self.now, lambda: "")

    def ask(self, since: int, answers: int = 1, *, finished_only: bool = False) -> None:
        self.asked += 1
        self.go_on(since, answers, finished_only=finished_only)

    def go_on(self, since: int, answers: int, *, finished_only: bool = False) -> None:
        self.hub.follow(
            b"http",
            Follow(
                nonce=self.asked, session="s", since=since, wait_ms=1000, answers=answers, finished_only=finished_only
            ),
        )  # fmt: skip

    def push(self, token: int) -> None:
        push(self.hub, "r", 0, token)
        self.hub.serve_waiters()

    @property
    def sent(self) -> list[tuple[int, list[int]]]:
        return [(piece.offset, piece.token_ids) for answer in self.answers for piece in answer.all_pieces()]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), samples=st.integers(1, 3), lost=st.floats(0, 0.8), ends=st.booleans())
def test_every_token_comes_once_however_many_answers_are_lost(
    seed: int, samples: int, lost: float, ends: bool
) -> None:  # fmt: skip
    """`ends`: the reader waits for ends alone, now and then."""
    world, draw = World(), random.Random(seed)
    wanted, have = [[0] * 0 for _ in range(samples)], [[0] * 0 for _ in range(samples)]
    ended = [False] * samples
    world.hub.open("r", "s", [1], SamplingParams(n=samples, detokenize=False), 0)
    cursor, finished = -1, set[int]()
    for turn in range(200):
        world.ask(cursor, finished_only=ends and draw.random() < 0.7)
        for sample in range(samples):
            if not ended[sample] and draw.random() < 0.5:
                ended[sample] = draw.random() < 0.05 or turn > 150
                wanted[sample].append(draw.randrange(1000))
                push(world.hub, "r", sample, wanted[sample][-1])
                if ended[sample]:
                    world.hub.finish("r", sample, "length")
        world.now += 2.0
        world.hub.serve_waiters()
        answers, world.answers = world.answers, []
        for answer in answers:
            if draw.random() < lost:
                continue
            cursor = answer.cursor
            for piece in answer.all_pieces():
                known = len(have[piece.sample])
                assert piece.offset <= known, "no token is missing before it"
                have[piece.sample] += piece.token_ids[known - piece.offset :]
                finished |= {piece.sample} if piece.finish_reason else set()
        if all(ended) and len(finished) == samples:
            break
    if lost < 0.5:
        assert have == wanted and len(finished) == samples


def test_without_a_loss_nothing_is_sent_twice() -> None:
    world = World()
    world.hub.open("r", "s", [1], SamplingParams(n=2, detokenize=False), 0)
    cursor, sent = -1, 0
    for token in range(10):
        world.ask(cursor)
        push(world.hub, "r", token % 2, token)
        world.hub.serve_waiters()
        (answer,), world.answers = world.answers, []
        assert [(piece.sample, piece.token_ids) for piece in answer.all_pieces()] == [(token % 2, [token])]
        cursor, sent = answer.cursor, sent + len(list(answer.all_pieces()))
    assert sent == 10


def test_a_question_has_as_many_answers_as_it_allows_and_goes_on_behind_them() -> None:
    world = World()
    world.hub.open("r", "s", [1], SamplingParams(detokenize=False), 0)
    world.ask(-1, answers=3)
    for token in range(5):
        world.push(token)
    assert world.sent == [(0, [0]), (1, [1]), (2, [2])]
    # The reader has seen the first answer alone when it goes on.
    world.go_on(world.answers[0].cursor, answers=3)
    assert world.sent[3:] == [(3, [3, 4])]
    world.go_on(world.answers[0].cursor, answers=2)
    for token in range(5, 9):
        world.push(token)
    assert world.sent[4:] == [(5, [5]), (6, [6])], "the earlier question is replaced"
    world.ask(world.answers[0].cursor)
    assert world.sent[6:] == [(0, list(range(9)))], "another question has an older cursor"


def test_a_question_with_answers_left_hears_from_the_core_in_time() -> None:
    world = World()
    world.hub.open("r", "s", [1], SamplingParams(detokenize=False), 0)
    world.ask(-1, answers=2)
    for world.now in (0.9, 1.0, 1.1, 1.9, 2.0, 3.5):
        world.hub.serve_waiters()
    assert len(world.answers) == 2 and world.sent == []
    assert world.hub.next_deadline() is None


def test_a_session_knows_what_it_has_left_open() -> None:
    world = World()
    for name in ("a", "b"):
        world.hub.open(name, "s", [1], SamplingParams(detokenize=False), 0)
    world.hub.finish("a", 0, "length")
    assert world.hub.open_in("s") == ["b"] and world.hub.open_in("other") == []


def test_a_session_is_forgotten_with_its_last_output_and_may_come_back() -> None:
    world = World()
    world.hub.open("r", "s", [1], SamplingParams(detokenize=False), 0)
    world.ask(-1)
    world.push(7)
    world.hub.finish("r", 0, "length")
    world.ask(world.answers[-1].cursor)
    before = world.answers[-1].cursor
    world.ask(before)
    world.hub.forget(["r"])
    assert world.hub._followers._sessions == {}
    # A question of it still waits.
    world.hub.open("r", "s", [1], SamplingParams(detokenize=False), 1)
    world.push(8)
    # It goes on before the answer with that token has come.
    world.go_on(before, 1)
    world.push(9)
    assert world.sent == [(0, [7]), (1, []), (0, [8]), (1, [9])]


def test_a_reader_that_waits_for_ends_has_the_others_after_its_time() -> None:
    world = World()
    for name in ("r", "q"):
        world.hub.open(name, "s", [1], SamplingParams(detokenize=False), 0)
    world.ask(-1, finished_only=True)
    world.push(1)
    push(world.hub, "q", 0, 2)
    world.hub.serve_waiters()
    assert world.answers == []
    world.hub.finish("q", 0, "length")
    world.hub.serve_waiters()
    assert [(piece.request, piece.token_ids) for piece in world.answers.pop().all_pieces()] == [("q", [2])]
    world.ask(3, finished_only=True)
    world.now = 1.0
    world.hub.serve_waiters()
    (piece,) = world.answers.pop().all_pieces()
    assert (piece.request, piece.token_ids) == ("r", [1]), "without news"
    world.ask(3, finished_only=True)
    world.push(3)
    world.hub.finish("r", 0, "length")
    world.hub.serve_waiters()
    assert world.sent == [(1, [3])]


def test_an_answer_looks_at_the_requests_with_news_alone() -> None:
    """Thousands of prompts may wait in a session."""

    class Counted(dict[str, Output]):
        looks = 0

        def values(self) -> Iterator[Output]:  # type: ignore[override]
            for output in super().values():
                self.looks += 1
                yield output

    world = World()
    for name in ("r", "waits"):
        world.hub.open(name, "s", [1], SamplingParams(detokenize=False), 0)
    world.ask(-1, answers=99)
    world.push(0)
    members = world.hub._sessions["s"] = Counted(world.hub._sessions["s"])
    for token in range(1, 3):
        world.push(token)
    assert world.sent == [(0, [0]), (1, [1]), (2, [2])] and members.looks == 0


def test_a_dropped_request_is_no_news() -> None:
    world = World()
    for name in ("r", "q"):
        world.hub.open(name, "s", [1], SamplingParams(detokenize=False), 0)
    world.ask(-1)
    world.push(1)
    world.hub.finish("r", 0, "length")
    world.hub.forget(["r"])
    world.ask(world.answers.pop().cursor)
    push(world.hub, "q", 0, 2)
    world.hub.serve_waiters()
    assert [piece.request for piece in world.answers.pop().all_pieces()] == ["q"]
