"""Read before any test module: one OpenMP thread a process, since tests and engines share the cores.

torch reads it when it is loaded. With its default of a thread a core, four workers spent most of their time in
barriers that waited for threads of each other.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
