"""Starting processes: arguments, log, lifeline, and what is said of their ends."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from engines import HERE, alive, wait_until
from ppengine.common.child_process import Child, describe_exit, last_words, session, spawn, tail, until
from ppengine.common.groups import Groups
from ppengine.protocol.place import Place
from ppengine.supervisor.launch.forkserver_client import ForkServer
from ppengine.supervisor.launch.local import LocalExecutor

PRINT_SELF = "import os, sys; print(os.getsid(0), sys.stdin.read() == '', os.environ.get('EXTRA'), *sys.argv[1:])"


@pytest.fixture(autouse=True)
def module_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let `-m` find modules that a test writes, and the stand-ins."""
    paths = [str(tmp_path), str(HERE), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return tmp_path


def run(folder: Path, text: str, *args: str) -> Child:
    """Start a module with this text."""
    (folder / "written.py").write_text(text)
    return spawn("written", list(args), log=folder / "log", env={"EXTRA": "1"})


def test_spawn_gives_arguments_session_log_and_lifeline(module_path: Path) -> None:
    child = run(module_path, PRINT_SELF, "--a", "b")
    assert child.wait(10) == 0
    assert child.info("core").detail == ""
    child.close()
    words = (module_path / "log").read_text().split()
    assert words[:6] == [str(child.pid), "True", "1", "--a", "b", "--lifeline"]
    assert (module_path / "log").stat().st_mode & 0o777 == 0o600


def test_closing_the_lifeline_ends_the_child(module_path: Path) -> None:
    child = spawn("standins.agent", [], log=module_path / "log")
    assert child.poll() is None
    child.close()
    assert child.wait(10) == 1


def test_kill_reaches_a_stopped_child_and_what_it_started(module_path: Path) -> None:
    text = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    child = run(module_path, text)
    wait_until(lambda: (module_path / "log").read_text(), "it has started a process")
    grandchild = int((module_path / "log").read_text())
    os.kill(child.pid, signal.SIGSTOP)
    assert set(session(child.pid)) == {child.pid, grandchild}
    child.kill()
    assert child.wait(20) == -9
    wait_until(lambda: not alive(grandchild), "the grandchild is gone")
    assert child.info("stage", 1, 0).detail == "killed by SIGKILL"
    child.close()


def test_failed_child_is_quoted(module_path: Path) -> None:
    child = run(module_path, "import sys; sys.exit('error: weights of layer 3 are missing')")
    assert child.wait(10) == 1
    info = child.info("stage", 2, 0)
    assert (info.role, info.stage, info.exit_code) == ("stage", 2, 1)
    assert info.detail == "weights of layer 3 are missing"
    child.close()


def test_traceback_is_quoted_by_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("Traceback (most recent call last):\n  File x\nRuntimeError: 3 is odd\n\n")
    assert last_words(tmp_path / "log") == "RuntimeError: 3 is odd"
    assert describe_exit(1, tmp_path / "log") == "RuntimeError: 3 is odd"


def test_a_warning_from_before_is_no_reason_of_an_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("2026-11-23 19:11:56.297 WARNING foreign-device: got CUDA error 400\n")
    assert describe_exit(3, tmp_path / "log") == "exit code 3"


def test_silent_ends_are_told_by_their_code(tmp_path: Path) -> None:
    assert describe_exit(3, tmp_path / "none") == "exit code 3"
    assert describe_exit(-signal.SIGSEGV, None) == "killed by SIGSEGV"
    assert describe_exit(-40, None) == "killed by signal 40"


def test_tail_reads_the_end_of_a_long_log(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert tail(tmp_path / "log", 2) == ["line 99998", "line 99999"]


def test_interpreter_that_cannot_start_leaves_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def descriptors() -> set[tuple[str, str]]:
        found = set()
        for link in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the one that lists them
                found.add((link.name, str(link.readlink())))
        return found

    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    before = descriptors()
    with pytest.raises(FileNotFoundError):
        spawn("standins.agent", [], log=tmp_path / "log")
    # What an earlier test has left may be collected meanwhile.
    assert {where for _, where in descriptors() - before if not where.startswith("/proc/")} == set()


def test_who_is_stopped_before_its_stages_are_there_tells_of_none(module_path: Path) -> None:
    executor = LocalExecutor("standins.stage")
    executor.start(SimpleNamespace(run_dir=str(module_path), groups=Groups(2)))  # type: ignore[arg-type]
    executor.stop(0.0)
    assert executor.poll() == []


def test_the_last_words_of_a_successor_are_its_own(tmp_path: Path, module_path: Path) -> None:
    first = run(module_path, "import sys; sys.exit('error: lost stage 1')")
    assert first.wait(10) == 1
    assert first.info("stage", 0, 0).detail == "lost stage 1"
    second = run(module_path, "import sys; sys.exit(3)")
    assert second.wait(10) == 3
    assert second.info("stage", 0, 0).detail == "exit code 3"
    for child in (first, second):
        child.close()


def test_an_abort_tells_what_was_thrown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "terminate called after throwing an instance of 'c10::AcceleratorError'\n"
        "  what():  CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in the documentation.\n"
    )
    thrown = "CUDA error: device-side assert triggered"
    assert describe_exit(-signal.SIGABRT, log) == f"killed by SIGABRT: {thrown}"
    assert describe_exit(-signal.SIGABRT, log, len("before\n  what():  CUDA error: of a predecessor\n")).endswith(
        thrown
    )
    assert describe_exit(-signal.SIGSEGV, log) == "killed by SIGSEGV"
    log.write_text("Fatal Python error: Aborted\n")
    assert describe_exit(-signal.SIGABRT, log) == describe_exit(-signal.SIGABRT, None) == "killed by SIGABRT"


def test_a_fork_server_without_descriptors_says_so_and_another_one_forks(
    module_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (module_path / "sleeper.py").write_text("import time\ndef main():\n    time.sleep(60)\n")
    executor = LocalExecutor("sleeper")
    executor.start(SimpleNamespace(run_dir=str(tmp_path), groups=Groups(1)))  # type: ignore[arg-type]
    try:
        assert until(lambda: bool(executor.poll()), 30), "the first one is forked"
        server = executor._server
        assert server is not None and not server.cramped
        used = {int(one.name) for one in Path(f"/proc/{server.pid}/fd").iterdir()}
        limit = min(set(range(len(used) + 1)) - used)
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (limit, before[1]))
        assert server.cramped
        with monkeypatch.context() as patch:
            patch.setattr(ForkServer, "cramped", False)  # The limit is met behind the look.
            executor.restart(Place(0, 0), 2)
            assert until(lambda: executor.poll()[0].exit_code is not None, 30)
        assert executor.poll()[0].detail.startswith("the fork server ended: the fork server has no descriptor left")
        executor.restart(Place(0, 0), 3)
        assert until(lambda: executor.poll()[0].generation == 3, 30)
        assert executor.poll()[0].exit_code is None and executor._server is not server
    finally:
        executor.stop(0.0)


def test_orders_of_a_fork_server_that_has_ended_are_not_those_of_the_next(module_path: Path, tmp_path: Path) -> None:
    """Two stages are restarted in one turn, and the fork server ends between both orders."""
    (module_path / "sleeper.py").write_text("import time\ndef main():\n    time.sleep(60)\n")
    executor = LocalExecutor("sleeper")
    executor.start(SimpleNamespace(run_dir=str(tmp_path), groups=Groups(2)))  # type: ignore[arg-type]
    try:
        assert until(lambda: len(executor.poll()) == 2, 30), "both are forked"
        server = executor._server
        assert server is not None
        os.kill(server.pid, signal.SIGSTOP)
        executor.restart(Place(0, 0), 2)
        os.kill(server.pid, signal.SIGKILL)
        assert until(lambda: bool(server.exit_text()), 10)
        executor.restart(Place(1, 0), 2)
        assert until(lambda: executor.poll()[1].generation == 2, 30)
        first, second = executor.poll()
        assert first.detail == "the fork server ended: killed by SIGKILL"
        words = Path(f"/proc/{second.pid}/cmdline")  # those of the fork server, until it has set its own
        assert until(lambda: "--stage 1 --rank 0 --generation 2" in words.read_text(), 10)
    finally:
        executor.stop(0.0)


def test_an_order_without_descriptors_leaves_none_open(module_path: Path, tmp_path: Path) -> None:
    (module_path / "sleeper.py").write_text("import time\ndef main():\n    time.sleep(60)\n")
    server = ForkServer("sleeper", tmp_path)
    try:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(5):
            with pytest.raises(FileNotFoundError):
                server.order("sleeper", [], tmp_path / "gone" / "log")
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    finally:
        server.close()
