"""One pipeline stage: a process with some of the layers, their KV cache, and the edges to its neighbours.

`worker` is the process and its step loop, `boot` builds the stage on a `hardware`, `runner` executes one step, which is
`pending` until a device has done it, `batch_state` keeps the requests by slot, `kv_cache` is the elastic memory,
`transport` and `token_return` are the edges over `wire`, `control` is the thread that answers while the loop is
blocked.
"""

import os

# torch's OpenMP threads spin at each barrier unless told before torch is loaded. With stages, core and agent sharing
# the cores, a spinning thread waits for one that cannot run: steps of 5 ms took up to 180 on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
