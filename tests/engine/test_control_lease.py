"""The control lease, and the owner and the override of a command, at a gateway with keys of three roles."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from monitor_helpers import until
from ppengine.gateway import control_lease
from ppengine.gateway.audit import Entry, audit_file
from ppengine.gateway.control_lease import ControlLease
from ppengine.protocol import frames
from ppengine.protocol.allowed_keys import revoke
from ppengine.protocol.control import Accepted, Command, Hello, Outcome, Refused
from ppengine.protocol.json_files import decode_json
from ppengine.protocol.keys import keys_dir
from ppengine.protocol.snapshot import Events
from ppengine.protocol.verbs import Abort, Lease, Many, Pause, Preempt, Submit
from test_gateway_access import NAMED, client, core_reports, gateway


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with gateway(tmp_path_factory.mktemp("config")) as place:
        yield place


@pytest.fixture
def pair(shared):
    """Consoles of the operator and of the admin; no lease is held before and after."""
    with client(shared, NAMED["operator"]) as operator, client(shared, NAMED["admin"]) as admin:
        operator.hello("olga")
        admin.hello("ada")
        core_reports(shared, admin)
        yield operator, admin
        answers(admin, Lease(action="take", force=True))
        answers(admin, Lease(action="release"))


COUNT = iter(range(10_000))


def answers(console, verb, **fields):
    """Send a verb of the gateway itself; return its last answer."""
    answer = console.ask(console.command(verb, f"lease-{next(COUNT)}", **fields))
    return console.hear() if isinstance(answer, Accepted) else answer


def forwarded(place, console, verb, **fields):
    """Return the command as the core gets it, or its refusal."""
    identity = f"verb-{next(COUNT)}"
    core_reports(place, console)
    console.say(console.command(verb, identity, **fields))
    while not place[2].front.poll(10):
        if console.control.poll(10):
            return console.hear()
        place[2].report()
    message = place[2].next()
    assert isinstance(message, Command) and message.id == identity
    return message


# --- who a command is of ------------------------------------------------------------------------------------


def test_the_gateway_fills_in_the_key_and_its_role(shared, pair):
    forged = {"principal": "owner", "role": "admin"}
    got = forwarded(shared, pair[0], Pause(), **forged)
    assert (got.principal, got.role) == ("operator-key", "operator")
    got = forwarded(shared, pair[1], Pause())
    assert (got.principal, got.role) == ("admin-key", "admin")


def test_an_override_needs_a_reason_and_is_in_the_audit_log(shared, pair):
    for reason in ("", "   "):
        answer = forwarded(shared, pair[0], Abort(request="r"), override=True, reason=reason)
        assert isinstance(answer, Refused) and answer.code == "INVALID"
        assert answer.text == "an override needs a reason: --reason TEXT"
    got = forwarded(shared, pair[0], Abort(request="r"), override=True, reason="bob is away")
    assert got.override
    lines = audit_file(Path(shared[0].run_dir)).read_bytes().splitlines()
    line = next(one for one in (decode_json(line, Entry) for line in lines) if one.id == got.id)
    assert (line.override, line.reason, line.principal) == (True, "bob is away", "operator-key")


# --- the lease ----------------------------------------------------------------------------------------------


def test_a_lease_refuses_the_changes_of_others_and_nothing_else(shared, pair):
    operator, admin = pair
    taken = answers(operator, Lease(action="take", ttl_s=60.0))
    assert isinstance(taken, Outcome) and taken.state == "applied"
    for verb in (Pause(), Preempt(request="r"), Many(verbs=[Preempt(request="r")])):
        refused = forwarded(shared, admin, verb)
        assert isinstance(refused, Refused) and refused.code == "LEASED"
        assert refused.text.startswith("key operator-key (olga) holds the control lease for ")
        assert refused.text.endswith(" s more; ppconsole lease take --force takes it over")
    for verb, fields in ((Submit(prompt_token_ids=[1]), {}), (Pause(), {"dry_run": True})):
        assert isinstance(forwarded(shared, admin, verb, **fields), Command)
    assert isinstance(forwarded(shared, operator, Pause()), Command)
    assert answers(admin, Lease(action="release")).code == "LEASED"
    assert answers(operator, Lease(action="release")).state == "applied"
    assert isinstance(forwarded(shared, admin, Pause()), Command)


def test_under_a_lease_others_may_abort_their_own_requests_alone(shared, pair):
    operator, admin = pair
    answers(operator, Lease(action="take"))
    for verb in (Abort(request="r"), Many(verbs=[Abort(request="r")])):
        got = forwarded(shared, admin, verb)
        assert isinstance(got, Command) and (got.role, got.override) == ("operator", False)
        refused = forwarded(shared, admin, verb, override=True, reason="now")
        assert isinstance(refused, Refused) and refused.code == "LEASED"


def test_a_console_of_the_protocol_before_gets_a_code_that_it_knows(shared, pair):
    with client(shared, NAMED["admin"]) as old, client(shared, NAMED["admin"]) as new:
        for console, proto in ((old, 1), (new, 2)):
            welcome = console.ask(Hello(proto_min=1, proto_max=proto, client="t", user="eve"))
            assert welcome.proto == proto
        answers(pair[0], Lease(action="take"))
        assert [forwarded(shared, console, Pause()).code for console in (old, new)] == ["DENIED", "LEASED"]


def test_a_takeover_is_an_event_for_every_console(shared, pair):
    operator, admin = pair
    answers(operator, Lease(action="take"))
    with client(shared, NAMED["viewer"], (frames.TOPIC_EVENT, frames.TOPIC_SNAPSHOT)) as viewer:
        assert until(viewer.snapshot, 5.0).lease.principal == "operator-key"
        refused = answers(admin, Lease(action="take"))
        assert refused.code == "LEASED" and refused.text.endswith("; --force takes it over")
        taken = answers(admin, Lease(action="take", force=True), reason="incident 4")
        assert taken.state == "applied" and taken.text.endswith("; taken over from key operator-key")
        found = []
        while not found:
            topic, _, body = viewer.published()
            if topic == frames.TOPIC_EVENT:
                found = [one for one in frames.decode_as(Events, body).events if one.kind == "lease.takeover"]
        assert found[0].text == "key admin-key has taken the control lease from key operator-key: incident 4"
        until(lambda: viewer.snapshot().lease.principal == "admin-key", 5.0)
        assert forwarded(shared, operator, Pause()).code == "LEASED"


def test_a_viewer_takes_no_lease_and_a_revoked_holder_loses_it(tmp_path):
    with gateway(tmp_path) as place, client(place, NAMED["viewer"]) as viewer:
        viewer.hello()
        assert answers(viewer, Lease(action="take")).code == "DENIED"
        with client(place, NAMED["operator"]) as operator, client(place, NAMED["admin"]) as admin:
            operator.hello()
            admin.hello()
            answers(operator, Lease(action="take"))
            assert forwarded(place, admin, Pause()).code == "LEASED"
            revoke(keys_dir() / "allowed", "operator-key")
            assert isinstance(forwarded(place, admin, Pause()), Command)


# --- its time -----------------------------------------------------------------------------------------------


class Desk:
    """A lease with a clock of its own."""

    def __init__(self, monkeypatch, path):
        self.now, self.said, self.path, self.allowed = 100.0, [], path, True
        monkeypatch.setattr(control_lease, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.restart()

    def restart(self):
        self.lease = ControlLease(self.path, lambda *event: self.said.append(event), lambda name: self.allowed)

    def say(self, verb, who, **fields):
        command = Command(id="c", epoch="e", verb=verb, by=who, principal=who, role="operator", **fields)
        return self.lease.obstacle(command) or [*self.lease.handle(command, "op")][-1]

    def may(self, who):
        command = Command(id="c", epoch="e", verb=Pause(), by=who, principal=who, role="operator")
        return not self.lease.obstacle(command)


@pytest.fixture
def desk(monkeypatch, tmp_path):
    return Desk(monkeypatch, tmp_path / "lease.json")


def test_a_lease_ends_by_itself_unless_its_holder_uses_it(desk):
    desk.say(Lease(action="take", ttl_s=60.0), "alice")
    for _ in range(5):
        desk.now += 50.0
        assert not desk.may("bob") and desk.may("alice")
    assert desk.lease.info().left_s == 60.0
    desk.now += 60.0
    assert desk.lease.info() is None and desk.may("bob") and desk.may("alice")
    ended = ("lease.ended", "the control lease of key alice has ended, after 60 s without a verb")
    assert desk.said == [ended] and not desk.path.exists()


def test_another_gateway_goes_on_with_the_lease(desk):
    desk.say(Lease(action="take", ttl_s=60.0), "alice")
    desk.now += 30.0
    assert desk.may("alice")
    desk.restart()
    desk.now += 50.0
    assert not desk.may("bob"), "the renewal was kept, too"
    desk.restart()
    desk.now += 11.0
    assert desk.may("bob") and len(desk.said) == 1


def test_a_dry_run_and_a_release_without_a_lease_change_nothing(desk):
    assert desk.say(Lease(action="take"), "alice", dry_run=True).state == "planned"
    assert desk.lease.info() is None and not desk.path.exists()
    assert desk.say(Lease(action="release"), "alice").code == "NOT_FOUND"


def test_a_key_that_may_change_nothing_any_more_holds_no_lease(desk):
    desk.say(Lease(action="take"), "alice")
    desk.allowed = False
    desk.lease.expire()
    assert desk.said[-1][1].endswith("its key may change nothing any more") and desk.may("bob")


def test_a_damaged_file_is_no_lease_and_a_full_disk_refuses_none(desk, caplog, monkeypatch):
    desk.path.write_text('{"principal": 3}')
    with caplog.at_level(logging.WARNING):
        desk.restart()
    assert "cannot be read, it has ended" in caplog.text and desk.may("bob")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(control_lease, "write_file", full)
    assert desk.say(Lease(action="take"), "alice").state == "applied" and not desk.may("bob")
    assert "is not kept for another gateway" in caplog.text


@pytest.mark.parametrize("ttl", [0.0, 9.9, 3600.1, float("nan"), float("inf"), -1.0])
def test_a_time_out_of_range_is_refused(ttl):
    with pytest.raises(ValueError, match=r"ttl is .*; it must be 10 s to 1 h"):
        Lease(action="take", ttl_s=ttl)
