"""The fork server: loads the modules of a stage, torch first, and forks a stage for each order.

Loading torch takes a core two seconds; a fork takes milliseconds and shares the loaded modules. So an engine boots
with one load, and a lost stage is back in a moment. The fork server starts no thread and touches no device, since
neither survives a fork.

A stage is forked twice, so that it becomes a child of the supervisor, which adopts orphans. It has a session and a
command line of its own, like every other child.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from functools import partial

import msgspec
from setproctitle import setproctitle

from ppengine.common import lifeline
from ppengine.common.open_files import open_files

ORDER_BYTES = 16 * 1024
_REPARENTED_S = 0.0005


def main() -> None:
    """Load the module, then fork a stage for every order until the supervisor closes the socket."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.supervisor.launch.forkserver")
    parser.add_argument("--module", required=True, help="entry point of a stage, loaded here with all that it imports")
    parser.add_argument(
        "--orders", type=int, required=True, help="socket for orders: module and arguments, log, lifeline"
    )
    parser.add_argument("--run", required=True, help="run folder of the engine, shown in the process list")
    lifeline.add_argument(parser)
    options = parser.parse_args()
    lifeline.adopt(options.lifeline)
    # A collection finds next to nothing while modules load, and takes a sixth of the time.
    gc.disable()
    preload = getattr(importlib.import_module(options.module), "preload", None)
    if preload is not None:
        preload()
    gc.enable()
    # Python warns of a fork beside threads, here that of the lifeline, which holds no lock that a stage needs.
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=options.orders) as orders:
        while True:
            order, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, 2)
            if not order:
                return
            if len(files) < 2:  # The kernel drops those for which there is no room.
                raise SystemExit(f"error: the fork server has no descriptor left for a stage: {_descriptors()}")
            log, line = files
            module, *args = msgspec.json.decode(order, type=list[str])
            run = partial(_run_stage, module, [*args, "--lifeline", str(line)], log)
            try:
                pid = _fork(run, [options.orders, options.lifeline])
            except OSError as error:
                raise SystemExit(f"error: no stage can be forked: {error.strerror}; {_descriptors()}") from None
            os.close(log)
            os.close(line)
            orders.send(b"%d" % pid)


def _fork(run: Callable[[], None], foreign: list[int]) -> int:
    """Call `run` in an orphan without the descriptors `foreign`, and return its pid. Raises OSError."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            between, orphan = os.getpid(), os.fork()
        except OSError as error:
            os._exit(error.errno or 1)
        if orphan:
            os.write(write_end, b"%d" % orphan)
            os._exit(0)
        for descriptor in (read_end, write_end, *foreign):
            os.close(descriptor)
        # The stage ties itself to its parent, so the supervisor must have adopted it first.
        while os.getppid() == between:
            time.sleep(_REPARENTED_S)
        run()
    os.close(write_end)
    _, status = os.waitpid(between, 0)
    pid = os.read(read_end, 32)
    os.close(read_end)
    if not pid:
        code = os.waitstatus_to_exitcode(status)
        raise OSError(code, os.strerror(code) if code > 0 else f"signal {-code}")
    return int(pid)


def _descriptors() -> str:
    known = open_files(os.getpid())
    return "all its descriptors are in use" if known is None else known.text


def _run_stage(module: str, args: list[str], log: int) -> None:
    """Call `main` of the module as a process of its own would; does not return."""
    code = 1
    try:
        os.setsid()
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        sys.argv = [module, *args]
        setproctitle(" ".join([sys.executable, "-m", *sys.argv]))
        importlib.import_module(module).main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  # As in a process of its own: print the traceback and leave.
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
