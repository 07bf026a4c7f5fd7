"""Read before any test module: one OpenMP thread a process, since tests and engines share the cores.

torch reads it when it is loaded. With its default of a thread a core, four workers spent most of their time in
barriers that waited for threads of each other.
"""

import contextlib
import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that. Tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not Path("/dev/nvidiactl").exists():
    # Triton decides while it is loaded whether its own library is interpreted, and transformers loads it, so it is
    # loaded here. The variable goes again: engines that tests start must not interpret. tests/gpu does the rest.
    os.environ["TRITON_INTERPRET"] = "1"
    with contextlib.suppress(ModuleNotFoundError):
        import triton.language  # noqa: F401
    del os.environ["TRITON_INTERPRET"]
