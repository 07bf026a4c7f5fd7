"""NVML's figures of this node's GPUs, read in a thread of its own: the driver may be slow, or never answer.

A stage's GPU is found by its UUID. A figure that a card does not have is None and not read again. Errors of the
driver (XIDs) come as events, for which the thread waits between two rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ppengine.agent import card_processes
from ppengine.agent.card_links import CardLinks
from ppengine.protocol.gpu import GpuInfo, Xid

log = logging.getLogger("ppengine.agent")

PERIOD_S = 1.0
SILENT_S = 3.0
"""Seconds without an answer after which the report names the call that hangs."""
_XIDS_KEPT = 8
_DRIVER = Path("/dev/nvidiactl")
_ALL_LINKS = 0xFFFFFFFF
_IDLE = 0x1
"""The bit of an idle card, which is no throttling."""
_THROTTLE = {
    0x2: "application clocks", 0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "thermal",
    0x40: "hardware thermal", 0x80: "power brake", 0x100: "display clocks",
}  # fmt: skip
"""Names of nvmlClocksEventReasons, by bit."""


class _Gpu:
    """One card: its handle, the figures that it has, and counters of the round before."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.handle = handle
        self.uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self.readers = dict(_READERS)
        self.counters: dict[str, tuple[int, int]] = {}
        self.processes = card_processes.CardProcesses()
        self.links = CardLinks(handle)

    def rate(self, name: str, count: int) -> float | None:
        """Return by how much a counter rises a second; None at first, and after a reset."""
        now_ns = time.monotonic_ns()
        before = self.counters.get(name)
        self.counters[name] = count, now_ns
        if before is None or count < before[0] or now_ns <= before[1]:
            return None
        return (count - before[0]) / (now_ns - before[1]) * 1e9


def _memory(nvml: Any, gpu: _Gpu) -> dict[str, Any]:
    memory = nvml.nvmlDeviceGetMemoryInfo(gpu.handle, version=nvml.nvmlMemory_v2)
    return {"memory_total": memory.total, "memory_used": memory.used, "memory_driver": memory.reserved}


def _throttle(nvml: Any, gpu: _Gpu) -> dict[str, Any]:
    reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu.handle)
    named = [text for bit, text in _THROTTLE.items() if reasons & bit]
    unknown = reasons & ~(_IDLE | sum(_THROTTLE))
    return {"throttle": [*named, hex(unknown)] if unknown else named}


def _ecc(nvml: Any, gpu: _Gpu, kind: int) -> int:
    return int(nvml.nvmlDeviceGetTotalEccErrors(gpu.handle, kind, nvml.NVML_VOLATILE_ECC))


def _pcie(nvml: Any, gpu: _Gpu) -> dict[str, Any]:
    # The byte counters of the field interface have 32 bits: a swap wraps them several times a second.
    sent = nvml.nvmlDeviceGetPcieThroughput(gpu.handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
    received = nvml.nvmlDeviceGetPcieThroughput(gpu.handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
    return {"pcie_tx_bytes_s": sent * 1000.0, "pcie_rx_bytes_s": received * 1000.0}


def _nvlink(nvml: Any, gpu: _Gpu) -> dict[str, Any]:
    wanted = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX
    answers = nvml.nvmlDeviceGetFieldValues(gpu.handle, [(number, _ALL_LINKS) for number in wanted])
    for answer in answers:
        if answer.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(answer.nvmlReturn)
    rates = [gpu.rate(f"nvlink {index}", answer.value.ullVal * 1024) for index, answer in enumerate(answers)]
    return {"nvlink_tx_bytes_s": rates[0], "nvlink_rx_bytes_s": rates[1]}


_COMPUTE, _GRAPHICS, _USE = _OF_PROCESSES = "compute", "graphics", "use"
"""Figures by pid, made into one list when all have been read."""
Reader = Callable[[Any, _Gpu], dict[str, Any]]
_READERS: dict[str, Reader] = {
    "name": lambda nvml, gpu: {"name": _text(nvml.nvmlDeviceGetName(gpu.handle))},
    "memory": _memory,
    "busy": lambda nvml, gpu: {"busy": nvml.nvmlDeviceGetUtilizationRates(gpu.handle).gpu / 100},
    "clock": lambda nvml, gpu: {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(gpu.handle, nvml.NVML_CLOCK_SM)},
    "power": lambda nvml, gpu: {"power_w": nvml.nvmlDeviceGetPowerUsage(gpu.handle) / 1000},
    "power limit": lambda nvml, gpu: {"power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(gpu.handle) / 1000},
    "temperature": lambda nvml, gpu: {
        "temperature_c": nvml.nvmlDeviceGetTemperature(gpu.handle, nvml.NVML_TEMPERATURE_GPU)
    },
    "throttle": _throttle,
    "ecc corrected": lambda nvml, gpu: {"ecc_corrected": _ecc(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)},
    "ecc uncorrected": lambda nvml, gpu: {"ecc_uncorrected": _ecc(nvml, gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)},
    "pcie": _pcie,
    "nvlink": _nvlink,
    "compute processes": lambda nvml, gpu: {
        _COMPUTE: card_processes.held(nvml.nvmlDeviceGetComputeRunningProcesses_v3(gpu.handle))
    },
    "graphics processes": lambda nvml, gpu: {
        _GRAPHICS: card_processes.held(nvml.nvmlDeviceGetGraphicsRunningProcesses_v3(gpu.handle))
    },
    "use by processes": lambda nvml, gpu: {_USE: gpu.processes.use(nvml, gpu.handle)},
}
"""Readers of figures, by the name that a problem quotes."""


class Poller:
    """Polls NVML every `period_s`. `nvml` is the module `pynvml`.

    Its thread replaces the values that others read as a whole and never changes them.
    """

    def __init__(self, nvml: Any, period_s: float = PERIOD_S) -> None:
        self._nvml = nvml
        self._period_s = period_s
        self._figures: dict[str, tuple[GpuInfo, int]] = {}
        """Figures by UUID, and the time of the reading."""
        self._calling: tuple[str, int] = ("", 0)
        """Name and begin of the call under way."""
        self._xids: dict[str, tuple[tuple[int, int], ...]] = {}
        """Codes by UUID, with the time of each."""
        self._events: Any = None
        self._uuids: dict[int | None, str] = {}
        """UUIDs by handle: a lost card no longer returns its own."""
        self._stop = threading.Event()

    def start(self) -> None:
        """Start the thread, which nothing waits for."""
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def stop(self) -> None:
        """End the thread after its present call."""
        self._stop.set()

    def latest(self) -> list[GpuInfo]:
        """Return the newest figures of every GPU with their ages, without waiting for the driver."""
        now_ns = time.monotonic_ns()
        call, since_ns = self._calling
        silent_s = (now_ns - since_ns) / 1e9
        hangs = f"NVML has not answered {call} for {silent_s:.0f} s" if call and silent_s > SILENT_S else ""
        gpus = []
        for uuid, (info, read_ns) in self._figures.items():
            xids = [Xid(code=code, age_ms=_ms(now_ns - then_ns)) for code, then_ns in self._xids.get(uuid, ())]
            age = _ms(now_ns - read_ns) if read_ns else None
            gpus.append(msgspec.structs.replace(info, age_ms=age, problem=hangs or info.problem, xids=xids))
        return gpus

    def _run(self) -> None:
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
            gpus = [_Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(count)]
        except nvml.NVMLError as error:
            log.warning("no figures of GPUs: %s", error)
            return
        self._figures = {gpu.uuid: (GpuInfo(uuid=gpu.uuid), 0) for gpu in gpus}
        for gpu in gpus:
            gpu.links.meet({other.uuid: other.handle for other in gpus if other is not gpu})
        self._register(gpus)
        while not self._stop.is_set():
            due = time.monotonic() + self._period_s
            for gpu in gpus:
                info, read_ns = self._read(gpu), time.monotonic_ns()
                if info.problem:
                    # A card that answers nothing keeps its last figures, and their age.
                    known, read_ns = self._figures[gpu.uuid]
                    info = msgspec.structs.replace(known, problem=info.problem)
                self._figures = {**self._figures, gpu.uuid: (info, read_ns)}
            self._wait(due)

    def _read(self, gpu: _Gpu) -> GpuInfo:
        """Return one round of figures; `problem` is set if none could be read."""
        nvml, found, problem = self._nvml, dict[str, Any](), ""
        for name, reader in list(gpu.readers.items()):
            self._calling = f"{name} of {gpu.uuid}", time.monotonic_ns()
            try:
                found.update(reader(nvml, gpu))
            except (nvml.NVMLError, AttributeError) as error:
                # An older module has no such function: that is the same as a card without the figure.
                status = getattr(error, "value", nvml.NVML_ERROR_NOT_SUPPORTED)
                if status in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                    del gpu.readers[name]
                else:
                    problem = f"NVML: {error}"
        self._calling = f"links of {gpu.uuid}", time.monotonic_ns()
        links = gpu.links.read(nvml)
        self._calling = "", 0
        problem = "" if found else problem or "NVML has no figures of this card"
        found["processes"] = card_processes.listed(*(found.pop(name, None) for name in _OF_PROCESSES))
        return GpuInfo(uuid=gpu.uuid, problem=problem, **found, **links)

    def _register(self, gpus: list[_Gpu]) -> None:
        """Register for XIDs of the cards that report them."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            log.info("no XIDs of GPUs: %s", error)
            return
        for gpu in gpus:
            with contextlib.suppress(nvml.NVMLError):
                nvml.nvmlDeviceRegisterEvents(gpu.handle, nvml.nvmlEventTypeXidCriticalError, events)
                self._events, self._uuids[_address(gpu.handle)] = events, gpu.uuid

    def _wait(self, due: float) -> None:
        """Wait until `due`, and record the XIDs that come meanwhile."""
        nvml = self._nvml
        while not self._stop.is_set() and (left_s := due - time.monotonic()) > 0:
            if self._events is None:
                self._stop.wait(left_s)
                return
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, max(1, int(left_s * 1000)))
            except nvml.NVMLError as error:
                if error.value != nvml.NVML_ERROR_TIMEOUT:
                    log.warning("no XIDs of GPUs any more: %s", error)
                    self._events = None
                continue
            uuid, xid = self._uuids.get(_address(event.device), ""), (int(event.eventData), time.monotonic_ns())
            log.warning("XID %d of %s", xid[0], uuid or "a GPU that is not known")
            self._xids = {**self._xids, uuid: (*self._xids.get(uuid, ()), xid)[-_XIDS_KEPT:]}


def start() -> Poller | None:
    """Return a running poller; None without an NVIDIA driver or without the module pynvml."""
    if not _DRIVER.exists():
        return None
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        log.warning("no figures of GPUs: the module pynvml is missing; install nvidia-ml-py")
        return None
    poller = Poller(nvml)
    poller.start()
    return poller


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _ms(ns: int) -> float:
    return round(ns / 1e6, 1)
