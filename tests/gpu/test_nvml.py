"""The poller on a real driver, while the card works."""

from __future__ import annotations

import time

import pynvml
import torch
from ppengine.agent.nvml import Poller
from real import needs_gpu

pytestmark = needs_gpu


def test_figures_of_a_card_that_works() -> None:
    poller = Poller(pynvml, period_s=0.3)
    poller.start()
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    slowest, seen = 0.0, []
    end = time.monotonic() + 4
    while time.monotonic() < end:
        device.copy_(host, non_blocking=True)
        began = time.monotonic()
        seen.append(poller.latest())
        slowest = max(slowest, time.monotonic() - began)
        torch.cuda.synchronize()
    poller.stop()
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    cards = [gpu for gpus in seen for gpu in gpus if gpu.uuid == uuid]
    last = cards[-1]
    print(last, f"slowest look {1e3 * slowest:.2f} ms")
    assert slowest < 0.05 and last.problem == "" and last.age_ms is not None and last.age_ms < 1500
    assert last.name and last.memory_total and last.memory_used and last.memory_used > 2**30
    assert last.power_w and last.power_w > 50 and last.sm_clock_mhz and last.temperature_c
    assert last.throttle is not None and last.xids == []
    assert max(gpu.pcie_rx_bytes_s or 0 for gpu in cards) > 10e9, "a gigabyte after the other came over PCIe"
