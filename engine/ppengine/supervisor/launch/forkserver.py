"""The nursery: a process that has loaded all that a stage needs, torch first, and forks stages out of that.

Loading takes a core two seconds; a fork takes milliseconds, and what was loaded is in memory once. So an engine boots
with one load however many stages it has, and a stage that is lost is back in a moment. Nothing here may start a thread
or touch a device: neither lives through a fork.

A stage is forked twice, so that it falls to the supervisor, which has declared itself the reaper of orphans: it is a
child of the supervisor like any other, with a session and a command line of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
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
from pathlib import Path

import msgspec

from ppengine.common import lifeline

ORDER_BYTES = 16 * 1024
_ARGUMENTS_AT = 45
"""Place of the address of a process's arguments in /proc/PID/stat, behind its name; that of their end follows."""
_REPARENTED_S = 0.0005


def main() -> None:
    """Load, then fork a stage for every order until the supervisor hangs up."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.supervisor.launch.forkserver")
    parser.add_argument("--module", required=True, help="what is loaded here: a stage's entry point, with all it needs")
    parser.add_argument(
        "--orders", type=int, required=True, help="socket for orders: module and arguments, log, lifeline"
    )
    parser.add_argument("--run", required=True, help="run folder of the engine, for who looks at the processes")
    parser.add_argument("--room", required=True, help="any text as long as the arguments of a stage may become")
    lifeline.add_argument(parser)
    options = parser.parse_args()
    lifeline.adopt(options.lifeline)
    _entitle("ppengine.supervisor.launch.forkserver", ["--run", options.run])
    importlib.import_module(options.module)
    # Python warns of a fork beside threads, here that of the lifeline, which holds no lock that a stage needs.
    warnings.simplefilter("ignore", DeprecationWarning)
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=options.orders) as orders:
        while True:
            order, files, _, _ = socket.recv_fds(orders, ORDER_BYTES, 2)
            if not order:
                return
            log, line = files
            module, *args = msgspec.json.decode(order, type=list[str])
            live = partial(_be_stage, module, [*args, "--lifeline", str(line)], log)
            pid = _fork(live, [options.orders, options.lifeline])
            os.close(log)
            os.close(line)
            orders.send(b"%d" % pid)


def _fork(live: Callable[[], None], strange: list[int]) -> int:
    """Run `live` in an orphan without the descriptors `strange`, and return its pid."""
    read_end, write_end = os.pipe()
    between = os.fork()
    if between == 0:
        between, orphan = os.getpid(), os.fork()
        if orphan:
            os.write(write_end, b"%d" % orphan)
            os._exit(0)
        for descriptor in (read_end, write_end, *strange):
            os.close(descriptor)
        # Who adopts it is to be known before it ties itself to its parent.
        while os.getppid() == between:
            time.sleep(_REPARENTED_S)
        live()
    os.close(write_end)
    os.waitpid(between, 0)
    pid = int(os.read(read_end, 32))
    os.close(read_end)
    return pid


def _be_stage(module: str, args: list[str], log: int) -> None:
    """Run `main` of the module as a process of its own would; does not return."""
    code = 1
    try:
        os.setsid()
        for standard in (1, 2):
            os.dup2(log, standard)
        os.close(log)
        sys.argv = [module, *args]
        _entitle(module, args)
        importlib.import_module(module).main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  # What a process of its own would have done: show it, and leave.
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def _entitle(module: str, args: list[str]) -> None:
    """Show `module` and its arguments as the command line, as far as there is room: operators look for stages so."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(field) for field in fields[_ARGUMENTS_AT : _ARGUMENTS_AT + 2])
    if start:  # 0 where the kernel keeps it to itself
        words = b"\0".join(word.encode() for word in (sys.executable, "-m", module, *args))
        ctypes.memmove(start, words.ljust(end - start, b"\0")[: end - start - 1], end - start - 1)


if __name__ == "__main__":
    main()
