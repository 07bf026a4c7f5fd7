"""Programs in processes whose Triton compiles kernels: all of them are forked from one, which has loaded Triton.

Tests interpret kernels, and a process either compiles or interprets. Loading torch and Triton takes five times as long
as most kernels take to compile. Orders are lines of JSON on stdin; the answer is an exit code.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

LIMIT_S = 100
"""Seconds that a program may take."""


def run(program: str, folder: Path, *arguments: str) -> str:
    """Return what `program` prints. `folder`, which may not exist, gets its kernels. Fails with what it says."""
    folder.mkdir(exist_ok=True)
    process = _loaded()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"program": program, "folder": str(folder), "arguments": arguments}) + "\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    assert answer, f"the process that forks has ended with {process.wait()}"
    output, errors = ((folder / name).read_text() for name in ("output", "errors"))
    assert int(answer) == 0, f"exit code {answer}{output}{errors[-2000:]}"
    return output


@functools.cache
def _loaded() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, at the end of its orders."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def main() -> None:
    """Fork a process for each order, and wait for it."""
    from ppkernels import gpu
    from triton.runtime.cache import triton_key

    for module in pkgutil.walk_packages(gpu.__path__, "ppkernels.gpu."):
        importlib.import_module(module.name)
    # Its compiler names results by a hash of all of Triton, half a second of a core, which it keeps.
    triton_key()
    for line in sys.stdin:
        if (pid := os.fork()) == 0:
            os._exit(_run(json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _run(order: dict[str, Any]) -> int:
    """Run a program as `python -c` does, and return its exit code."""
    signal.alarm(LIMIT_S)
    folder = Path(order["folder"])
    for number, name in (1, "output"), (2, "errors"):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    sys.argv = ["-c", *order["arguments"]]
    try:
        exec(compile(order["program"], "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:  # noqa: BLE001  # As in a process of its own: it is printed.
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
