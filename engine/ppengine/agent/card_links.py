"""Links of one card: its PCIe link, its NVLinks, and the ways to the other cards of the host.

Cables do not move, but a link may go down. So the driver is asked seldom. Every figure is guarded by itself: a card
without NVLink, or a virtual machine that hides the bus, has the others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from ppengine.protocol.gpu import GpuPeer

EVERY_S = 30.0
"""Seconds between two readings."""
_LINKS = 18
"""Most NVLinks of a card, if the module does not say."""
_PATHS = {0: "one board", 10: "one switch", 20: "switches", 30: "host bridge", 40: "NUMA node", 50: "other NUMA node"}
"""Names of nvmlGpuTopologyLevel."""
_READ, _NVLINK = 0, 2
"""nvmlGpuP2PCapsIndex: reading the other's memory, by NVLink."""
_OK = 0
"""nvmlGpuP2PStatus of a way that is there."""


class CardLinks:
    """Reads the links of the card `handle`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._others: Mapping[str, Any] = {}
        self._read: dict[str, Any] = {}
        self._due = 0.0

    def meet(self, others: Mapping[str, Any]) -> None:
        """Take the handles of the other cards by UUID."""
        self._others = others

    def read(self, nvml: Any) -> dict[str, Any]:
        """Return the links as fields of `GpuInfo`: those of the newest reading, at most `EVERY_S` old."""
        if (now := time.monotonic()) >= self._due:
            self._due = now + EVERY_S
            self._read = self._links(nvml)
        return self._read

    def _links(self, nvml: Any) -> dict[str, Any]:
        def asked(name: str, *more: Any) -> Any:
            return _guarded(nvml, lambda: getattr(nvml, name)(self._handle, *more))

        pci = asked("nvmlDeviceGetPciInfo")
        numbers = range(int(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _LINKS)))
        states = {number: asked("nvmlDeviceGetNvLinkState", number) for number in numbers}
        up = [number for number, state in states.items() if state]
        known = [state for state in states.values() if state is not None]
        ends = Counter(_bus_id(asked("nvmlDeviceGetNvLinkRemotePciInfo", number)) for number in up)
        return {
            "bus_id": _bus_id(pci),
            "pcie_generation": asked("nvmlDeviceGetCurrPcieLinkGeneration"),
            "pcie_generation_most": asked("nvmlDeviceGetMaxPcieLinkGeneration"),
            "pcie_width": asked("nvmlDeviceGetCurrPcieLinkWidth"),
            "pcie_width_most": asked("nvmlDeviceGetMaxPcieLinkWidth"),
            "nvlinks": len(known) if known else None,
            "nvlinks_active": len(up) if known else None,
            "peers": [self._peer(nvml, uuid, other, ends) for uuid, other in self._others.items()],
        }

    def _peer(self, nvml: Any, uuid: str, other: Any, ends: Counter[str | None]) -> GpuPeer:
        """Return the ways to one other card. `ends`: number of links by the address where they end."""

        def status(index: int) -> bool | None:
            found = _guarded(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(self._handle, other, index))
            return None if found is None else found == _OK

        address = _bus_id(_guarded(nvml, lambda: nvml.nvmlDeviceGetPciInfo(other)))
        level = _guarded(nvml, lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(self._handle, other))
        return GpuPeer(
            uuid=uuid,
            nvlink=status(_NVLINK),
            links=None if address is None or not ends else ends[address],
            reaches=status(_READ),
            path=None if level is None else _PATHS.get(level, f"level {level}"),
        )


def _guarded(nvml: Any, call: Callable[[], Any]) -> Any:
    """Return the answer; None if the card, the driver or the module has none."""
    try:
        return call()
    except (nvml.NVMLError, AttributeError):
        return None


def _bus_id(pci: Any) -> str | None:
    """Return the address in NVML's own form, which differs in the zeros in front."""
    if pci is None or not (found := getattr(pci, "busId", None)):
        return None
    text = found.decode() if isinstance(found, bytes) else str(found)
    domain, _, rest = text.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}" if rest else text
