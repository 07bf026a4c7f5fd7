"""Feed damaged inputs to every reader: `python tests/fuzz/feed.py --inputs 1000000`; without --seed, by the clock.

Prints a line a reader: inputs, how many were read, the slowest in ms, growth of memory in MiB. An error that may not
leave a reader, or an input that takes more than a second, is a finding: its bytes go to --keep, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "engine"), str(HERE.parent)]

from damage import damaged  # noqa: E402 - the folders must be in the path first
from targets import Target, check_text, targets  # noqa: E402

SLOWEST_S = 1.0
FINDINGS_MOST = 3
"""Findings of one reader: it rests after them."""


@dataclass
class Tally:
    """What the inputs of one reader came to."""

    target: Target
    inputs: int = 0
    read: int = 0
    slowest_s: float = 0.0
    grown: int = 0
    findings: list[tuple[bytes, str]] = field(default_factory=list)

    def feed(self, chance: Random) -> None:
        """Make one input, have it read, and note how that went."""
        data = self.target.make(chance)
        if chance.random() >= self.target.whole:
            data = damaged(data, self.target.words, chance)
        self.inputs += 1
        begun = time.thread_time()
        try:
            self.target.read(data)
            self.read += 1
        except self.target.errors as error:
            try:
                check_text(error)
            except AssertionError as wrong:
                self.findings.append((data, str(wrong)))
        except Exception:  # noqa: BLE001 - any other error is what is looked for
            self.findings.append((data, traceback.format_exc()))
        took = time.thread_time() - begun
        self.slowest_s = max(self.slowest_s, took)
        if took > SLOWEST_S:
            self.findings.append((data, f"took {took:.1f} s"))


def fuzz(inputs: int, seed: int, names: Sequence[str] = ()) -> list[Tally]:
    """Give `inputs` inputs to the readers in turn; `names`: beginnings of those that are wanted, none for all."""
    with tempfile.TemporaryDirectory(prefix="ppconsole-fuzz-") as folder:
        wanted = [target for target in targets(Path(folder)) if not names or target.name.startswith(tuple(names))]
        tallies = [Tally(target) for target in wanted]
        for tally in tallies:
            chance, before = Random(f"{seed} {tally.target.name}"), resident()
            for number in range(inputs // len(tallies)):
                tally.feed(chance)
                if number == inputs // len(tallies) // 10:
                    before = resident()  # Caches are filled by now.
                if len(tally.findings) >= FINDINGS_MOST:
                    break
            tally.grown = resident() - before
    return tallies


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> int:
    """Run, print the table, keep the inputs of findings. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs in all")
    parser.add_argument("--seed", type=int, default=None, help="the same number gives the same inputs")
    parser.add_argument("--targets", default="", help="beginnings of the readers' names, separated by commas")
    parser.add_argument("--keep", type=Path, default=None, help="folder for the inputs of findings")
    options = parser.parse_args()
    seed = int(time.time()) if options.seed is None else options.seed
    tallies = fuzz(options.inputs, seed, [name for name in options.targets.split(",") if name])
    print(f"seed {seed}\n{'reader':28} {'inputs':>8} {'read':>8} {'slowest ms':>10} {'grown MiB':>9} findings")
    for tally in tallies:
        print(
            f"{tally.target.name:28} {tally.inputs:8} {tally.read:8} {tally.slowest_s * 1e3:10.1f} "
            f"{tally.grown / 2**20:9.1f} {len(tally.findings)}"
        )
    found = [(tally.target.name, *finding) for tally in tallies for finding in tally.findings]
    for number, (name, data, text) in enumerate(found):
        print(f"\n{name}: {text}", file=sys.stderr)
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{number}").write_bytes(data)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
