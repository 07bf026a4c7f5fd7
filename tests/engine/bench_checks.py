"""What the live checks cost a pipeline of real stages: `python tests/engine/bench_checks.py`.

Decode steps, one at a time, with the checks switched every few steps in changing order. Processor time of all threads
of all stages, which other work on the machine lengthens least; medians over windows.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

from checkpoints import make_checkpoint
from ppengine.protocol.steps import Check
from stage_core import FakeCore, Sequence

OFF = Check.NO_CHECKSUM
NAMES = {OFF: "off", 0: "checksum", OFF | Check.LEDGER: "ledger", OFF | Check.FINITE: "finite",
         OFF | Check.STRICT: "strict", OFF | 7: "three"}  # fmt: skip
ROUNDS, STEPS, ROWS, LENGTH = 40, 10, 8, 60


def main() -> None:
    for hidden, layers in ((32, 4), (512, 6)):
        with tempfile.TemporaryDirectory() as root:
            shape = {"hidden_size": hidden, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden}
            folder = make_checkpoint(Path(root) / "m", "opt", layers=layers, **shape)
            times = measure(folder)
        base = statistics.median(times[OFF])
        for checks, name in NAMES.items():
            each = statistics.median(times[checks])
            print(f"hidden {hidden:4}, {layers} layers, 2 stages, {ROWS} rows: {name:10} {each / 1e6:7.3f} ms a step "
                  f"{100 * (each / base - 1):+6.2f} %", flush=True)  # fmt: skip


def measure(folder: Path) -> dict[int, list[float]]:
    """Return nanoseconds of processor time a step, by window, under each set of checks."""
    times: dict[int, list[float]] = {checks: [] for checks in NAMES}
    with FakeCore(folder, 2, model={"dtype": "float32"}, memory={"device_mib": 512}) as core:
        core.serve(ROWS * 16 + 1)
        sequences = [
            Sequence(core, slot, [5] * LENGTH, list(range(1 + 16 * slot, 17 + 16 * slot))) for slot in range(ROWS)
        ]
        for sequence in sequences:
            sequence.prefill(32)
        rows = [sequence.row() for sequence in sequences]
        for _ in range(ROUNDS):
            for checks in random.sample(list(NAMES), len(NAMES)):
                core.run(checks=int(checks))
                begun = processor_ns(core)
                for _ in range(STEPS):
                    core.run(rows=rows)
                times[checks].append((processor_ns(core) - begun) / STEPS)
    return times


def processor_ns(core: FakeCore) -> int:
    """Return what all threads of all stages have run for so far."""
    files = (file for child in core.children.values() for file in Path(f"/proc/{child.pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files)


if __name__ == "__main__":
    main()
