"""Supervisors that are forked from one process, which has loaded the modules of supervisors and stages.

Loading torch takes a core three seconds, core and gateway half a second, and these tests boot dozens of engines. A
supervisor forked here forks its fork server, core and gateway in turn, before it has a thread or a socket; all else
starts as ever, and so does what takes the place of one of them. Engines of the command line are started as users do,
those with Ray too, three of `test_cleanup`, and the `LLM` of `test_errors`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from engines import STEP_VARIABLE
from numba.core.dispatcher import Dispatcher
from ppengine.common import child_process, lifeline
from ppengine.supervisor import supervise
from ppengine.supervisor.launch import forkserver_client
from setproctitle import setproctitle

ORDER_BYTES = 256 * 1024
SUPERVISOR, FORKSERVER, STAGE = "ppengine.supervisor", "ppengine.supervisor.launch.forkserver", "ppengine.stage.worker"
SINGLE = (supervise.Modules().gateway, supervise.Modules().core)
"""Not the agent: py-spy, which it asks for its own stack first of all, takes longer with torch than the imports do."""
HIGH = 200
"""Descriptors from here on are free in a process that was forked a moment ago."""


# --- the tests' side ----------------------------------------------------------------------------------------


class Forked:
    """A supervisor that another process forked and waits for, with the interface of `subprocess.Popen`."""

    def __init__(self, stdout: int, status: int) -> None:
        self.stdout: TextIO = os.fdopen(stdout)
        self._status = os.fdopen(status)
        """Lines: its pid, and its exit code once it has ended."""
        self.pid = int(self._status.readline())
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (negative: a signal), None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(SUPERVISOR, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode


def fork(words: list[str], env: dict[str, str], errors: TextIO, line: int) -> Forked:
    """Start a supervisor: a `Launch` like `engines.run_module`."""
    assert words[0] == SUPERVISOR
    stdout, output = os.pipe()
    status, report = os.pipe()
    order = json.dumps({"args": words[1:], "env": env, "cwd": str(Path.cwd()), "line": line}).encode()
    socket.send_fds(_template(), [order], [output, errors.fileno(), line, report])
    os.close(output)
    os.close(report)
    return Forked(stdout, status)


@functools.cache
def _template() -> socket.socket:
    """Start the process that is forked; it ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, ORDER_BYTES)
    with theirs:
        subprocess.Popen(
            [sys.executable, "-m", "preloaded", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    return ours


# --- the forked side ----------------------------------------------------------------------------------------


def main() -> None:
    """Load the modules; fork a supervisor for each order, and a process that waits for it."""
    # The first title finds its room, which is that of command line and environment; a supervisor has another one.
    _title("preloaded", sys.argv[1:])
    gc.disable()
    for name in (f"{SUPERVISOR}.__main__", FORKSERVER, *(f"{module}.__main__" for module in SINGLE)):
        importlib.import_module(name)
    importlib.import_module(STAGE).preload()
    gc.enable()
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps those that wait.
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        while True:
            order, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, 4)
            if not order:
                return
            _load_kernels()
            if os.fork() == 0:
                orders.close()
                _leave(functools.partial(_wait_for_supervisor, json.loads(order), files))
            for one in files:
                os.close(one)


def _load_kernels() -> None:
    """Load the kernels that any process has compiled since: each stage would spend a fifth of a second on its own."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("ppkernels.cpu.")]
    for kernel in {one for module in modules for one in vars(module).values() if isinstance(one, Dispatcher)}:
        if kernel.__name__.startswith("_"):
            continue  # It is a part of the others.
        for signature, *_ in kernel._cache._cache_file._load_index():
            Dispatcher.compile(kernel, signature)


def _wait_for_supervisor(order: dict[str, Any], files: list[int]) -> int:
    """Fork the supervisor; report its pid and its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, errors, line, report = files
    pid = os.fork()
    if pid == 0:
        os.close(report)
        _leave(functools.partial(_supervise, order, output, errors, line))
    for one in (output, errors, line):
        os.close(one)
    os.write(report, b"%d\n" % pid)
    _, status = os.waitpid(pid, 0)
    os.write(report, b"%d\n" % os.waitstatus_to_exitcode(status))
    return 0


def _supervise(order: dict[str, Any], output: int, errors: int, line: int) -> int:
    """Run the supervisor as a process of its own would. Returns its exit code."""
    os.setsid()
    _redirect(output, errors)
    _place([line], [order["line"]])
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    _customize(order["env"].get("PYTHONPATH", ""))
    if step_s := float(order["env"].get(STEP_VARIABLE, "0")):
        _take_time(step_s)
    supervise.spawn = forkserver_client.spawn = Waiting(order["line"]).spawn
    _title(SUPERVISOR, order["args"])
    return importlib.import_module(f"{SUPERVISOR}.__main__").main()


def _customize(path: str) -> None:
    """Import what a new interpreter with this PYTHONPATH would import: faults are put into stages so."""
    fresh = [folder for folder in path.split(os.pathsep) if folder and folder not in sys.path]
    if fresh:
        sys.path[1:1] = fresh
        sys.modules.pop("sitecustomize", None)
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")


def _take_time(step_s: float) -> None:
    """Have each step take that much longer in the first stage, in the stages that are forked from here."""
    from ppengine.models.stage_model import StageModel

    run = StageModel.run

    def slower(model: StageModel, *args: Any) -> Any:
        if sys.argv[sys.argv.index("--stage") + 1] == "0":
            time.sleep(step_s)
        return run(model, *args)

    StageModel.run = slower  # type: ignore[method-assign]


class Waiting:
    """Processes forked before the supervisor has a thread: each becomes the first process of its module."""

    def __init__(self, line: int) -> None:
        self._orders: dict[str, tuple[int, socket.socket]] = {}
        for module in (FORKSERVER, *SINGLE):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            pid = os.fork()
            if pid == 0:
                for one in (ours, *(other for _, other in self._orders.values())):
                    one.close()
                os.close(line)
                _leave(functools.partial(_await_order, module, theirs))
            theirs.close()
            self._orders[module] = pid, ours

    def spawn(
        self,
        module: str,
        args: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        hand_over: tuple[int, ...] = (),
    ) -> child_process.Child:
        """Do what `child_process.spawn` does; that starts the successors of the first processes."""
        if env is not None or module not in self._orders:
            return child_process.spawn(module, args, log=log, env=env, hand_over=hand_over)
        pid, ours = self._orders.pop(module)
        read_end, write_end = lifeline.open_pipe()
        output = child_process.open_log(log)
        words_from = os.fstat(output).st_size
        numbers = [read_end, *hand_over]
        order = json.dumps({"args": [*args, "--lifeline", str(read_end)], "numbers": numbers}).encode()
        socket.send_fds(ours, [order], [output, *numbers])
        for one in (output, read_end, ours.detach()):
            os.close(one)
        return child_process.Child(forkserver_client.Adopted(pid), log, write_end, words_from)


def _await_order(module: str, orders: socket.socket) -> int:
    """Wait for the order of a supervisor and be the process of this module."""
    os.setsid()
    null = os.open(os.devnull, os.O_WRONLY)
    _redirect(null, null)
    order, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, 8)
    orders.close()
    if not order:
        return 0
    wanted = json.loads(order)
    _redirect(files[0], files[0])
    _place(files[1:], wanted["numbers"])
    _title(module, wanted["args"])
    return importlib.import_module(f"{module}.__main__" if module in SINGLE else module).main() or 0


def _redirect(output: int, errors: int) -> None:
    """Make these stdout and stderr."""
    os.dup2(output, 1)
    os.dup2(errors, 2)
    sys.stdout.reconfigure(line_buffering=True)
    for one in {output, errors}:
        os.close(one)


def _place(files: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that the command line names."""
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, HIGH) for one in files]
    for one in files:
        os.close(one)
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number, inheritable=False)
        os.close(one)


def _title(module: str, args: list[str]) -> None:
    sys.argv = [module, *args]
    setproctitle(" ".join([sys.executable, "-m", *sys.argv]))


def _leave(run: Callable[[], int]) -> NoReturn:
    """Call `run` and end with its exit code, without the clean-up of the process that was forked."""
    code = 1
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
        if isinstance(error.code, str):
            sys.stderr.write(f"{error.code}\n")
    except BaseException:  # noqa: BLE001  # As in a process of its own: print the traceback and leave.
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
