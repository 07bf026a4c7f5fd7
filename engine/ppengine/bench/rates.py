"""The limits of a device: rates measured by a copy and a product, and the least time of work at such rates.

`python -m ppengine.bench.rates DTYPE STORED cpu|auto THREADS [ROWS INPUTS OUTPUTS]` measures and prints them as JSON: a
process of its own, so that the card is free again before the engine starts.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ppengine.bench.workload import Job
from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import Profile

_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""More than caches hold."""
_WIDTH = {"cpu": 1024, "cuda": 8192}
_ROUNDS = 7


class Rates(msgspec.Struct, kw_only=True):
    """Rates of one stage's device. Bytes are those read plus those written."""

    device: str
    item_bytes: int
    """Bytes of a weight, and of a key or value."""
    copy_gbps: float
    product_tflops: float


def limit_seconds(spec: ModelSpec, item_bytes: int, jobs: list[Job], stages: int, gbps: float, tflops: float) -> float:
    """Return the least seconds for `jobs` on `stages` devices that work all the time.

    Each decode micro-batch reads its stage's weights once and its own keys and values once; each prompt token passes
    the layers' products. Tokens with which all prompts begin count once. `item_bytes`: of a weight, and of a key or
    value.
    """
    columns = zip(*(job.prompt for job in jobs), strict=False)
    alike = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, columns if len(jobs) > 1 else ())
    shared = sum(1 for _ in alike)
    own = [len(job.prompt) - shared for job in jobs]
    width, kv_width = spec.hidden_size, spec.num_kv_heads * spec.head_dim
    matrices = 2 if spec.model_type == "opt" else 3
    attention = 2 * width * (spec.num_heads * spec.head_dim + kv_width)
    layers = spec.num_layers * (attention + matrices * width * spec.intermediate_size)
    weights = item_bytes * (layers + spec.vocab_size * width)
    token = item_bytes * 2 * spec.num_layers * kv_width
    steps, batches = max(job.output_len for job in jobs), min(stages, len(jobs))
    read = steps * batches * (weights + token * shared) / stages
    lengths = zip(own, (job.output_len for job in jobs), strict=True)
    read += sum(token * (count * output + output**2 // 2) for count, output in lengths) / stages
    products = 2 * layers * (shared + sum(own)) / stages
    alone = max(1.0, stages / len(jobs))  # of the stages, fewer requests than stages keep only some busy
    return alone * (read / (gbps * 1e9) + products / (tflops * 1e12))


def measured(profile: Profile, spec: ModelSpec, threads: int, shape: tuple[int, int, int] | None = None) -> Rates:
    """Return the rates of the device that a stage of `profile` gets. Raises ValueError where it cannot be used.

    `shape`: rows, inputs and outputs of the product; None: a square one that is as fast as the device can be.
    """
    device = profile.parallel.device
    on_cpu = device == "cpu" or (device == "auto" and profile.memory.device_mib is not None)
    dtypes = [profile.model.dtype, spec.dtype, "cpu" if on_cpu else "auto"]
    command = [sys.executable, "-m", "ppengine.bench.rates", *dtypes, str(threads), *map(str, shape or ())]
    ran = subprocess.run(command, capture_output=True, check=False)
    if ran.returncode:
        last = ran.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(f"the rates of the device could not be measured: {last}")
    return msgspec.json.decode(ran.stdout, type=Rates)


def measure(wanted: str, stored: str, where: str, threads: int, shape: tuple[int, ...] = ()) -> Rates:
    """Measure in this process. `wanted`: the profile's dtype; `stored`: that of the weights; `where`: cpu or auto."""
    import torch

    from ppengine.stage.backends.selection import resolve_dtype

    device = "cuda" if where == "auto" and torch.cuda.is_available() else "cpu"
    torch.set_num_threads(threads)
    dtype = resolve_dtype(wanted, stored, half=device == "cuda")
    copied = torch.ones(2, _COPY_BYTES[device], dtype=torch.uint8, device=device)
    copy_s = _seconds(torch, device, lambda: copied[0].copy_(copied[1]))
    rows, inputs, outputs = shape or 3 * (_WIDTH[device],)
    # Numbers as in a model: a card is faster with ones, which take less power.
    make = torch.randn if shape else torch.ones
    left, right = (make(size, dtype=dtype, device=device) for size in ((rows, inputs), (inputs, outputs)))
    product_s = _seconds(torch, device, lambda: left @ right)
    name = torch.cuda.get_device_name(0) if device == "cuda" else f"CPU, {threads} thread{'s' * (threads > 1)}"
    return Rates(
        device=name,
        item_bytes=dtype.itemsize,
        copy_gbps=round(2 * _COPY_BYTES[device] / copy_s / 1e9, 2),
        product_tflops=round(2 * rows * inputs * outputs / product_s / 1e12, 4),
    )


def _seconds(torch: Any, device: str, work: Callable[[], object]) -> float:
    """Return what `work` takes, the median of some, after two that warm up."""

    def once() -> float:
        begun = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    return statistics.median([once() for _ in range(_ROUNDS + 2)][2:])


if __name__ == "__main__":
    wanted, stored, where, threads, *shape = sys.argv[1:]
    print(msgspec.json.encode(measure(wanted, stored, where, int(threads), tuple(map(int, shape)))).decode())
