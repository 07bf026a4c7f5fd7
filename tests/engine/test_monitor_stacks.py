"""Stacks from outside: which thread is where, who holds the GIL, what is said where that cannot be seen."""

import contextlib
import subprocess
import sys
import textwrap
import time

import pytest
from monitor_helpers import until
from ppengine.agent import stack_dumps
from ppengine.common import procfs
from ppengine.diagnosis.evidence import Stack
from ppengine.gateway.stack_probe import NONCE, StackProbe, newest
from ppengine.protocol import frames
from ppengine.protocol.control import Failed, Inspected
from ppengine.protocol.inspection import StacksDetail, StageStacks, ThreadStack
from ppengine.protocol.snapshot import Verdict

TARGET = textwrap.dedent("""
    import ctypes, faulthandler, signal, sys, threading, time
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    faulthandler.register(signal.SIGUSR2, file=open(sys.argv[2], "a"))

    def ticking():
        while True:
            time.sleep(0.05)

    def keeps_the_gil():
        ctypes.PyDLL(None).usleep(ctypes.c_uint(60_000_000))

    def sleeps():
        time.sleep(60)

    threading.Thread(target=ticking, name="control", daemon=True).start()
    print("ready", flush=True)
    globals()[sys.argv[1]]()
""")


@contextlib.contextmanager
def target(what, stack_file):
    process = subprocess.Popen([sys.executable, "-c", TARGET, what, str(stack_file)], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        until(lambda: procfs.read_stat(process.pid, process.pid).state == "S", what="it sleeps")
        time.sleep(0.2)
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_the_self_test_says_what_is_possible():
    ability = stack_dumps.self_test()
    assert (ability.spy, ability.native) == (True, True) and "native" in ability.text


def test_the_self_test_says_why_not(monkeypatch):
    real = stack_dumps.spy

    def without_native(pid, *, native=False, stopped=False, timeout=1.0):
        return ([], "py-spy: Permission Denied") if native else real(pid, stopped=stopped, timeout=timeout)

    monkeypatch.setattr(stack_dumps, "spy", without_native)
    ability = stack_dumps.self_test()
    assert (ability.spy, ability.native) == (True, False) and "native ones not: py-spy: Permission" in ability.text
    monkeypatch.setattr(stack_dumps, "spy", lambda pid, **_: ([], "py-spy is not installed: pip install py-spy"))
    ability = stack_dumps.self_test()
    assert (ability.spy, ability.native) == (False, False) and "faulthandler alone: py-spy is not" in ability.text


@pytest.mark.parametrize("native", [True, False])
def test_who_holds_the_gil_and_where(tmp_path, native):
    with target("keeps_the_gil", tmp_path / "s") as pid:
        found = stack_dumps.take(0, pid, tmp_path / "s", native)
        assert found.native is native and found.error == ""
        assert [(thread.name, thread.owns_gil) for thread in found.threads] == [
            ("MainThread", True),
            ("control", False),
        ]
        assert ("usleep (libc.so.6)" in found.threads[0].frames) is native
        top = newest(found)
        assert top.pid == pid and any(frame.startswith("keeps_the_gil <string>:") for frame in top.main)
        assert top.gil_owner.startswith("MainThread at ")


def test_a_process_that_sleeps_holds_no_gil(tmp_path):
    with target("sleeps", tmp_path / "s") as pid:
        found = stack_dumps.take(0, pid, tmp_path / "s", True)
        assert not any(thread.owns_gil for thread in found.threads) and newest(found).gil_owner == ""
        assert found.text.splitlines()[0] == "MainThread"


def test_faulthandler_stands_in_also_while_the_gil_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_dumps, "_find", lambda: None)
    with target("keeps_the_gil", tmp_path / "s") as pid:
        found = stack_dumps.take(0, pid, tmp_path / "s", True)
        assert "taken by faulthandler instead" in found.error and not found.native
        assert found.threads[0].name == "MainThread"
        assert found.threads[0].frames[0].startswith("keeps_the_gil <string>:")
        assert len(found.threads) == 2


# --- for verdicts -------------------------------------------------------------------------------------------


def verdict(cause, stage=1, root=True):
    return Verdict(stage=stage, cause=cause, summary="x", since_s=1.0, root=root)


class Agent:
    """What the probe asks, and what it is told."""

    def __init__(self):
        self.asked, self.questions, self.refuses = [], [], ""
        self.probe = StackProbe(self.ask)

    def ask(self, question):
        if not self.refuses:
            assert (question.nonce, question.what) == (NONCE, "stacks")
            self.asked.append(question.stage)
            self.questions.append(question)
        return self.refuses

    def answer(self, stage, pid, *frame):
        thread = ThreadStack(name="MainThread", frames=list(frame), owns_gil=False)
        detail = StacksDetail(stages=[StageStacks(stage=stage, pid=pid, text="x", threads=[thread])])
        self.probe.take(Inspected(nonce=NONCE, what="stacks", data=frames.encode(detail)))


PIDS = {(0, 0): 100, (1, 0): 101, (2, 0): 102}


def test_a_core_that_stands_is_looked_at_and_one_that_is_held_up_is_not():
    agent = Agent()
    agent.probe.look([verdict("core", None)], PIDS)
    assert agent.questions == []
    agent.probe.look([verdict("core", None)], {**PIDS, None: 99})
    assert [(question.stage, question.core) for question in agent.questions] == [(None, True)]
    core = StageStacks(stage=None, pid=99, text="x", threads=[ThreadStack(name="MainThread", frames=["f a.py:1"])])
    detail = StacksDetail(stages=[], core=core)
    agent.probe.take(Inspected(nonce=NONCE, what="stacks", data=frames.encode(detail)))
    assert agent.probe.stacks == {(None, 99): Stack(pid=99, main=("f a.py:1",))}
    agent.probe.look([verdict("deadlock", 0)], {**PIDS, None: 99})
    assert [question.stage for question in agent.questions[1:]] == [0, 1, 2]


def test_stacks_are_taken_once_and_kept_until_the_fault_is_gone():
    agent = Agent()
    for _ in range(5):
        agent.probe.look([verdict("self_stuck")], PIDS)
    assert agent.asked == [1]
    agent.answer(1, 101, "f a.py:1")
    assert agent.probe.stacks == {(1, 101): Stack(pid=101, main=("f a.py:1",))}
    agent.probe.look([verdict("self_stuck")], PIDS)
    agent.probe.look([], PIDS)
    assert agent.probe.stacks == {} and agent.asked == [1]
    agent.answer(1, 101, "f a.py:1")
    assert agent.probe.stacks == {}, "late: nobody asks any more"
    agent.probe.look([verdict("gil_held")], PIDS)
    assert agent.asked == [1, 1]


def test_an_agent_that_cannot_be_asked_does_not_keep_the_others_from_it():
    """Stages of a deadlock on several nodes, of which one is away."""
    asked = []
    probe = StackProbe(lambda question: asked.append(question.stage) or ("away" if question.stage == 0 else ""))
    for _ in range(3):
        probe.look([verdict("deadlock", 0)], PIDS)
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("cause", ["dead", "stopped", "link", "mismatch", "starved", "straggler"])
def test_other_causes_stop_no_process(cause):
    agent = Agent()
    agent.probe.look([verdict(cause, root=cause != "starved")], PIDS)
    assert agent.asked == []


def test_who_waits_for_each_other_is_looked_at_together():
    agent = Agent()
    agent.probe.look([verdict("deadlock", 0)], PIDS)
    assert agent.asked == [0, 1, 2]
    agent.answer(0, 100, "f a.py:1")
    agent.answer(2, 102, "g a.py:1")
    assert set(agent.probe.stacks) == {(0, 100), (2, 102)}


def test_a_look_that_shows_no_frame_is_taken_again_a_few_times(monkeypatch):
    """A host may be too crowded for py-spy once."""
    agent, now = Agent(), [10.0]
    monkeypatch.setattr("ppengine.gateway.stack_probe.time.monotonic", lambda: now[0])

    def look(seconds):
        now[0] += seconds
        agent.probe.look([verdict("self_stuck", 1)], PIDS)
        return len(agent.asked)

    assert look(0) == 1
    agent.answer(1, 101)
    assert look(0.5) == 1 and look(0.6) == 2 and look(5) == 2, "the answer is still to come"
    agent.answer(1, 101, "f a.py:1")
    assert look(2) == 2 and agent.probe.stacks[1, 101].main == ("f a.py:1",)
    agent.probe.look([], PIDS)
    for _ in range(20):
        look(2)
        agent.answer(1, 101)
    assert len(agent.asked) == 2 + 6


def test_what_an_agent_does_not_answer_is_asked_again(monkeypatch):
    agent, now = Agent(), [10.0]
    monkeypatch.setattr("ppengine.gateway.stack_probe.time.monotonic", lambda: now[0])
    for seconds, asked in ((0, [0, 1, 2]), (29, [0, 1, 2]), (1.1, [0, 1, 2, 0, 2])):
        now[0] += seconds
        agent.probe.look([verdict("deadlock", 0)], PIDS)
        assert agent.asked == asked
        agent.answer(1, 101, "f a.py:1")


def test_an_agent_that_cannot_be_asked_is_asked_again_later(monkeypatch):
    agent, now = Agent(), [10.0]
    monkeypatch.setattr("ppengine.gateway.stack_probe.time.monotonic", lambda: now[0])
    agent.refuses = "the agent has not reported yet"
    agent.probe.look([verdict("undetermined")], PIDS)
    agent.refuses = ""
    agent.probe.look([verdict("undetermined")], PIDS)
    assert agent.asked == []
    now[0] += 1.1
    agent.probe.look([verdict("undetermined")], PIDS)
    assert agent.asked == [1]
    agent.probe.take(Failed(nonce=NONCE, code="FAILED", text="no"))
    assert agent.probe.stacks == {}
