"""A gateway that replaces another one: its events, the commands of its predecessor, consoles that come back."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import msgspec
import pytest
from kept_objects import lists_of
from monitor_helpers import PRINCIPAL
from ppengine.core.answers import Answers
from ppengine.core.event_feed import EventFeed
from ppengine.diagnosis.fault_log import FaultLog
from ppengine.gateway.audit import ENDS, AuditLog, Entry, audit_file
from ppengine.gateway.commands import REPEAT_S, CommandDesk
from ppengine.gateway.control_lease import ControlLease
from ppengine.gateway.event_journal import FILE, OLDER, EventJournal
from ppengine.gateway.event_journal import Entry as Numbered
from ppengine.gateway.event_log import EventLog
from ppengine.gateway.history import History
from ppengine.gateway.incident_log import IncidentLog, Numbers
from ppengine.gateway.sessions import ATTACHED_S, Sessions
from ppengine.gateway.succession import WAIT_S, Succession
from ppengine.protocol import frames
from ppengine.protocol.control import Accepted, Command, Deferred, Hello, Outcome, Refused, Reply
from ppengine.protocol.facts import Exited, Serving
from ppengine.protocol.inspection import FaultDetail
from ppengine.protocol.place import Place
from ppengine.protocol.reports import Attended, Happened, Recall, Recalled
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event, Verdict
from ppengine.protocol.verbs import Continue, Pause, Submit


def event(text: str) -> Event:
    return Event(seq=0, wall=1.0, kind="test", text=text)


def happened(first: int, count: int, oldest: int = 1) -> Happened:
    return Happened(events=[event(f"c{first + k}") for k in range(count)], first=first, oldest=oldest)


# --- events -------------------------------------------------------------------------------------------------


def test_events_go_on_with_their_numbers_wherever_the_file_is_cut(tmp_path: Path) -> None:
    log = EventLog(lambda one: None, journal=EventJournal(tmp_path, 100))
    log.say("test", "mine")
    log.take(happened(1, 2))
    whole, sizes = (tmp_path / FILE).read_bytes(), []
    for entry in EventJournal(tmp_path, 100).restored:
        sizes.append(4 + len(frames.encode(entry)))
    for cut in range(len(whole) + 1):
        (tmp_path / FILE).write_bytes(whole[:cut])
        journal = EventJournal(tmp_path, 100)
        log = EventLog(lambda one: None, journal=journal)
        left = sum(cut >= end for end in itertools.accumulate(sizes))
        assert (log.newest, log.core) == (left, max(0, left - 1)), "half a record is none"
        log.take(happened(1, 3))
        reader = EventJournal(tmp_path, 100)
        assert [one.event.text for one in reader.restored][-3:] == ["c1", "c2", "c3"]
        assert log.newest == max(left, 1) + (3 - max(0, left - 1)) - (left == 0)
        journal.close()
        reader.close()


def test_the_journal_keeps_two_files_of_bounded_length(tmp_path: Path) -> None:
    journal = EventJournal(tmp_path, 10)
    assert not journal.follows
    for number in range(1, 48):
        journal.write([Numbered(msgspec.structs.replace(event("x"), seq=number))])
    journal.close()
    again = EventJournal(tmp_path, 10)
    assert again.follows and [one.event.seq for one in again.restored] == list(range(38, 48))
    assert (tmp_path / OLDER).stat().st_size <= 10 * 100


def test_the_number_of_the_core_outlives_its_events(tmp_path: Path) -> None:
    log = EventLog(lambda one: None, kept=5, journal=EventJournal(tmp_path, 5))
    log.take(happened(1, 3))
    for _ in range(20):
        log.say("test", "mine")
    again = EventLog(lambda one: None, kept=5, journal=EventJournal(tmp_path, 5))
    assert (again.newest, again.core, again.oldest) == (23, 3, 19)
    again.take(happened(1, 4))
    assert again.newest == 24, "the core says three of them again"


def test_events_of_the_core_count_once_and_a_gap_is_asked_for() -> None:
    texts: list[str] = []
    log = EventLog(lambda one: texts.append(one.text))
    log.take(happened(1, 3))
    log.take(happened(2, 3))
    log.take(happened(1, 2))
    assert texts == ["c1", "c2", "c3", "c4"] and not log.lacks
    log.take(happened(7, 2))
    assert log.lacks and log.core == 4, "5 and 6 come first"
    log.take(happened(5, 4))
    assert texts[4:] == ["c5", "c6", "c7", "c8"]
    log.take(happened(20, 1, oldest=20))
    assert texts[-1] == "c20" and log.core == 20, "the core itself has no older one"


def test_the_core_pushes_again_what_a_gateway_lacks() -> None:
    feed = EventFeed()
    for number in range(1, 2502):
        feed.add(event(f"c{number}"))
    assert [(one.first, len(one.events)) for one in feed.pending()] == [(1, 1000), (1001, 1000), (2001, 501)]
    assert feed.pending() == []
    assert [(one.first, len(one.events)) for one in feed.after(2400)] == [(2401, 101)]
    for number in range(2502, 12_002):
        feed.add(event(f"c{number}"))
    first = feed.after(5)[0]
    assert (first.first, first.oldest, first.events[0].text) == (2002, 2002, "c2002"), "the newest 10,000"


# --- commands -----------------------------------------------------------------------------------------------


class Killed(Exception):
    """The gateway ends here."""


class Core:
    """Carries out a command and answers it, as `core/dispatcher.py` does."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.answers = Answers(lambda client, reply: self.sent.append(reply))
        self.carried_out: list[str] = []

    def handle(self, command: Command) -> None:
        if not self.answers.repeat(b"gateway", command.id):
            self.carried_out.append(command.id)
            self.answers(b"gateway", Accepted(id=command.id, op="op-1"))
            self.answers(b"gateway", Outcome(id=command.id, op="op-1", state="applied", text="done"))


class Killable:
    """One gateway's desk, killed at the moment with that number: before or after a line, a send or an answer."""

    def __init__(self, folder: Path, core: Core, moment: int | None) -> None:
        self.core, self.left, self.got = core, moment, list[object]()
        audit = AuditLog(folder, "engine", "id", {})
        write = audit.write
        audit.write = lambda entry, **options: self.step(lambda: write(entry, **options))  # type: ignore[method-assign,assignment]
        self.sessions = Sessions(lambda what, session: None)
        self.events = EventLog(lambda one: None)
        lease = ControlLease(folder / "lease.json", self.events.say, lambda name: True)
        self.desk = CommandDesk(
            "epoch", audit, self.events, self.sessions, self.answer, self, lease  # type: ignore[arg-type]
        )  # fmt: skip
        self.session = self.sessions.hello(
            b"c", Hello(proto_min=1, proto_max=1, client="t", user="eve"), 0.0, PRINCIPAL
        )

    def step(self, effect) -> None:
        for act in (effect, lambda: None):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise Killed
            act()

    def answer(self, client: bytes, reply: object) -> None:
        self.step(lambda: self.got.append(reply))

    def core_away(self) -> str:
        return ""

    def core_missing(self) -> str:
        return ""

    def forward(self, command: Command) -> bool:
        self.step(lambda: self.core.handle(command))
        return True

    def stage_processes(self, stage: int) -> dict[str, tuple[int, int]]:
        return {}

    def say(self, command: Command) -> None:
        self.desk.handle(b"c", frames.header("id", "epoch"), command, self.session)
        self.pass_on()

    def pass_on(self) -> None:
        while self.core.sent:
            self.desk.on_reply(self.core.sent.pop(0))  # type: ignore[arg-type]

    def follow(self, now: float = 0.0) -> None:
        recalls: list[Recall] = []
        succession = Succession(True, self.events, self.desk, self.sessions, lambda one: recalls.append(one) is None)
        assert not succession.turn(now)
        replies, unknown = self.core.answers.of(recalls[0].commands)
        self.core.sent.clear()
        succession.take(Recalled(newest=0, replies=replies, unknown=unknown), now)
        assert succession.turn(now)


class Journalled(Core):
    """A core that is killed at the moment with that number: what it has not written has not happened."""

    def __init__(self, moment: int | None) -> None:
        super().__init__()
        self.left, self.dead = moment, False
        self.written: tuple[list[Reply], list[str]] = [], []

    def handle(self, command: Command) -> None:
        if self.dies():
            return
        super().handle(command)
        if self.dies():
            return
        self.written = self.answers.kept(), list(self.carried_out)
        self.dies()

    def dies(self) -> bool:
        self.left = None if self.left is None else self.left - 1
        self.dead = self.dead or self.left == -1
        if self.dead:
            self.sent.clear()
        return self.dead

    def successor(self) -> Core:
        core = Core()
        for reply in self.written[0]:
            core.answers.keep(reply)
        core.carried_out = self.written[1]
        return core


@pytest.mark.parametrize("moment", [0, 1, 2, None])
def test_a_command_has_one_effect_and_one_end_wherever_its_core_is_killed(tmp_path: Path, moment: int | None) -> None:
    first = Journalled(moment)
    gateway = Killable(tmp_path, first, None)
    gateway.say(pause())
    second = gateway.core = first.successor()
    replies, unknown = second.answers.of(gateway.desk.open())
    gateway.desk.recalled(Recalled(newest=0, replies=replies, unknown=unknown), 0.0)
    gateway.desk.core_back()
    gateway.pass_on()
    assert second.carried_out == ["1"]
    assert [one for one in gateway.got if isinstance(one, Outcome)][-1].state == "applied"
    assert [line.outcome for line in lines(tmp_path)] == ["received", "accepted", "applied"]


def lines(folder: Path) -> list[Entry]:
    return [msgspec.json.decode(line, type=Entry) for line in audit_file(folder).read_bytes().splitlines()]


def pause() -> Command:
    return Command(id="1", epoch="epoch", verb=Pause(), by="eve")


def test_a_command_is_carried_out_once_wherever_its_gateway_is_killed(tmp_path: Path) -> None:
    for moment in itertools.count():
        folder, core = tmp_path / str(moment), Core()
        first = Killable(folder, core, moment)
        try:
            first.say(pause())
        except Killed:
            core.sent.clear()
        else:
            break
        second = Killable(folder, core, None)
        second.follow()
        second.say(pause())
        assert core.carried_out == ["1"], f"killed at moment {moment}"
        assert [one for one in second.got if isinstance(one, Outcome)][-1].state == "applied"
        outcomes = [line.outcome for line in lines(folder)]
        assert outcomes == ["received", "accepted", "applied"], f"killed at moment {moment}: {outcomes}"
        third = Killable(folder, core, None)
        third.follow()
        assert [line.outcome for line in lines(folder)] == outcomes, "a third gateway finds nothing open"
    assert moment >= 10, "lines, sends and answers"


def test_a_command_that_no_console_repeats_is_refused_in_the_end(tmp_path: Path) -> None:
    core = Core()
    with pytest.raises(Killed):
        Killable(tmp_path, core, 2).say(pause())
    second = Killable(tmp_path, core, None)
    second.follow(now=5.0)
    second.desk.expire(5.0 + REPEAT_S)
    assert [line.outcome for line in lines(tmp_path)] == ["received"], "its console may come"
    second.desk.expire(5.1 + REPEAT_S)
    assert [line.outcome for line in lines(tmp_path)] == ["received", "refused"]
    second.say(pause())
    assert isinstance(second.got[-1], Refused) and core.carried_out == []


def test_a_command_of_the_gateway_itself_ends_as_not_known(tmp_path: Path) -> None:
    core = Core()
    with pytest.raises(Killed):
        Killable(tmp_path, core, 1).say(Command(id="2", epoch="epoch", verb=Continue(stage=0), by="eve"))
    second = Killable(tmp_path, core, None)
    second.follow()
    end = lines(tmp_path)[-1]
    assert end.outcome in ENDS and "how far it came is not known" in end.text


def test_another_command_with_a_known_id_is_a_conflict_for_the_next_gateway_too(tmp_path: Path) -> None:
    core = Core()
    Killable(tmp_path, core, None).say(pause())
    second = Killable(tmp_path, core, None)
    second.follow()
    second.say(Command(id="1", epoch="epoch", verb=Pause(mode="keep"), by="eve"))
    assert isinstance(second.got[-1], Refused) and second.got[-1].code == "CONFLICT"


PROMPT = [(7 * place) % 90 + 300 for place in range(300)]


def submit(*keys: int, prompt: list[int] = PROMPT) -> Command:
    """Return a submission as it comes: with objects of its own, and a bias for tokens in the order of `keys`."""
    sampling = SamplingParams(logit_bias={key: key / 2 for key in keys})
    return Command(
        id="1", epoch="epoch", verb=Submit(prompt_token_ids=list(prompt), request="r-1", sampling=sampling), by="eve"
    )


def test_a_command_that_has_ended_leaves_no_prompt_and_is_still_repeated(tmp_path: Path) -> None:
    core = Core()
    gateway = Killable(tmp_path, core, None)

    def prompts() -> int:
        return lists_of(PROMPT, gateway.desk, gateway, core)

    handle, core.handle = core.handle, lambda command: None  # type: ignore[method-assign]
    gateway.say(submit(3, 5))
    assert prompts() == 1, "a core that comes back is sent it again"
    handle(submit(3, 5))
    gateway.pass_on()
    assert prompts() == 0
    first = list(gateway.got)
    assert [type(one) for one in first] == [Accepted, Outcome]
    core.handle = handle  # type: ignore[method-assign]
    gateway.say(submit(3, 5))
    gateway.say(submit(5, 3))
    assert gateway.got == first * 3, "the order of keys makes no other command"
    for other in (submit(3, 6), submit(3, 5, prompt=[*PROMPT[:-1], 1])):
        gateway.say(other)
        assert isinstance(gateway.got[-1], Refused) and gateway.got[-1].code == "CONFLICT"
    assert core.carried_out == ["1"] and prompts() == 0


def test_a_refused_command_that_waited_for_a_core_is_not_sent_to_the_next_one(tmp_path: Path) -> None:
    core = Core()
    gateway = Killable(tmp_path, core, None)
    gateway.core_away = lambda: "the core is restarted"  # type: ignore[method-assign]
    gateway.say(submit(3))
    gateway.desk.core_lost("the engine has ended")
    assert isinstance(gateway.got[-1], Refused)
    gateway.core_away = lambda: ""  # type: ignore[method-assign]
    gateway.desk.core_back()
    gateway.desk.expire(time.monotonic() + 1000.0)
    assert core.carried_out == [] and len(gateway.got) == 1, "one end"


def test_a_command_that_ended_with_its_engine_is_not_begun_by_a_repeat(tmp_path: Path) -> None:
    core = Core()
    with pytest.raises(Killed):
        Killable(tmp_path, core, 2).say(pause())
    second = Killable(tmp_path, core, None)
    second.follow(now=5.0)
    second.desk.core_lost("the engine has ended")
    second.desk.expire(5.1 + REPEAT_S)
    second.say(pause())
    assert isinstance(second.got[-1], Refused) and core.carried_out == []
    assert [line.outcome for line in lines(tmp_path)] == ["received", "refused"], "one end"


def test_the_next_gateway_repeats_a_submission_that_has_ended(tmp_path: Path) -> None:
    core = Core()
    Killable(tmp_path, core, None).say(submit(3, 5))
    second = Killable(tmp_path, core, None)
    second.follow()
    second.say(submit(5, 3))
    assert isinstance(second.got[-1], Outcome) and core.carried_out == ["1"]


def test_consoles_wait_a_moment_for_a_core_that_is_stopped() -> None:
    asked: list[Recall] = []
    desk = type("Desk", (), {"adopt": lambda self: []})()
    succession = Succession(
        True, EventLog(lambda one: None), desk, Sessions(lambda *said: None), lambda one: not asked.append(one)
    )
    assert not succession.turn(0.0) and not succession.turn(0.4) and len(asked) == 1
    assert not succession.turn(0.6) and len(asked) == 2, "it is asked again"
    assert succession.turn(0.1 + WAIT_S) and len(asked) == 2, "less often from time to time"
    assert succession.turn(1.7) and len(asked) == 3
    fresh = Succession(
        False, EventLog(lambda one: None), desk, Sessions(lambda *said: None), lambda one: not asked.append(one)
    )
    assert fresh.turn(0.0) and len(asked) == 3, "the first gateway has nothing to ask"


def test_a_core_that_boots_for_a_minute_is_asked_few_times_and_its_successor_at_once() -> None:
    asked: list[Recall] = []
    desk = type("Desk", (), {"open": lambda self: [], "recalled": lambda *given: None})()
    succession = Succession(
        False, EventLog(lambda one: None), desk, Sessions(lambda *said: None), lambda one: not asked.append(one)
    )
    succession.core_ended(7)
    for turn in range(600):
        succession.turn(turn / 10)
    assert 4 < len(asked) <= 12
    succession.core_ended(8)
    for now in (60.0, 60.6):
        succession.turn(now)
    before = asked[-2:]
    succession.take(Recalled(newest=0, replies=[], unknown=[], pid=9), 61.0)
    succession.turn(70.0)
    assert asked[-2:] == before and len(asked) <= 14, "it has answered"


def test_answers_are_bounded_and_those_without_an_end_stay() -> None:
    sent: list[object] = []
    answers = Answers(lambda client, reply: sent.append(reply), kept=3)
    answers(b"g", Accepted(id="open", op="o"))
    for text in ("a", "b"):
        answers(b"g", Deferred(id="open", op="o", text=text))
    for number in range(5):
        answers(b"g", Refused(id=f"{number}", code="BUSY", text=""))
    assert not answers.repeat(b"g", "0") and answers.repeat(b"g", "4")
    replies, unknown = answers.of(["open", "0"])
    assert [type(one) for one in replies] == [Accepted, Deferred] and replies[1].text == "b" and unknown == ["0"]


def test_newer_commands_do_not_push_out_one_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppengine.gateway.commands.KEPT", 3)
    core = Core()
    gateway = Killable(tmp_path, core, None)
    handle, core.handle = core.handle, lambda command: None  # type: ignore[method-assign]
    gateway.say(msgspec.structs.replace(pause(), id="open"))
    core.handle = handle  # type: ignore[method-assign]
    for number in range(5):
        gateway.say(msgspec.structs.replace(pause(), id=f"{number}"))
    assert gateway.desk.open() == ["open"] and len(gateway.desk._kept) == 3
    end = Outcome(id="open", op="op-1", state="applied", text="done")
    assert gateway.desk.on_reply(end) and gateway.got[-1] == end


# --- consoles, faults, incidents --------------------------------------------------------------------------------


def test_a_console_that_comes_back_keeps_its_requests_and_another_loses_them() -> None:
    said: list[tuple[str, list[str]]] = []
    sessions = Sessions(lambda what, session: said.append((what, list(session.requests))))
    attended = [Attended(request=f"r-{one}", console=one, user="eve") for one in ("comes", "goes")]
    sessions.expect(attended, 0.0)
    sessions.expect(attended, 0.0)
    sessions.hello(b"1", Hello(proto_min=1, proto_max=1, client="t", user="eve", console="comes"), 1.0, PRINCIPAL)
    sessions.ping(b"1", 9.0)
    sessions.count(0.1 + ATTACHED_S)
    assert said == [("attached", ["r-comes"]), ("detached", ["r-goes"])]
    sessions.hello(b"2", Hello(proto_min=1, proto_max=1, client="t", user="eve", console="comes"), 12.0, PRINCIPAL)
    assert sessions.get(b"1") is None and sessions.get(b"2").requests == ["r-comes"], "its link broke"
    sessions.hello(b"3", Hello(proto_min=1, proto_max=1, client="t", user="mallory", console="comes"), 13.0, PRINCIPAL)
    assert sessions.get(b"3").requests == [] and sessions.get(b"2") is not None


def test_a_fault_that_was_over_before_this_gateway_is_no_news() -> None:
    end = Exited(mono_ns=100, role="stage", place=Place(1, 0), generation=1, pid=7, exit_code=-9)
    places = ((Place(0, 0), 1), (Place(1, 0), 2))
    served = Serving(mono_ns=200, generation=2, processes=places, took_s=0.1, recomputed=0)
    for since_ns, news in ((150, True), (200, False), (900, False)):
        log = FaultLog(since_ns)
        log.take(served)
        log.take(end)
        assert (log.end((1, 0), 1000) is not None) == news


def test_an_incident_goes_on_over_its_gateway(tmp_path: Path) -> None:
    def incidents() -> IncidentLog:
        return IncidentLog(tmp_path, History(tmp_path / "history", "id", "engine", 0, 1), Numbers(tmp_path))

    verdict = Verdict(
        stage=1, cause="stopped", summary="stage 1 is stopped", since_s=0.5, evidence=[], suggest="", root=True
    )  # fmt: skip
    first = incidents()
    first.look(FaultDetail(number=1, wall=time.time(), verdict=verdict, waits=[], retired=[]), [verdict])
    second = incidents()
    fault = second.resumed
    assert fault is not None and fault.verdict.summary == verdict.summary and second.newest.number == 1
    second.look(fault, [verdict])
    assert [path.name for path in (tmp_path / "incidents").iterdir()] == ["1"]
    fault.over_wall = time.time()
    second.look(fault, [])
    third = incidents()
    assert third.newest.number == 1 and third.newest.over_wall is not None
    third.look(third.resumed, [])
    assert len(list((tmp_path / "incidents").iterdir())) == 1
