"""A process that has loaded torch and numba, and forks one that uses kernels for each order.

Orders are lines of JSON on stdin: `folder` of the kernels, vectors of `width` bytes, whether to `rotate`, and the file
`out` for output. The answer is the pid; that to `wait` is the exit code. Loading torch takes longer than a kernel.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numba
import numpy as np
import torch


def main() -> None:
    """Fork a process for each order."""
    # numba readies LLVM at its first compilation. Here that is paid once, and not by each process.
    numba.njit(lambda x: x + 1)(1.0)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            output = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            use_kernels(order)
            sys.stdout.flush()
            os._exit(0)  # The end of an interpreter with torch takes longer than the kernels.
        print(answer, flush=True)
    os._exit(0)


def use_kernels(order: dict[str, Any]) -> None:
    """Print hits and misses of the cache for each kernel that is used, and the numbers of a vector."""
    os.environ["PPKERNELS_VECTOR_BYTES"] = str(order["width"])
    sys.path.insert(0, order["folder"])
    from ppkernels.cpu import linear, rotary

    assert linear.__file__.startswith(order["folder"])
    weight = linear.pack(torch.ones(32, 8))
    x, y = np.ones((3, 8), np.float32), np.empty((3, 32), np.float32)
    linear.multiply(x, weight.numpy(), y, False)
    assert (y == 8).all()
    kernels: list[Any] = [linear.multiply]
    if order["rotate"]:
        table = np.ones((1, 2), np.float32)
        rotary.rotate_rows(np.ones((1, 1, 4), np.float32), 1, table, table, np.zeros(1, np.int64))
        kernels.append(rotary.rotate_rows)
    for kernel in kernels:
        print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))
    print(weight.shape[2])


if __name__ == "__main__":
    main()
