"""One GPU as its driver sees it (NVML): the whole card, with all its processes."""

from __future__ import annotations

import msgspec


class Xid(msgspec.Struct, kw_only=True, frozen=True):
    """An error that the driver reported of a GPU, by the number in NVIDIA's list of XIDs."""

    code: int
    age_ms: float


class GpuProcess(msgspec.Struct, kw_only=True, frozen=True):
    """A process on a GPU, of this engine or not."""

    pid: int
    """As the driver numbers it; in a container that may be a number of the host's."""
    name: str = ""
    """Program, and script or module of an interpreter; empty: a process of that pid is not visible."""
    bytes: int | None = None
    """Memory of the card that it holds."""
    sm: float | None = None
    """Mean share of the SMs that its kernels used over the last 5 s."""

    @property
    def text(self) -> str:
        """Name and pid: `python train.py (pid 4242)`."""
        return f"{self.name or 'a process that is not visible here'} (pid {self.pid})"


class GpuPeer(msgspec.Struct, kw_only=True, frozen=True):
    """Another card of the same host, and the ways to it; None: not known."""

    uuid: str
    """`GPU-` and its number."""
    nvlink: bool | None = None
    """Whether NVLink connects the two, by switches or without."""
    links: int | None = None
    """Active NVLinks that go straight to it; none of those that end at a switch."""
    reaches: bool | None = None
    """Whether one card may read the memory of the other, by NVLink or PCIe."""
    path: str | None = None
    """Closest point that both have in common on PCIe: `one switch`, `switches`, `host bridge`, `NUMA node`, ..."""


class GpuInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Every figure may be None: not known, or not reported by this card."""

    uuid: str
    """`GPU-` and its number, as in `DeviceInfo.uuid`."""
    age_ms: float | None = None
    """Age of the figures; it grows while the driver does not answer. None: it has not answered yet."""
    problem: str = ""
    """Why there is nothing newer, or nothing at all: what the driver does not answer, or its error."""
    name: str | None = None
    memory_total: int | None = None
    """Bytes, with `memory_driver`."""
    memory_used: int | None = None
    """Bytes that processes hold, their contexts included."""
    memory_driver: int | None = None
    """Bytes that the driver keeps for itself."""
    processes: list[GpuProcess] | None = None
    """Eight at most: first those that use a tenth of the SMs or more, then the largest."""
    busy: float | None = None
    """Share of the last second or less in which a kernel ran."""
    sm_clock_mhz: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: int | None = None
    throttle: list[str] | None = None
    """Why clocks are held down (`power cap`, `thermal`, ...); empty: they are not."""
    ecc_corrected: int | None = None
    """Memory errors since the driver was loaded."""
    ecc_uncorrected: int | None = None
    pcie_tx_bytes_s: float | None = None
    """From the card, over 20 ms."""
    pcie_rx_bytes_s: float | None = None
    nvlink_tx_bytes_s: float | None = None
    """Over all links, since the figures before."""
    nvlink_rx_bytes_s: float | None = None
    bus_id: str | None = None
    """Address on PCIe."""
    pcie_generation: int | None = None
    """Generation of the PCIe link now; an idle card may lower it."""
    pcie_generation_most: int | None = None
    """Generation that card and slot allow."""
    pcie_width: int | None = None
    """Lanes of the PCIe link now."""
    pcie_width_most: int | None = None
    """Lanes that card and slot allow."""
    nvlinks: int | None = None
    """NVLinks that the card has."""
    nvlinks_active: int | None = None
    """Those that are up."""
    peers: list[GpuPeer] | None = None
    """The other cards of the host."""
    xids: list[Xid] = []
    """Newest last, at most eight."""


class DeviceRoom(msgspec.Struct, kw_only=True, frozen=True):
    """Free memory of a device: of a card, or of the host of CPU stages."""

    device: str
    """UUID of the card, or name of the host."""
    free: int
    age_ms: float
    holders: list[GpuProcess] | None = None
    """Processes of others on the card, the largest first; None: not known."""


class DeviceRooms(msgspec.Struct, tag="rooms", kw_only=True, frozen=True):
    """The gateway sends it to the core before each `SetMemory`."""

    rooms: list[DeviceRoom]
