"""Commands with texts in the gateway: they wait for the process of texts, and the core gets token ids alone."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from monitor_helpers import PRINCIPAL
from ppengine.gateway import text_desk
from ppengine.gateway.audit import AuditLog
from ppengine.gateway.commands import CommandDesk
from ppengine.gateway.control_lease import ControlLease
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.sessions import Sessions
from ppengine.protocol import frames
from ppengine.protocol.control import Accepted, Command, Deferred, Hello, Outcome, Refused
from ppengine.protocol.reports import Recalled
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.text_messages import Encode, Encoded
from ppengine.protocol.verbs import Submit

TEXT = Submit(prompt="a fox", sampling=SamplingParams(stop=["END"]))
IDS = Submit(prompt_token_ids=[5, 6], sampling=SamplingParams(stop=["END"]))
GONE = "the process of texts (pid 7) ended, killed by SIGKILL, and is restarted"


class Desk:
    """A gateway's desk on a clock of its own; the test is core and process of texts."""

    def __init__(self, folder: Path, *, absent: bool = False) -> None:
        self.core: list[Command] = []
        self.texts: list[Encode] = []
        self.got: list[object] = []
        self.aborted: list[list[str]] = []
        self.tries = 0
        self.connected, self.away, self.core_gone, self.now = True, "", "", 100.0
        events = EventLog(lambda _: None)
        audit, lease = AuditLog(folder, "engine", "id", {}), ControlLease(folder / "lease.json", events.say, bool)
        self.sessions = Sessions(lambda what, session: None)
        self.folder = folder
        self.desk = CommandDesk(
            "epoch", audit, events, self.sessions, lambda _, reply: self.got.append(reply), self, lease,  # type: ignore[arg-type]
            texts_absent=absent,
        )  # fmt: skip
        self.desk.texts._clock = lambda: self.now
        self.desk.texts._alive_at = self.now
        hello = Hello(proto_min=1, proto_max=1, client="t", user="eve")
        self.session = self.sessions.hello(b"c", hello, 0.0, PRINCIPAL)

    def core_away(self) -> str:
        return self.core_gone

    def core_missing(self) -> str:
        return ""

    def texts_away(self) -> str:
        return self.away

    def forward(self, command: Command) -> bool:
        self.core.append(command)
        return True

    def abort(self, requests: list[str]) -> None:
        self.aborted.append(requests)

    def send_texts(self, message: msgspec.Struct) -> bool:
        assert isinstance(message, Encode)
        self.tries += 1
        if self.connected:
            self.texts.append(message)
        return self.connected

    def say(self, verb: Submit = TEXT, name: str = "c1", **fields: object) -> None:
        command = Command(id=name, epoch="epoch", verb=verb, by="eve", **fields)  # type: ignore[arg-type]
        self.desk.handle(b"c", frames.header("id", "epoch"), command, self.session)

    def wait(self, seconds: float, *, alive: int | None = None) -> None:
        """Let time go by in turns of 0.1 s; `alive`: pid of a process that reports once a second."""
        for number in range(round(10 * seconds)):
            self.now += 0.1
            if alive is not None and number % 10 == 9:
                self.desk.texts.alive(alive)
            self.desk.texts.turn()


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_the_core_gets_the_tokens_and_the_audit_has_the_command_of_the_user(desk: Desk) -> None:
    desk.say(reason="try")
    assert desk.texts == [Encode(id="c1", submit=TEXT)] and not desk.core and not desk.got
    desk.desk.texts.take(Encoded(id="c1", submit=IDS))
    (command,) = desk.core
    assert (command.id, command.verb, command.reason) == ("c1", IDS, "try")
    assert '"prompt_length":5' in (desk.folder / "audit.jsonl").read_text()
    desk.desk.on_reply(Outcome(id="c1", op="op-1", state="applied", text="queued", request="r-1"))
    desk.say(reason="try")
    assert len(desk.texts) == len(desk.core) == 1, "a repeat gets the answers of the first"
    assert [type(one) for one in desk.got] == [Outcome, Outcome]


@pytest.mark.parametrize(
    "verb", [IDS, Submit(prompt_token_ids=[1], sampling=SamplingParams(bad_words_ids=[[3]]))], ids=["stop", "bad"]
)
def test_a_submission_of_ids_needs_no_process_of_texts(desk: Desk, verb: Submit) -> None:
    desk.connected = False
    desk.say(verb)
    assert [command.verb for command in desk.core] == [verb]


def test_a_request_that_should_end_with_its_console_ends_at_once_if_that_has_left(desk: Desk) -> None:
    """A minute after its Goodbye the session of a console is forgotten; tokens may take longer."""
    desk.say(msgspec.structs.replace(TEXT, abort_on_detach=True), "c1")
    desk.say(TEXT, "c2")
    desk.sessions.goodbye(b"c", 100.0)
    assert desk.sessions.count(170.0) == 0 and desk.sessions.get(b"c") is None
    for name in ("c1", "c2"):
        desk.desk.texts.take(Encoded(id=name, submit=IDS))
        desk.desk.on_reply(Accepted(id=name, op="op", request=f"r-{name}"))
        desk.desk.on_reply(Outcome(id=name, op="op", state="applied", text="queued", request=f"r-{name}"))
    assert len(desk.core) == 2 and desk.aborted == [["r-c1"]], "the other one goes on without a console"


def test_a_request_is_that_of_its_console_over_another_link(desk: Desk) -> None:
    hello = Hello(proto_min=1, proto_max=1, client="t", user="eve", console="k")
    desk.session = desk.sessions.hello(b"c", hello, 0.0, PRINCIPAL)
    desk.say(msgspec.structs.replace(TEXT, abort_on_detach=True))
    back = desk.sessions.hello(b"d", hello, 1.0, PRINCIPAL)
    assert desk.sessions.get(b"c") is None
    desk.desk.texts.take(Encoded(id="c1", submit=IDS))
    desk.desk.on_reply(Accepted(id="c1", op="op", request="r-1"))
    assert back.requests == ["r-1"] and not desk.aborted


def test_a_refusal_ends_the_command(desk: Desk) -> None:
    desk.say()
    desk.desk.texts.take(Encoded(id="c1", error="chat template: no", code="DOES_NOT_FIT"))
    assert desk.got == [Refused(id="c1", code="DOES_NOT_FIT", text="chat template: no")]
    desk.desk.texts.take(Encoded(id="c1", submit=IDS))
    assert not desk.core, "it has ended"


def test_a_long_wait_is_reported_once_and_goes_on(desk: Desk) -> None:
    desk.desk.texts.alive(7)
    desk.say(msgspec.structs.replace(TEXT, chat=True))
    assert desk.desk.texts.next_due == pytest.approx(100.0 + text_desk.DEFER_S)
    desk.wait(5, alive=7)
    assert desk.got == [Deferred(id="c1", op="g-c1", text="waits for its chat template")]
    assert desk.desk.texts.next_due is None
    desk.wait(100, alive=7)
    assert len(desk.got) == 1, "the process lives and has much to do"
    desk.desk.texts.take(Encoded(id="c1", submit=IDS))
    desk.desk.on_reply(Accepted(id="c1", op="op-1", request="r-1"))
    assert [type(one) for one in desk.got] == [Deferred, Accepted] and len(desk.core) == 1


def test_another_process_gets_what_the_one_before_has_not_answered(desk: Desk) -> None:
    desk.desk.texts.alive(7)
    desk.say()
    desk.connected, desk.away = False, GONE
    desk.wait(1)
    assert desk.got == [Deferred(id="c1", op="g-c1", text=GONE)]
    desk.say(name="c2")
    desk.connected, desk.away = True, ""
    desk.desk.texts.alive(8)
    assert [one.id for one in desk.texts] == ["c1", "c1", "c2"]
    desk.desk.texts.take(Encoded(id="c1", submit=IDS))
    assert len(desk.core) == 1


def test_a_text_that_may_be_the_reason_is_refused_after_some_ends(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was tried in vain while none was there."""
    monkeypatch.setattr(text_desk, "AGAIN_S", 1.0)
    desk.desk.texts.alive(1)
    desk.say()
    for pid in range(2, 2 + text_desk.ENDS_MOST):
        assert not [one for one in desk.got if isinstance(one, Refused)]
        desk.connected, desk.away = False, GONE
        desk.wait(text_desk.SILENT_S - 1)
        desk.connected, desk.away = True, ""
        desk.desk.texts.alive(pid)
    text = f"the process of texts ended {text_desk.ENDS_MOST} times before it answered; it is not tried again"
    assert desk.got[1:] == [Refused(id="c1", code="FAILED", text=text)] and not desk.core


def test_a_process_that_is_stopped_refuses_texts_and_no_ids(desk: Desk) -> None:
    desk.desk.texts.alive(7)
    desk.say()
    desk.wait(text_desk.SILENT_S + 1)
    deferred, refused = desk.got
    assert isinstance(deferred, Deferred) and deferred.text == "waits for its tokenizer"
    assert isinstance(refused, Refused) and refused.code == "BUSY"
    assert refused.text == "the process of texts (pid 7) has not answered for 10 s"
    desk.say(IDS, name="c2")
    assert [command.id for command in desk.core] == ["c2"]
    desk.say(name="c3")
    desk.wait(1)
    assert isinstance(desk.got[-1], Deferred) and "(pid 7), which does not answer" in desk.got[-1].text


def test_a_process_that_does_not_come_back_refuses_texts(desk: Desk) -> None:
    desk.connected, desk.away = False, GONE
    desk.say()
    desk.wait(text_desk.AWAY_S - 1)
    assert [type(one) for one in desk.got] == [Deferred]
    desk.wait(2)
    assert desk.got[1:] == [Refused(id="c1", code="BUSY", text=GONE)]


def test_a_text_that_is_not_taken_is_tried_a_few_times_a_second(desk: Desk) -> None:
    """The gateway takes hundreds of turns a second, and each try makes a message of the whole text."""
    desk.connected = False
    desk.say()
    desk.wait(2)
    assert 4 < desk.tries < 10
    desk.connected = True
    desk.wait(0.5)
    assert len(desk.texts) == 1


def test_an_answer_that_is_lost_is_asked_for_again(desk: Desk) -> None:
    desk.desk.texts.alive(7)
    desk.say()
    desk.wait(text_desk.AGAIN_S + 1, alive=7)
    assert [one.id for one in desk.texts] == ["c1", "c1"]


def test_a_core_that_is_restarted_meanwhile_gets_no_text(desk: Desk) -> None:
    desk.say()
    desk.core_gone = "the engine core ended"
    assert desk.desk.open() == ["c1"]
    desk.desk.recalled(Recalled(newest=0, replies=[], unknown=["c1"]), 1.0)
    assert not desk.core
    desk.desk.texts.take(Encoded(id="c1", submit=IDS))
    assert not desk.core, "it waits for the core now"
    desk.core_gone = ""
    desk.desk.core_back()
    assert [command.verb for command in desk.core] == [IDS]
    desk.desk.recalled(Recalled(newest=0, replies=[], unknown=["c1"]), 2.0)
    assert [command.verb for command in desk.core] == [IDS, IDS], "the next core gets the tokens, too"
    assert len(desk.texts) == 1


def test_the_end_of_the_engine_ends_a_command_that_waits(desk: Desk) -> None:
    desk.say()
    desk.desk.core_lost("the engine stops")
    assert desk.got == [Refused(id="c1", code="NO_CORE", text="the engine stops")]
    desk.wait(1)
    desk.desk.texts.take(Encoded(id="c1", submit=IDS))
    assert len(desk.got) == 1 and not desk.core


NO_PROMPT = "this engine was started without a tokenizer: give prompt_token_ids"
NO_STOP = "stop texts need a tokenizer; this engine was started without one: use stop_token_ids"
NO_BAD_WORDS = "bad_words need a tokenizer; this engine was started without one: use bad_words_ids"


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        (TEXT, NO_PROMPT),
        (Submit(prompt="a", chat=True), NO_PROMPT),
        (IDS, NO_STOP),
        (Submit(prompt_token_ids=[1], sampling=SamplingParams(bad_words=["x"])), NO_BAD_WORDS),
    ],
)
def test_an_engine_without_a_tokenizer_refuses_texts(tmp_path: Path, verb: Submit, text: str) -> None:
    desk = Desk(tmp_path, absent=True)
    desk.say(verb)
    assert desk.got == [Refused(id="c1", code="INVALID", text=text)]
    desk.say(Submit(prompt_token_ids=[1]), name="c2")
    assert [command.id for command in desk.core] == ["c2"] and not desk.texts


def test_a_gateway_that_replaces_another_one_has_the_text_encoded_again(tmp_path: Path) -> None:
    first = Desk(tmp_path)
    first.say()
    second, unknown = Desk(tmp_path), Recalled(newest=0, replies=[], unknown=["c1"])
    assert second.desk.adopt() == ["c1"]
    second.desk.recalled(unknown, 1.0)
    second.desk.texts.take(Encoded(id="c1", submit=IDS))
    assert not second.core, "an answer to the gateway before it: no console has repeated the command"
    second.say()
    second.desk.texts.take(Encoded(id="c1", submit=IDS))
    assert [command.verb for command in second.core] == [IDS]
