"""Faults of a stage's GPU: kernels that never end, fail, or find no memory.

They strike on the compute stream behind the layers of a step, when the host has long continued. The kinds import torch
themselves, because the gateway, which lists them, has none.
"""

from __future__ import annotations

from typing import Any

from ppengine.drills.fault_points import Fault, Go, StageParts
from ppengine.drills.registry import arm, strike

_FAR = 1 << 30
"""An index that no tensor of one element has."""
_BYTES = 4096


def _spinner(parts: StageParts) -> Any:
    """Compile the kernel before it strikes: compiling takes longer than its verdict may."""
    import torch

    from ppengine.drills.spin_kernel import Spinner

    torch.cuda.set_device(parts.buffers.device)
    return Spinner(parts.buffers.device)


@strike("forward", "hang", "stream_stuck", clears=True, gpu=True, prepare=_spinner)
def kernel_hang(fault: Fault, go: Go, *args: Any) -> Any:
    """A kernel on the compute stream never ends (by itself after two minutes at most). Cleared: it ends.

    Verdict: stage K's stream compute is stuck in step n, begun on the device T seconds ago, not done.
    """
    answer = go(*args)
    if fault.first():
        fault.tool.launch(fault.parts.buffers.compute)
        fault.keep(fault.tool.end)
    return answer


@strike("forward", "death", "crashed", gpu=True, held_out=True)
def device_assert(fault: Fault, go: Go, *args: Any) -> Any:
    """A kernel's assertion fails, of an index that is out of range. The CUDA context is lost, the process stays.

    Verdict: stage K crashed in step n: the CUDA error by its text, device-side assert.
    """
    import torch

    answer, buffers = go(*args), fault.parts.buffers
    with buffers.compute.use():
        one = torch.zeros(1, device=buffers.device)
        torch.index_select(one, 0, torch.full((1,), _FAR, device=buffers.device))
    return answer


@strike("forward", "death", "crashed", gpu=True, held_out=True)
def illegal_access(fault: Fault, go: Go, *args: Any) -> Any:
    """A kernel writes to addresses with no memory behind them. The CUDA context is lost, the process stays.

    Verdict: stage K crashed in step n: the CUDA error by its text, illegal access; the driver's XID if there is one.
    """
    from ppengine.stage.backends.cuda.dlpack import tensor_over

    answer, buffers = go(*args), fault.parts.buffers
    driver = buffers.progress.driver
    nowhere = tensor_over(driver.reserve(driver.granularity), _BYTES, buffers.device)
    with buffers.compute.use():
        nowhere.fill_(1)
    return answer


@arm("death", "out_of_memory", gpu=True, needs="restart")
def profile_oom(parts: StageParts) -> None:
    """At the stage's next restart, once, its profile run gets no memory beyond its weights.

    Verdict: stage K ran out of memory in phase profile, with the requested and the available bytes.
    """
    from ppengine.drills.start_faults import leave_no_room

    leave_no_room(parts.run_dir, parts.stage)
