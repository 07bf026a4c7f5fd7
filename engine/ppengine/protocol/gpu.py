"""One GPU as its driver sees it (NVML): the whole card, with all its processes."""

from __future__ import annotations

import msgspec


class Xid(msgspec.Struct, kw_only=True, frozen=True):
    """An error that the driver reported of a GPU, by the number in NVIDIA's list of XIDs."""

    code: int
    age_ms: float


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
    xids: list[Xid] = []
    """Newest last, at most eight."""
