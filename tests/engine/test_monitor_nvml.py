"""The poller of GPU figures against an NVML that hangs, lacks fields, fails, and reports XIDs."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import pytest
from ppengine.agent import nvml
from ppengine.agent.card_processes import ROUNDS, CardProcesses
from ppengine.agent.nvml import Poller

GONE = 2**30
"""No process has such a pid."""
UUID = "GPU-3c3fe52c-f4e1-51a3-c146-9b0c63b9dab0"


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml:
    """pynvml with two cards, as far as the poller knows it. `rules` are called before the function of their name."""

    NVMLError = NvmlError
    NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT = 0, 3, 10
    NVML_ERROR_FUNCTION_NOT_FOUND, NVML_ERROR_GPU_IS_LOST, NVML_ERROR_NOT_FOUND = 13, 15, 6
    NVML_CLOCK_SM = NVML_TEMPERATURE_GPU = NVML_PCIE_UTIL_TX_BYTES = NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_PCIE_UTIL_RX_BYTES = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 0, 138, 139
    nvmlMemory_v2, nvmlEventTypeXidCriticalError = 2, 8

    def __init__(self) -> None:
        self.rules: dict[str, Callable[[], None]] = {}
        self.calls: Counter[str] = Counter()
        self.events: Queue[tuple[int, int]] = Queue()
        self.kib = 0
        self.compute: dict[int, int | None] = {}
        self.graphics: dict[int, int | None] = {}
        self.use: dict[int, int] = {}
        """Per cent of the SMs by pid, since the last question."""
        self.now_us = 0
        self.handles = [ctypes.cast(address, ctypes.POINTER(ctypes.c_int)) for address in (0x1000, 0x2000)]

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if not name.startswith("nvml") or not callable(value):
            return value

        def called(*args: Any, **more: Any) -> Any:
            self.calls[name] += 1
            if name in self.rules:
                self.rules[name]()
            return value(*args, **more)

        return called

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.handles[index]

    def _index(self, handle: Any) -> int:
        return int(ctypes.cast(handle, ctypes.c_void_p).value or 0) // 0x1000 - 1

    def nvmlDeviceGetUUID(self, handle: Any) -> bytes | str:
        return [UUID, b"GPU-other"][self._index(handle)]

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int) -> Any:
        return SimpleNamespace(total=150, used=60 + self._index(handle), reserved=6, free=84)

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=37, memory=5)

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: int) -> int:
        return 1980

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return 93816

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        return 700000

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        return 35

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return 0x1 | 0x4 | 0x20 | 0x1000

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: int, counter: int) -> int:
        return 7 * kind

    def nvmlDeviceGetPcieThroughput(self, handle: Any, counter: int) -> int:
        return [1388, 445][counter]

    def nvmlDeviceGetFieldValues(self, handle: Any, fields: list[Any]) -> list[Any]:
        self.kib += 1024
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=self.kib)) for _ in fields]

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.compute.items()]

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.graphics.items()]

    def nvmlDeviceGetProcessUtilization(self, handle: Any, since_us: int) -> list[Any]:
        if not self.use:
            raise NvmlError(self.NVML_ERROR_NOT_FOUND)
        self.now_us += 1000
        samples = [SimpleNamespace(pid=pid, timeStamp=self.now_us, smUtil=use) for pid, use in self.use.items()]
        return [*samples, SimpleNamespace(pid=0, timeStamp=0, smUtil=0)]

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: Any, kinds: int, events: object) -> None: ...
    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        try:
            index, code = self.events.get(timeout=timeout_ms / 1000)
        except Empty:
            raise NvmlError(self.NVML_ERROR_TIMEOUT) from None
        return SimpleNamespace(device=self.handles[index], eventType=8, eventData=code)


@pytest.fixture
def fake() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def poller(fake: FakeNvml) -> Iterator[Poller]:
    made = Poller(fake, period_s=0.02)
    yield made
    made.stop()


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 10
    while not (answer := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
    return answer


def raising(code: int) -> Callable[[], None]:
    def rule() -> None:
        raise NvmlError(code)

    return rule


def known(poller: Poller) -> Any:
    """Return the first card once it has figures."""
    return until(lambda: next((gpu for gpu in poller.latest() if gpu.age_ms is not None), None), "no figures")


def test_figures_with_their_units(fake: FakeNvml, poller: Poller) -> None:
    assert poller.latest() == []
    poller.start()
    gpu = known(poller)
    assert (gpu.uuid, gpu.name, gpu.problem) == (UUID, "NVIDIA H200", "")
    assert (gpu.memory_total, gpu.memory_used, gpu.memory_driver) == (150, 60, 6)
    assert (gpu.busy, gpu.sm_clock_mhz, gpu.temperature_c) == (0.37, 1980, 35)
    assert (gpu.power_w, gpu.power_limit_w) == (93.816, 700.0)
    assert gpu.throttle == ["power cap", "thermal", "0x1000"], "being idle holds nothing down"
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected) == (0, 7)
    assert (gpu.pcie_tx_bytes_s, gpu.pcie_rx_bytes_s) == (1_388_000.0, 445_000.0)
    assert gpu.xids == []
    other = until(lambda: [gpu for gpu in poller.latest() if gpu.memory_used == 61], "the second card")[0]
    assert other.uuid == "GPU-other"
    # Counters need two looks.
    until(lambda: (poller.latest()[0].nvlink_tx_bytes_s or 0) > 0, "no rate of NVLink")


def test_a_call_that_hangs_holds_nobody_up(fake: FakeNvml, poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "SILENT_S", 0.2)
    poller.start()
    known(poller)
    release = threading.Event()
    fake.rules["nvmlDeviceGetPowerUsage"] = lambda: release.wait() and None
    stuck = until(lambda: [gpu for gpu in poller.latest() if gpu.problem], "the hang is not told")[0]
    assert stuck.problem.startswith(f"NVML has not answered power of {UUID} for ")
    assert stuck.power_w == 93.816, "what was known stays"
    began = time.monotonic()
    ages = [poller.latest()[0].age_ms for _ in range(100)]
    assert time.monotonic() - began < 1.0
    assert ages == sorted(ages) and ages[0] > 150
    release.set()
    until(lambda: not poller.latest()[0].problem and (poller.latest()[0].age_ms or 999) < 150, "it goes on")


def test_what_a_card_does_not_have_is_unknown_and_not_asked_again(fake: FakeNvml, poller: Poller) -> None:
    fake.rules["nvmlDeviceGetFieldValues"] = raising(3)
    fake.rules["nvmlDeviceGetTotalEccErrors"] = raising(3)
    poller.start()
    known(poller)
    until(lambda: fake.calls["nvmlDeviceGetName"] > 6, "more rounds")
    gpu = poller.latest()[0]
    assert (gpu.nvlink_tx_bytes_s, gpu.ecc_corrected, gpu.ecc_uncorrected) == (None, None, None)
    assert gpu.temperature_c == 35 and gpu.problem == ""
    assert fake.calls["nvmlDeviceGetFieldValues"] == 2 and fake.calls["nvmlDeviceGetTotalEccErrors"] == 4


def test_a_field_that_says_no_itself_is_unknown(
    fake: FakeNvml, poller: Poller, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(ullVal=0))] * 2
    monkeypatch.setattr(FakeNvml, "nvmlDeviceGetFieldValues", lambda self, handle, fields: answer)
    poller.start()
    assert known(poller).nvlink_tx_bytes_s is None and known(poller).problem == ""


def test_an_older_module_without_a_function(fake: FakeNvml, poller: Poller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    poller.start()
    gpu = known(poller)
    assert gpu.throttle is None and gpu.power_w == 93.816


def test_one_figure_that_fails_for_once_comes_back(fake: FakeNvml, poller: Poller) -> None:
    fake.rules["nvmlDeviceGetTemperature"] = raising(999)
    poller.start()
    assert known(poller).temperature_c is None and known(poller).busy == 0.37
    del fake.rules["nvmlDeviceGetTemperature"]
    until(lambda: poller.latest()[0].temperature_c == 35, "it is asked again")


def test_processes_of_a_card_with_memory_and_use(fake: FakeNvml, poller: Poller) -> None:
    ours = os.getpid()
    fake.compute, fake.graphics, fake.use = {ours: 7 * 2**30, GONE: 60 * 2**30}, {ours: 7 * 2**30, 2: None}, {ours: 60}
    poller.start()
    first, second, third = known(poller).processes
    assert (first.pid, first.bytes, first.sm) == (ours, 7 * 2**30, 0.6), "who computes comes first"
    assert first.name.startswith("python") or "pytest" in first.name
    assert (second.pid, second.name, second.bytes, second.sm) == (GONE, "", 60 * 2**30, 0.0), "no such process here"
    assert second.text == f"a process that is not visible here (pid {GONE})"
    assert (third.pid, third.bytes) == (2, None)


def test_eight_processes_at_most_and_not_without_those_that_compute(fake: FakeNvml, poller: Poller) -> None:
    fake.compute = {GONE + index: index * 2**30 for index in range(12)}
    fake.use = {GONE: 10, GONE + 1: 9}
    poller.start()
    assert [process.pid - GONE for process in known(poller).processes] == [0, 11, 10, 9, 8, 7, 6, 5]


def test_use_is_a_mean_of_the_last_rounds(fake: FakeNvml) -> None:
    card, handle = CardProcesses(), fake.handles[0]
    for _ in range(ROUNDS + 1):
        fake.use = {GONE: 100}
        assert card.use(fake, handle) == {GONE: 1.0}
    fake.use = {}
    assert card.use(fake, handle) == {GONE: (ROUNDS - 1) / ROUNDS}, "the driver has no sample: not used"
    for _ in range(ROUNDS):
        last = card.use(fake, handle)
    assert last == {}


@pytest.mark.parametrize(
    ("function", "bytes_known", "use_known"),
    [
        ("nvmlDeviceGetProcessUtilization", True, False),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", True, True),
        ("nvmlDeviceGetComputeRunningProcesses_v3", False, True),
    ],
)
@pytest.mark.parametrize("status", [3, 999])
def test_each_reader_of_processes_may_fail_alone(
    fake: FakeNvml, poller: Poller, function: str, bytes_known: bool, use_known: bool, status: int
) -> None:
    fake.compute, fake.graphics, fake.use = {GONE: 5}, {}, {GONE: 50}
    fake.rules[function] = raising(status)
    poller.start()
    found = known(poller)
    assert found.memory_used == 60 and found.problem == ""
    assert [process.bytes for process in found.processes] == ([5] if bytes_known else [])
    assert [process.sm for process in found.processes] == ([0.5 if use_known else None] if bytes_known else [])


def test_without_any_list_processes_are_unknown(fake: FakeNvml, poller: Poller) -> None:
    for kind in ("Compute", "Graphics"):
        fake.rules[f"nvmlDeviceGet{kind}RunningProcesses_v3"] = raising(3)
    poller.start()
    assert known(poller).processes is None


def test_a_lost_card_keeps_what_was_known_and_says_so(fake: FakeNvml, poller: Poller) -> None:
    poller.start()
    known(poller)
    names = [name for name in dir(FakeNvml) if name.startswith("nvmlDeviceGet")]
    fake.rules = dict.fromkeys(names, raising(15))
    gpu = until(lambda: [gpu for gpu in poller.latest() if gpu.problem], "the loss is not told")[0]
    assert gpu.problem == "NVML: error 15" and gpu.memory_used == 60
    assert until(lambda: (poller.latest()[0].age_ms or 0) > 100, "the age grows")
    fake.events.put((0, 79))
    xids = until(lambda: poller.latest()[0].xids, "a lost card cannot tell its UUID")
    assert xids[0].code == 79


def test_xids_come_at_once_and_the_newest_are_kept(fake: FakeNvml) -> None:
    poller = Poller(fake, period_s=5.0)
    poller.start()
    known(poller)
    began = time.monotonic()
    for code in range(40, 50):
        fake.events.put((1, code))
    other = until(lambda: [g for g in poller.latest() if len(g.xids) == 8 and g.xids[-1].code == 49], "no XIDs")[0]
    assert time.monotonic() - began < 3.0, "they wait for the next round"
    assert other.uuid == "GPU-other" and [xid.code for xid in other.xids] == list(range(42, 50))
    assert all(0 <= xid.age_ms < 5000 for xid in other.xids) and poller.latest()[0].xids == []
    poller.stop()


def test_without_events_rounds_go_on(fake: FakeNvml, poller: Poller) -> None:
    fake.rules["nvmlEventSetCreate"] = raising(3)
    poller.start()
    until(lambda: fake.calls["nvmlDeviceGetName"] > 6, "no second round")
    fake.rules.clear()
    ended = Poller(fake, period_s=0.02)
    fake.rules["nvmlEventSetWait_v2"] = raising(15)
    ended.start()
    known(ended)
    time.sleep(0.2)
    assert fake.calls["nvmlEventSetWait_v2"] == 1, "an event set that fails is not asked in a loop"
    ended.stop()


def test_a_driver_that_does_not_start_gives_nothing(fake: FakeNvml, poller: Poller) -> None:
    fake.rules["nvmlInit"] = raising(9)
    poller.start()
    until(lambda: fake.calls["nvmlInit"], "it was not tried")
    assert poller.latest() == []


def test_without_a_driver_the_module_is_not_even_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvml, "_DRIVER", tmp_path / "nvidiactl")
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert nvml.start() is None and "pynvml" not in sys.modules
