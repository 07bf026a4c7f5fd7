"""The core's side of the grammar process: questions again after an end, and the one that is to blame."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from ppengine.common import helper_child
from ppengine.core.child_sockets import ChildSockets
from ppengine.core.constraints import Constraints
from ppengine.core.grammar_asks import Ask, Masked
from ppengine.core.grammar_process import (
    ANSWER_S,
    COMPILES_A_THREAD,
    EXPECTED_MOST,
    START_S,
    STARTS_MOST,
    GrammarProcess,
)
from ppengine.core.mask_processes import MaskProcesses
from ppengine.protocol.frames import Codec
from ppengine.protocol.grammar_messages import (
    COMPILERS,
    LARGE,
    Answers,
    Forget,
    GrammarsLeave,
    GrammarsReady,
    Question,
    Questions,
    ToGrammars,
)
from ppengine.protocol.reports import ProcessInfo, Unanswered
from ppengine.protocol.structured_outputs import Grammar
from ppengine.protocol.token_mask import TokenMask

VOCABULARY = 40
MASK = TokenMask(b"\xff" * 8)


class Child:
    """A process that the test ends."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def info(self, role: str) -> ProcessInfo:
        return ProcessInfo(role=role, stage=None, rank=None, pid=self.pid, exit_code=self.code, detail="gone")

    def kill(self) -> None:
        self.code = -9

    def close(self) -> None:
        pass


class Desk:
    """A `GrammarProcess` with children and messages of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.children: list[Child] = []
        self.open: dict[int, Question] = {}
        """Questions that the present child has not answered."""
        self.asks: dict[int, Ask] = {}
        """By matcher: an output has one question, which is asked again."""
        self.forgotten: list[int] = []
        self.ended: dict[int, Masked] = {}
        self.names: list[bytes] = []
        self.events: list[str] = []
        self._codec = Codec(ToGrammars)
        monkeypatch.setattr(helper_child, "spawn", self._spawn)
        self.process = GrammarProcess(
            Path("/r"), VOCABULARY, self._send, lambda: self.now, lambda kind, text: self.events.append(text), "masks"
        )

    def _spawn(self, module: str, arguments: list[str], **_: Any) -> Child:
        self.children.append(Child(len(self.children) + 1))
        self.names.append(arguments[-1].encode())
        self.open.clear()
        return self.children[-1]

    def _send(self, name: bytes, payload: bytes) -> None:
        assert name == self.names[-1]
        message = self._codec.decode(payload)
        if isinstance(message, Forget):
            self.forgotten += message.matchers
        else:
            assert isinstance(message, Questions)
            self.open.update((question.number, question) for question in message.questions)

    def ask(self, matcher: int, tokens: list[int], text: str = "x") -> None:
        end = lambda masked: self.ended.update({matcher: masked})  # noqa: E731
        ask = self.asks.setdefault(matcher, Ask(matcher, Grammar("regex", text), tokens, [], end, 2))
        ask.tokens = tokens
        self.process.ask([ask])

    def turn(self, *, ready: bool = True) -> list[int]:
        """Take a turn with a child that is ready; return the matchers of open questions."""
        self.process.advance()
        if ready and self.children and self.children[-1].code is None and not self.process.child.ready:
            self.process.take(self.names[-1], GrammarsReady())
            self.process.advance()
        return [question.matcher for question in self.open.values()]

    def answer(self, forced: Sequence[int] = ()) -> None:
        numbers = list(self.open)
        self.open.clear()
        after = {number: list(forced) for number in numbers if forced}
        self.take(Answers(numbers, [0] * len(numbers), [MASK], after))

    def take(self, message: Answers | GrammarsLeave) -> None:
        """Give a message of the child to the process. Asks have no request here, so no mask is returned."""
        assert self.process.take(self.names[-1], message) == []

    def end(self) -> None:
        """End the child and go on with another one."""
        self.children[-1].code = -11
        self.now += 2
        self.turn()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_a_child_gets_new_tokens_alone_and_the_next_one_all(desk: Desk) -> None:
    desk.ask(1, [4])
    assert desk.turn() == [1]
    desk.answer()
    desk.ask(1, [4, 5, 6])
    desk.turn()
    (question,) = desk.open.values()
    assert question.grammar is None and question.tokens == [5, 6]
    desk.end()
    (question,) = desk.open.values()
    assert question.grammar == Grammar("regex", "x") and question.tokens == [4, 5, 6]
    desk.answer()
    desk.process.forget([1, 9])
    assert desk.forgotten == [1]


def test_tokens_that_a_child_has_forced_are_not_sent_to_it_again(desk: Desk) -> None:
    desk.ask(1, [4])
    desk.turn()
    desk.answer(forced=[5, 6])
    assert desk.ended[1] == Masked(MASK, forced=(5, 6))
    desk.ask(1, [4, 5, 6, 7])
    desk.turn()
    assert [question.tokens for question in desk.open.values()] == [[7]]
    desk.end()
    assert [question.tokens for question in desk.open.values()] == [[4, 5, 6, 7]], "the next child has none of them"
    desk.process.forget([1])
    desk.answer(forced=[8])
    assert desk.forgotten == [1, 1], "a matcher that is gone needs no count"


def test_an_output_that_ends_under_its_question_leaves_no_matcher(desk: Desk) -> None:
    desk.ask(1, [])
    assert desk.turn() == [1]
    desk.ask(2, [])
    desk.process.forget([1, 2])
    assert desk.ended == {2: Masked(error="its output has ended", later=True)}
    assert desk.turn() == [1], "the other is not asked"
    desk.answer()
    assert desk.forgotten == [1, 1], "a child that compiled its grammar has made a matcher meanwhile"


def test_the_question_of_an_output_that_has_ended_ends_with_its_child(desk: Desk) -> None:
    """The next child would make a matcher for it, which nothing ever drops."""
    for matcher in (1, 2):
        desk.ask(matcher, [])
    assert desk.turn() == [1, 2]
    desk.process.forget([1])
    desk.end()
    assert desk.ended[1].later and desk.turn() == [2]
    desk.answer()
    assert set(desk.process._matchers) == {2}


def test_one_question_that_ends_two_processes_alone_is_to_blame_and_no_other(desk: Desk) -> None:
    for matcher in (1, 2, 3):
        desk.ask(matcher, [matcher], text="same")
    assert desk.turn() == [1, 2, 3]
    desk.end()
    assert desk.turn() == [1]
    desk.answer()
    assert desk.turn() == [2]
    desk.end()
    assert desk.turn() == [2] and set(desk.ended) == {1}
    desk.end()
    assert desk.ended[2].error == "it has ended 2 processes: the grammar process for masks (pid 3) has ended, gone"
    assert desk.turn() == [3]
    desk.answer()
    assert desk.ended[3] == Masked(MASK) and not desk.ended[2].later


def test_a_child_is_reported_while_an_output_waits_for_it(desk: Desk) -> None:
    desk.ask(0, [])
    desk.ask(1, [4])
    desk.turn(ready=False)
    assert MaskProcesses([desk.process]).unanswered == []
    desk.now += 2
    assert MaskProcesses([desk.process]).unanswered == [Unanswered(pid=1, for_s=2.0)], "it is still starting"
    desk.turn()
    assert desk.process.unanswered is None
    desk.now += 3
    assert desk.process.unanswered == Unanswered(pid=1, for_s=3.0)
    desk.answer()
    assert desk.process.unanswered is None
    desk.ask(0, [], "y")
    desk.turn()
    desk.now += 5
    assert desk.process.unanswered is None, "no output waits for a grammar that is compiled ahead"


def test_a_child_that_starts_owes_an_output_nothing_before_its_question(desk: Desk) -> None:
    """Several start at once, and the first output comes when the one for checks is there."""
    desk.process.prepare()
    desk.turn(ready=False)
    desk.now += 8
    desk.ask(1, [4])
    assert desk.process.unanswered is None
    desk.now += 2
    assert desk.process.unanswered == Unanswered(pid=1, for_s=2.0)
    desk.turn()
    desk.now += 3
    desk.end()
    desk.process.take_malformed(desk.names[-1], "no frame")
    desk.now += 2
    desk.turn(ready=False)
    desk.now += 4
    assert desk.process.unanswered == Unanswered(pid=3, for_s=4.0), "this one has begun after the question"


def test_a_child_without_an_answer_is_killed(desk: Desk) -> None:
    desk.ask(1, [])
    desk.turn()
    desk.now += ANSWER_S + 1
    desk.turn()
    assert desk.children[0].code == -9 and len(desk.children) == 2 and desk.turn() == [1]
    desk.now += 1000
    desk.answer()
    desk.turn()
    assert len(desk.children) == 2, "an idle child has no deadline"


def test_new_grammars_have_time_as_long_as_their_child_works(desk: Desk) -> None:
    """Large ones wait behind each other's compiles: 64 of them once took all of the time for one."""
    for number in range(3):
        desk.ask(0, [], text=f"new {number}")
    assert desk.turn() == [0, 0, 0]
    for _ in range(5):
        desk.now += ANSWER_S - 1
        desk.take(Answers([], []))
        desk.turn()
    assert len(desk.children) == 1
    desk.now += ANSWER_S + 1
    desk.turn()
    assert desk.children[0].code == -9, "it is stopped"


def test_a_mask_that_does_not_come_is_noticed_while_grammars_are_compiled(desk: Desk) -> None:
    desk.ask(5, [1], text="known")
    desk.turn()
    desk.answer()
    desk.ask(0, [], text="new")
    desk.ask(5, [1, 2], text="known")
    desk.turn()
    desk.now += ANSWER_S + 1
    desk.take(Answers([], []))
    desk.turn()
    assert desk.children[0].code == -9


def test_a_child_that_leaves_makes_no_question_suspect(desk: Desk) -> None:
    for matcher in (1, 2, 3):
        desk.ask(matcher, [matcher], text=f"{matcher}")
    desk.turn()
    bad = next(number for number, question in desk.open.items() if question.matcher == 2)
    desk.take(Answers([bad], [-1], errors={bad: "it does not end"}))
    desk.take(GrammarsLeave())
    assert desk.children[0].code == -9 and desk.ended == {2: Masked(error="it does not end")}
    desk.now += 2
    assert desk.turn() == [1, 3], "both at once"


@pytest.mark.parametrize(
    "bad",
    [
        (1, [], ""),
        (-1, [], ""),
        (-2, [], "no match"),
        (0, [], "no match"),
        (0, [5, 6, 7], ""),
        (-1, [5], "no match"),
        (0, [5, VOCABULARY], ""),
        (0, [-1], ""),
        (None, [], ""),
    ],
)
def test_a_bad_answer_ends_its_child_and_the_next_one_gets_the_questions(
    desk: Desk, bad: tuple[int | None, list[int], str]
) -> None:
    """An answer is the place of its mask (None: there is no place), forced tokens and an error."""
    desk.ask(1, [4])
    desk.ask(2, [5])
    desk.turn()
    numbers, (place, forced, error) = list(desk.open), bad
    places = [0] if place is None else [0, place]
    after, errors = ({numbers[1]: each} if each else {} for each in (forced, error))
    desk.take(Answers(numbers, places, [MASK], after, errors))
    assert desk.children[0].code == -9 and not desk.ended, "no answer of such a message is taken"
    desk.now += 2
    assert desk.turn() == [1]
    desk.answer()
    assert desk.turn() == [2]
    desk.answer(forced=[5, 6])
    assert desk.ended == {1: Masked(MASK), 2: Masked(MASK, forced=(5, 6))}


def test_a_bad_answer_that_nothing_waits_for_ends_its_child_too(desk: Desk) -> None:
    desk.ask(1, [4])
    desk.turn()
    desk.take(Answers([99], [0], [MASK]))
    assert desk.children[0].code is None, "an output that has ended"
    desk.take(Answers([99], [1], [MASK]))
    assert desk.children[0].code == -9


@pytest.mark.parametrize(
    "mask",
    [
        TokenMask(b""),
        TokenMask(b"\xff" * 7),
        TokenMask(b"\xff" * 9),
        TokenMask(b"\xff" * 4),
        TokenMask(b"\xff" * 4, b"\0" * 8),
        TokenMask(b"\xff" * 8, b"\0" * 8),
        TokenMask(b"\xff" * 3, b"\0" * 3),
    ],
)
def test_a_mask_of_another_length_ends_its_child(desk: Desk, mask: TokenMask) -> None:
    desk.ask(1, [4])
    desk.turn()
    (number,) = desk.open
    desk.take(Answers([number], [0], [MASK, mask]))
    assert desk.children[0].code == -9 and not desk.ended, "a stage would get it"
    desk.now += 2
    assert desk.turn() == [1]
    desk.answer()
    assert desk.ended == {1: Masked(MASK)}


def test_a_message_that_cannot_be_decoded_ends_its_child_at_once(desk: Desk) -> None:
    none: Any = None
    checks = GrammarProcess(Path("/r"), VOCABULARY, none, lambda: desk.now, none, "checks")
    constraints = Constraints(checks, MaskProcesses([desk.process]), none, frozenset(), lambda: desk.now)
    engine: Any = SimpleNamespace(constraints=constraints, event=lambda kind, text: desk.events.append(text))
    desk.ask(1, [4])
    desk.turn()
    with zmq.Context() as context, contextlib.ExitStack() as open_sockets:
        children = ChildSockets(lambda kind: open_sockets.enter_context(context.socket(kind)))
        router = children.routers["grammar"]
        router.bind("inproc://grammar")
        for name, code in ((b"a child before", None), (desk.names[-1], -9)):
            child = open_sockets.enter_context(context.socket(zmq.DEALER))
            child.setsockopt(zmq.IDENTITY, name)
            child.connect("inproc://grammar")
            child.send(b"\xc1")
            assert router.poll(60_000)
            assert children.drain(engine)
            assert desk.children[0].code == code
    malformed = "from a grammar process: not a message of this protocol: "
    assert [text.startswith(malformed) for text in desk.events] == [True, True, False]
    assert desk.events[2].startswith(
        "the grammar process for masks (pid 1) has sent a malformed message, not a message"
    )
    desk.now += 2
    assert desk.turn() == [1], "the next one gets the question"


def test_an_output_whose_answers_are_bad_alone_is_lost(desk: Desk) -> None:
    desk.ask(1, [])
    for _ in range(3):
        assert desk.turn() == [1]
        desk.take(Answers([next(iter(desk.open))], [0]))
        desk.now += 2
    assert desk.ended[1].error.endswith("(pid 3) has sent a bad answer") and not desk.ended[1].later


def test_a_grammar_waits_while_others_are_compiled_and_known_outputs_do_not(desk: Desk) -> None:
    desk.ask(99, [1], text="known")
    desk.turn()
    desk.answer()
    most = COMPILES_A_THREAD * COMPILERS
    for number in range(most + 3):
        desk.ask(0, [], text=f"new {number}")
    desk.ask(99, [1, 2], text="known")
    assert sorted(desk.turn()) == [0] * most + [99]
    desk.answer()
    assert desk.turn() == [0] * 3


def test_an_expected_grammar_is_compiled_once_before_the_first_question(desk: Desk) -> None:
    new = Grammar("regex", "new")
    for _ in range(3):
        desk.process.expect(new)
    assert desk.turn() == [0]
    (question,) = desk.open.values()
    assert question.grammar == new and not question.tokens
    desk.ask(5, [1], text="new")
    assert desk.turn() == [0, 5], "the process has it compiled for both"
    desk.answer()
    desk.process.expect(new)
    assert desk.turn() == [] and set(desk.ended) == {5}
    desk.end()
    desk.process.expect(new)
    assert desk.turn() == [0], "the next process has none"
    desk.answer()
    for number in range(EXPECTED_MOST + 9):
        desk.process.expect(Grammar("regex", f"{number}"))
    given = 0
    while turn := desk.turn():
        given += len(turn)
        desk.answer()
    assert given == EXPECTED_MOST


def test_large_grammars_take_no_room_from_small_ones(desk: Desk) -> None:
    most = COMPILES_A_THREAD * COMPILERS
    texts = [*(f"{number}" + "x" * LARGE for number in range(most + 3)), "small"]
    desk.process.ask([Ask(0, Grammar("choice", text), [], [], lambda _: None) for text in texts])
    desk.turn()
    given = [question.grammar.text for question in desk.open.values() if question.grammar is not None]
    assert given == [*texts[:most], "small"]


def test_more_threads_compile_more_grammars_at_once(desk: Desk) -> None:
    desk.process._threads = 16
    for number in range(300):
        desk.ask(0, [], text=f"new {number}")
    assert desk.turn() == [0] * 16 * COMPILES_A_THREAD


def test_a_process_that_cannot_start_refuses_new_grammars_and_keeps_outputs(desk: Desk) -> None:
    desk.ask(0, [])
    desk.ask(7, [1])
    for _ in range(STARTS_MOST):
        desk.turn(ready=False)
        desk.now += START_S + 2
    desk.turn(ready=False)
    assert len(desk.children) >= STARTS_MOST and desk.ended[0].later and "did not answer" in desk.ended[0].error
    assert 7 not in desk.ended and desk.turn() == [7]
    desk.process.close()
    assert desk.ended[7] == Masked(error="the engine stops", later=True)
