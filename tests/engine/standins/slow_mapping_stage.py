"""A real stage whose cache is changed beside its steps, as on a GPU: until the file `prepared` is in the run folder."""

import sys
from pathlib import Path

from ppengine.stage import worker
from ppengine.stage.backends.cpu import cpu_hardware
from ppengine.stage.backends.cpu.kv_cache import CpuKvCache

PREPARED = Path(sys.argv[sys.argv.index("--engine") + 1]).parent / "prepared" if "--engine" in sys.argv else Path()


class SlowCache(CpuKvCache):
    """Takes what goes out of reach at once."""

    def prepare(self, count):
        if 1 <= count < self.mapped:
            self.layers = [layer[:count] for layer in self.layers]

    def prepared(self, count):
        return PREPARED.exists()


cpu_hardware.CpuKvCache = SlowCache
main = worker.main
