"""Packages of backends that end their store: the end names the call, and two in a row pause the backend."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ppengine.common.call_page import SLOTS, CallPage, page_path, take_calls
from ppengine.common.child_process import Child
from ppengine.gateway.backend_guard import AGAIN_S, BackendGuard
from ppengine.protocol.backend_calls import BackendCall, while_text
from ppengine.protocol.facts import Exited
from ppengine.protocol.reports import ProcessInfo
from ppengine.protocol.store_messages import Delete, UseBackends
from ppengine.protocol.store_messages import Test as Trial
from ppengine.protocol.store_verbs import StorePause
from ppengine.store.backend import Layout
from ppengine.store.lane import Lane
from store_world import KEY, FakeBackend, World, put, spec

WRITE = BackendCall("write", "b1")
PROGRAM = """
import os, sys, threading
from pathlib import Path
from ppengine.common.call_page import CallPage, page_path

page, begun = CallPage(page_path(Path(sys.argv[1]))), threading.Event()

def read():
    with page.call("read", "b0"):
        pass
    begun.set()

threading.Thread(target=read).start()
begun.wait()
with page.call("write", "b1"):
    {end}
"""


def end_of(folder: Path, end: str) -> ProcessInfo:
    """Return what its parent reports of a process that ends within a write."""
    log = folder / "store0.1.log"
    log.touch()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(end=end), str(log)])
    process.wait(60.0)
    child = Child(process, log, os.pipe()[1])
    info = child.info("store0.1")
    assert child.info("store0.1") == info, "a later look finds the same"
    child.close()
    return info


@pytest.mark.parametrize(
    ("end", "detail"),
    [("os._exit(3)", "exit code 3 while write of b1 was under way"),
     ("os._exit(0)", "exit code 0 while write of b1 was under way"),
     ("os.kill(os.getpid(), 11)", "killed by SIGSEGV while write of b1 was under way")],
)  # fmt: skip
def test_an_end_names_the_call_that_was_under_way(tmp_path: Path, end: str, detail: str) -> None:
    info = end_of(tmp_path, end)
    assert (info.detail, info.calls) == (detail, [WRITE])


@pytest.mark.parametrize(
    ("end", "detail"),
    [("os.kill(os.getpid(), 9)", "killed by SIGKILL"), ("page.close(); os._exit(0)", ""),
     ("os.kill(os.getpid(), 15)", "killed by SIGTERM")],
)  # fmt: skip
def test_an_end_from_outside_names_no_backend(tmp_path: Path, end: str, detail: str) -> None:
    info = end_of(tmp_path, end)
    assert info.calls == [] and info.detail == detail


def test_a_page_explains_one_end(tmp_path: Path) -> None:
    log = tmp_path / "store0.log"
    page = CallPage(page_path(log))
    with page.call("write", "b1"):
        assert take_calls(log, -signal.SIGSEGV) == [WRITE]
        assert take_calls(log, -signal.SIGSEGV) == [], "the next process may end before it has a page"


def test_calls_over_the_number_of_slots_are_made_without_a_note(tmp_path: Path) -> None:
    log = tmp_path / "store0.log"
    page = CallPage(page_path(log))
    open_calls = [page.call("read", f"b{number}") for number in range(SLOTS + 1)]
    for call in open_calls:
        call.__enter__()
    for call in open_calls:
        call.__exit__(None, None, None)
    with page.call("write", "b1"):
        assert take_calls(log, 1) == [WRITE]


def test_many_calls_are_one_line() -> None:
    calls = [BackendCall("read", f"b{number}") for number in range(5)]
    assert while_text([]) == ""
    assert while_text([WRITE, WRITE]) == " while write of b1 was under way"
    assert while_text([WRITE, calls[0]]) == " while read of b0 and write of b1 were under way"
    assert while_text(calls) == " while read of b0, read of b1 and 3 others were under way"


# --- the guard ----------------------------------------------------------------------------------------------


class Guarded:
    """A guard, its clock, and the commands that it gives."""

    def __init__(self) -> None:
        self.issued: list[tuple[str, StorePause, str]] = []
        self.now_s, self.pid = 100.0, 70
        self.guard = BackendGuard(lambda *command: self.issued.append(command), lambda: int(self.now_s * 1e9))

    def end(self, *calls: BackendCall, role: str = "store0", code: int = -11) -> None:
        self.pid += 1
        self.now_s += 1.0
        self.guard.note(Exited(
            mono_ns=int(self.now_s * 1e9), role=role, place=None, generation=1, pid=self.pid, exit_code=code,
            calls=list(calls),
        ))  # fmt: skip


def test_two_ends_in_a_row_pause_the_backend() -> None:
    world = Guarded()
    world.end(WRITE)
    assert world.issued == []
    world.end(BackendCall("read", "b0"), WRITE, role="store1")
    ((name, verb, reason),) = world.issued
    assert (name, verb) == ("engine-pause-b1-72", StorePause(backend="b1")), "b0 was under way by chance"
    assert reason == (
        "2 stores have ended in a row while write of b1 was under way; ppconsole store resume b1 uses it again"
    )
    world.end(WRITE)
    assert len(world.issued) == 1, "it was resumed, and gets two ends again"
    world.end(WRITE)
    assert len(world.issued) == 2


def test_ends_that_say_nothing_pause_no_backend() -> None:
    world = Guarded()
    for _ in range(3):
        world.end(code=-9)
    for _ in range(3):
        world.end(WRITE, BackendCall("read", "b0"))
    assert world.issued == [], "either of two"
    world.end(BackendCall("read", "b2"))
    world.end(WRITE)
    assert world.issued == [], "not in a row"
    world.now_s += AGAIN_S
    world.end(WRITE)
    assert world.issued == [], "not again"


def test_a_repeated_fact_of_long_ago_pauses_nothing() -> None:
    world = Guarded()
    facts = [Exited(mono_ns=number, role="store0", place=None, generation=1, pid=number, exit_code=-11, calls=[WRITE])
             for number in (1, 2)]  # fmt: skip
    world.now_s = AGAIN_S + 1.0
    for fact in facts:
        world.guard.note(fact)
    assert world.issued == []


# --- a paused backend is not called -------------------------------------------------------------------------


def test_a_paused_backend_is_not_opened_before_it_is_resumed_or_tested() -> None:
    opened = threading.Event()
    lane = Lane(
        spec(paused=True), Layout(("0.0",)), lambda: FakeBackend(lambda call: opened.set()), lambda call: call(),
        lambda: 0.0, CallPage(),
    )  # fmt: skip
    lane.start()
    assert not opened.wait(0.1) and lane.not_open() == "m is paused, and not open"
    assert lane.waits_to_open and lane.figures().state == "opening"
    lane.use(spec())
    assert opened.wait(10.0)
    lane.close()
    opened.clear()
    other = Lane(
        spec(paused=True), Layout(("0.0",)), lambda: FakeBackend(lambda call: opened.set()), lambda call: call(),
        lambda: 0.0, CallPage(),
    )  # fmt: skip
    other.start()
    tried = threading.Event()
    other.open_soon(tried.set)
    assert tried.wait(10.0) and opened.is_set()
    other.close()


def test_a_paused_backend_gets_neither_deletes_nor_questions_for_its_usage() -> None:
    seen: list[str] = []
    backend = FakeBackend(seen.append)
    world = World(lambda kind: backend).ready()
    put(world)
    world.store.take(UseBackends([spec(paused=True)]))
    world.store.take(Delete("m", [KEY]))
    seen.clear()
    world.pass_s(10.0)
    world.work()
    assert seen == [] and world.store.figures().backends[0].queue == 0
    assert world.ask(Trial(9, "m")).error == "", "an operator may ask for it"  # type: ignore[attr-defined]
    assert "delete" in seen and len(backend.objects) == 1
    world.store.take(UseBackends([spec()]))
    world.work()
    assert backend.objects == {}, "the delete has waited"
    world.close()


def test_each_call_of_a_backend_is_noted_with_its_method(tmp_path: Path) -> None:
    log = tmp_path / "store0.log"
    noted: list[str] = []

    def look(call: str) -> None:
        noted.append(page_path(log).read_bytes().strip(b"\0").decode())

    world = World(lambda kind: FakeBackend(look))
    world.calls = CallPage(page_path(log))
    world.ready()
    put(world)
    assert noted == ["open m", "write m"]
    world.close()
