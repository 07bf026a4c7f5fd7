"""Faults on demand: the table of kinds, where they may strike, the stand-ins, and who refuses."""

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
import zmq
from monitor_helpers import Client, FakeCore, make_config, remove, started, until
from ppengine.common.groups import Groups
from ppengine.drills import cgroups
from ppengine.drills.fault_points import Fault, Points, StageParts
from ppengine.drills.registry import FaultError, Kind, edge_of, find, kinds, strike
from ppengine.protocol.control import Failed, Inspect, Refused
from ppengine.protocol.inspection import FaultsDetail
from ppengine.protocol.snapshot import Cause
from ppengine.protocol.verbs import Fault as FaultVerb

GATEWAY = "ppengine.gateway"


def test_table_of_kinds():
    table = kinds()
    assert len(table) >= 24
    assert 3 * sum(kind.held_out for kind in table.values()) >= len(table), "a third is held out"
    for name, kind in table.items():
        assert name == kind.name == kind.name.lower()
        assert kind.does.endswith("."), name
        assert kind.verdict.endswith("."), name
        assert set(kind.expects) <= set(get_args(Cause)), name
        assert kind.expects or kind.effect == "none", f"{name}: an operator must read something"
        assert (kind.how == "strike") == bool(kind.point), name
        assert any(kind.fits(stage, 2) for stage in (0, 1)), name
        info = kind.info()
        assert (info.kind, info.does, info.told) == (name, kind.does, kind.verdict)


def test_kind_needs_a_docstring_with_a_verdict():
    with pytest.raises(ValueError, match="Verdict"):
        strike("send", "hang", "self_stuck")(lambda: None)
    with pytest.raises(ValueError, match="no point 'nowhere'"):
        strike("nowhere", "hang", "self_stuck")
    with pytest.raises(ValueError, match="no cause 'tired'"):
        strike("send", "hang", "tired")


@pytest.mark.parametrize(
    ("name", "stage", "text"),
    [
        ("sleep-before-send", None, "say which with --stage, 0 to 3"),
        ("sleep-before-send", 4, "no stage 4: this engine has 0 to 3"),
        ("sleep-before-send", -1, "no stage -1"),
        ("drop-send", 3, "a stage before the last, stage 3 of 4 is none"),
        ("drop-token-return", 2, "the last stage, stage 2 of 4 is none"),
        ("wrong-metadata", 0, "a stage after the first"),
        ("core-stop", 1, "strikes the core: leave --stage out"),
        ("lookup-in-step", 1, "strikes the core: leave --stage out"),
        ("store-kill", None, "strikes the store of a stage: say which with --stage, 0 to 3"),
        ("store-kill", 4, "no stage 4: this engine has 0 to 3"),
    ],
)
def test_place_that_does_not_fit_is_refused(name, stage, text):
    with pytest.raises(FaultError, match=text):
        find(name).check(stage, Groups(4))


def test_unknown_kind_names_the_nearest():
    with pytest.raises(FaultError, match=r"no fault 'sigkil'; did you mean sigkill"):
        find("sigkil")
    with pytest.raises(FaultError, match="--list"):
        find("x" * 1000)


def test_pair_is_the_edge_behind_a_stage():
    assert [edge_of(stage, 4) for stage in range(4)] == [(0, 1), (1, 2), (2, 3), (2, 3)]
    assert find("send-cycle").stages(3, 4) == (2, 3)
    assert find("sigkill").stages(3, 4) == (3,)
    assert find("core-stop").stages(0, 4) == ()
    with pytest.raises(FaultError):
        find("link-reset").check(0, Groups(1))


# --- points -------------------------------------------------------------------------------------------------


def fault(act) -> Fault:
    kind = Kind(name="x", how="strike", act=act, does="", verdict="", effect="hang", expects=(), clears=True)
    return Fault(kind, StageParts(0, 2, None, None), 0)


def test_fault_strikes_in_place_of_what_is_done_until_it_is_lifted():
    points, one = Points(), fault(lambda fault, go, *args: ("struck", args))
    assert points.through("send", divmod, 7, 2) == (3, 1)
    points.add(one, "send")
    assert points.through("send", divmod, 7, 2) == ("struck", (7, 2))
    assert points.through("receive", divmod, 7, 2) == (3, 1)
    points.lift(one)
    assert points.through("send", divmod, 7, 2) == (3, 1)


def test_lift_lets_go_who_waits():
    points, done = Points(), threading.Event()

    def act(fault, go, *args):
        fault.hold()
        return go(*args)

    one = fault(act)
    points.add(one, "send")
    thread = threading.Thread(target=lambda: points.through("send", done.set))
    thread.start()
    assert not done.wait(0.1)
    points.lift(one)
    assert done.wait(60)
    thread.join()


def test_what_was_kept_back_is_done_in_order_by_the_step_loop():
    points, sent = Points(), []
    one = fault(lambda fault, go, *args: fault.late.append(lambda: go(*args)))
    points.add(one, "ack")
    points.through("ack", sent.append, 1)
    points.through("ack", sent.append, 2)
    points.lift(one)
    points.through("ack", sent.append, 3)
    assert sent == [3], "only the step loop's poll sends: sockets belong to one thread"
    points.through("poll", lambda: None)
    assert sent == [3, 1, 2]


def test_what_was_kept_aside_is_done_before_what_comes_after():
    points, sent = Points(), []
    one = fault(lambda fault, go, *args: fault.keep(lambda: go(*args)))
    points.add(one, "send")
    points.through("send", sent.append, 1)
    assert sent == []
    points.lift(one)
    one.strike(sent.append, 2)  # was on its way while the fault was lifted
    points.through("send", sent.append, 3)
    assert sent == [1, 2, 3]


def test_dropped_message_is_sent_late_with_its_own_checksum():
    sent, sender = [], SimpleNamespace(checksum=0)
    one = Fault(find("drop-send"), StageParts(0, 2, None, None, sender=sender), 0)
    for step in (1, 2):
        sender.checksum = 10 * step
        one.strike(lambda step, tensor: sent.append((step, sender.checksum)), step, torch.zeros(2))
    sender.checksum = 30
    one.lift()
    assert sent == [(1, 10), (2, 20)] and sender.checksum == 30


# --- cgroups ------------------------------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Return `make(listing)`: a folder that looks like the cgroups of a process whose /proc/PID/cgroup is `listing`."""

    def make(listing, *folders):
        for folder in folders:
            (tmp_path / folder).mkdir(parents=True)
            (tmp_path / folder / "cgroup.procs").touch()
        read = Path.read_text
        monkeypatch.setattr(cgroups, "ROOT", tmp_path)
        monkeypatch.setattr(Path, "read_text", lambda self: listing if self.match("/proc/*/cgroup") else read(self))
        return tmp_path

    return make


def test_group_is_made_below_the_processes_own(tree):
    root = tree("3:cpu:/a\n0::/\n", "cpu/a")
    leave = cgroups.throttle(1234, 0.1)
    made = root / "cpu" / "a" / "ppfault-1234-cpu"
    assert (made / "cgroup.procs").read_text() == "1234"
    assert [(made / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")] == ["10000", "100000"]
    leave()
    assert (root / "cpu" / "a" / "cgroup.procs").read_text() == "1234", "back where it was"


def test_small_share_gets_the_longest_period(tree):
    root = tree("3:cpu:/a\n", "cpu/a")
    cgroups.throttle(1234, 0.001)
    made = root / "cpu" / "a" / "ppfault-1234-cpu"
    assert [(made / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")] == ["1000", "1000000"]


def test_second_version_of_cgroups(tree):
    root = tree("0::/user\n", "user")
    (root / "user" / "cgroup.controllers").write_text("cpu memory\n")
    cgroups.throttle(7, 0.5)
    assert (root / "user" / "cgroup.subtree_control").read_text() == "+cpu"
    assert (root / "user" / "ppfault-7-cpu" / "cpu.max").read_text() == "50000 100000"
    cgroups.limit_memory(7, 4096)
    assert (root / "user" / "ppfault-7-memory" / "memory.max").read_text() == "4096"
    thaw = cgroups.freeze(7)
    frozen = root / "user" / "ppfault-7-freezer" / "cgroup.freeze"
    assert frozen.read_text() == "1"
    thaw()
    assert frozen.read_text() == "0"


def test_memory_limit_of_the_first_version(tree):
    root = tree("4:memory:/a\n", "memory/a")
    cgroups.limit_memory(9, 4096)
    made = root / "memory" / "a" / "ppfault-9-memory"
    assert (made / "memory.limit_in_bytes").read_text() == "4096"
    assert (made / "cgroup.procs").read_text() == "9"


def test_group_that_may_not_be_made_is_refused(tree):
    tree("3:cpu:/gone\n", "cpu/a")
    with pytest.raises(FaultError, match="no cpu cgroup can be made below"):
        cgroups.throttle(1234, 0.1)
    with pytest.raises(FaultError, match="in no cgroup with the controller memory"):
        cgroups.limit_memory(1234, 1)


def test_controller_that_is_not_handed_down_is_refused(tree):
    tree("0::/user\n", "user")
    with pytest.raises(FaultError, match="no controller memory that may be used here"):
        cgroups.limit_memory(1234, 1)


# --- who refuses --------------------------------------------------------------------------------------------


def test_engine_without_the_option_refuses_and_says_how():
    config = make_config()
    try:
        with zmq.Context() as context, started(GATEWAY, config):
            core = FakeCore(context, config)
            until(lambda: Path(config.run_dir, "bulk").exists(), 10.0, "the gateway opens its sockets")
            client = Client(context, config, ()).open()
            client.hello("eve")
            core.report()
            reply = client.ask(client.command(FaultVerb(kind="sigkill", stage=0), "f1"))
            assert isinstance(reply, Refused)
            assert reply.code == "DENIED"
            assert "ppconsole serve PROFILE --allow-faults" in reply.text
            listing = client.ask(Inspect(nonce=1, what="faults"), socket=client.bulk)
            assert isinstance(listing, Failed)
            assert listing.code == "DENIED"
            assert not Path(config.run_dir, "faults").exists()
            client.close()
            core.close()
    finally:
        remove(config)


@pytest.mark.parametrize("module", ["ppengine.stage.worker", "ppengine.gateway", "ppengine.core.__main__"])
def test_nothing_of_it_is_imported_with_a_process(module):
    code = f"import {module}, sys; print([name for name in sys.modules if name.startswith('ppengine.drills')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_table_of_kinds_brings_no_torch():
    """The gateway reads it at the first command, and answers no console while it imports torch."""
    code = "import sys; from ppengine.drills.registry import kinds; kinds(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_listing_fits_a_frame():
    from ppengine.protocol import frames

    body = frames.encode(FaultsDetail(faults=[kind.info() for kind in kinds().values()], on=[]))
    assert len(body) < frames.MAX_FRAME_BYTES
