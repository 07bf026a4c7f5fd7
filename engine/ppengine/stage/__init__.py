"""One pipeline stage: a process with some of the layers, their KV cache, and the edges to its neighbours.

`worker` is the process, `step_loop` its loop in one generation, `core_link` its connection to the
core. `build` makes the stage on a `backends.hardware`; `runner` executes one step, which is a
`pending_step` until the device has done it. `batch_state` keeps the requests by slot. `connect`
opens the edges; `transport` and `token_return` are their ends over `wire`. `control_thread` answers
while the loop is blocked.
"""

import os

# Set before torch is loaded: otherwise its OpenMP threads spin at each barrier. With stages, core and
# agent sharing the cores, a spinning thread waits for one that cannot run: steps of 5 ms took up to 180
# on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
