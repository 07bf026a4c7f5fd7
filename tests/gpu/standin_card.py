"""A GPU stage without a GPU: its own runner, state, edges and lanes over a driver whose device is this process.

What is launched is done at once, in the order of the program. Whether an event is seen to be done is the test's to say:
`Device.prompt`, or after how many looks.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ppengine.common.device_page import DevicePage
from ppengine.models.group import ALONE
from ppengine.protocol.steps import TOKEN_REGISTERED, Register, Row, Step
from ppengine.stage.backends.base import Ends, KvShape
from ppengine.stage.backends.cuda import device_buffers as buffers_module
from ppengine.stage.backends.cuda import step_sampler, virtual_memory
from ppengine.stage.backends.cuda.cuda_runner import CudaRunner
from ppengine.stage.backends.cuda.device_buffers import DeviceBuffers
from ppengine.stage.backends.cuda.device_ends import CudaEnds
from ppengine.stage.backends.cuda.device_tokens import LocalTokenTable
from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache, block_view
from ppengine.stage.backends.cuda.pinned_swap_space import PinnedSwapSpace
from ppengine.stage.backends.cuda.staged_edges import StagedReceiver, StagedSender, StagedTokenSender
from ppengine.stage.backends.cuda.streams import Order, Stream
from ppengine.stage.batch_state import BatchState
from ppengine.stage.checks import StageChecks
from ppengine.stage.edge import Edge
from ppengine.stage.generations import Generations
from ppengine.stage.rank_group import LoneRank, RankGroup
from ppengine.stage.recorder import Recorder
from ppengine.stage.runner import RunnerParts
from ppengine.stage.token_return import HostTokenTable
from ppengine.stage.wire import Wire
from torch import Tensor

CPU = torch.device("cpu")
WIDTH, TOKENS, LENGTH, BLOCK, BLOCKS = 8, 16, 64, 4, 24
SHAPE = KvShape(layers=2, block_size=BLOCK, kv_heads=1, head_dim=4, dtype=torch.float32)


class Device:
    """What all stand-ins of a test have in common. `log`: what was launched, and `waited` for each wait by looking."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompt = False
        """Whether events are seen to be done."""
        self.looks = 0
        """After how many looks they are, while `prompt` is off; 0: never."""
        self.log: list[str] = []
        device = self

        class RawEvent:
            """An event that is late."""

            def __init__(self, **_: object) -> None:
                self.looked = 0

            def record(self, stream: object) -> None:
                """Nothing: all before it is done."""

            def query(self) -> bool:
                self.looked += 1
                done = device.prompt or self.looked == device.looks
                if done and not device.prompt:
                    device.log.append("waited")
                return done

            def synchronize(self) -> None:
                """Nothing is left to wait for."""

            def elapsed_time(self, other: object) -> float:
                """No time passes."""
                return 0.0

        handles = itertools.count(1)
        empty, tensor = torch.empty, torch.tensor
        raw = lambda device=None, priority=0: SimpleNamespace(  # noqa: E731
            cuda_stream=next(handles), wait_event=lambda event: None, synchronize=lambda: None
        )
        monkeypatch.setattr(torch.cuda, "Stream", raw)
        monkeypatch.setattr(torch.cuda, "Event", RawEvent)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: empty(*a, **k))
        monkeypatch.setattr(torch, "tensor", lambda *a, pin_memory=False, **k: tensor(*a, **k))
        monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
        monkeypatch.setattr(virtual_memory, "HANDLE_BYTES", 4 * SHAPE.layer_block_bytes)
        monkeypatch.setattr(buffers_module, "DeviceSampling", lambda *a, **k: SimpleNamespace(set=self._set))
        monkeypatch.setattr(step_sampler, "choose", self._choose)

    def _set(self, *args: object) -> None:
        self.log.append("parameters")

    def _choose(self, logits: Tensor, *args: object, newest: Tensor | None = None, **more: object) -> Tensor:
        self.log.append("choose")
        return logits.argmax(1)


class StandInDriver:
    """The driver's calls on memory of this process; see `ppengine.stage.backends.cuda.driver_api.Driver`."""

    device, granularity = CPU, 128

    def __init__(self, device: Device) -> None:
        self._device = device
        self._kept: list[Any] = []

    def enter(self) -> None: ...
    def release(self, handle: object) -> None: ...
    def map(self, address: int, size: int, handle: object) -> None: ...
    def set_access(self, address: int, size: int) -> None: ...
    def unmap(self, address: int, size: int) -> None: ...
    def shut(self, address: int) -> None: ...
    def pin(self, address: int, size: int) -> None: ...
    def unpin(self, address: int) -> None: ...
    def create(self, size: int) -> object: ...

    def free_bytes(self) -> int:
        return 2**40

    def reserve(self, size: int) -> int:
        memory = mmap.mmap(-1, size)
        self._kept.append(memory)
        return ctypes.addressof(ctypes.c_char.from_buffer(memory))

    allocate = reserve

    def export(self, address: int) -> bytes:
        return address.to_bytes(64, "little")

    def open(self, exported: bytes) -> int:
        return int.from_bytes(exported, "little")

    def show(self, address: int, size: int) -> int:
        return address

    def zero(self, address: int, size: int, stream: int) -> None:
        self._device.log.append("zero")
        ctypes.memset(address, 0, size)

    def wait_for(self, word: int, value: int, stream: int) -> None:
        assert ctypes.c_uint64.from_address(word).value >= value, "the device would wait"

    def write_word(self, word: int, value: int, stream: int) -> None:
        ctypes.c_uint64.from_address(word).value = value

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self._device.log.append("copy")
        ctypes.memmove(target, source, size)

    to_host = to_device = copy


class Layers:
    """A model of two layers, each of which adds 1 in two halves."""

    layer_range, boundary_size, layer_weights = (0, 2), WIDTH, 2.0**40
    spec = SimpleNamespace(vocab_size=WIDTH, eos_token_ids=[])
    sources: tuple[()] = ()
    group: Any = ALONE

    def __init__(self, device: Device, first: bool, last: bool) -> None:
        self._device, self.first, self.last = device, first, last

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        self._device.log.append("embed")
        return ids.float().unsqueeze(1).repeat(1, WIDTH)

    def run(self, hidden: Tensor, batch: object, kv: object, behind: Any = None) -> Tensor:
        for _ in range(4):
            self._device.log.append("part")
            hidden = hidden + 0.5
            if behind is not None:
                behind()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        self._device.log.append("head")
        return hidden * torch.arange(WIDTH)

    def gather(self, logits: Tensor) -> Tensor:
        return logits

    def whole_logits(self, hidden: Tensor) -> Tensor:
        return self.gather(self.logits(hidden))


class StandInStage:
    """One stage: `runner` with its `buffers`, and the checks that it has."""

    def __init__(self, device: Device, folder: Path, number: int, count: int, model: Any = None) -> None:
        self.device, self.number = device, number
        self.driver: Any = StandInDriver(device)
        self.checks = StageChecks(number, 0, Generations(1))
        self.ledger = self.checks.ledger
        self.ledger.thread("main", "cpu")
        self.main = Recorder(folder / f"s{number}.main.ring", "main", number, 0)
        compute = Stream("compute", CPU, purpose="steps", order=Order(self.ledger))
        page = DevicePage(folder / f"s{number}.page")
        scheduler = SimpleNamespace(max_num_batched_tokens=TOKENS, max_num_seqs=4)
        config: Any = SimpleNamespace(profile=SimpleNamespace(scheduler=scheduler), stages=count, max_model_len=LENGTH)
        self.model: Any = model or Layers(device, number == 0, number == count - 1)
        self.cache = CudaKvCache(SHAPE, BLOCKS, self.driver, compute)
        self.swap = PinnedSwapSpace(SHAPE, BLOCKS, block_view(SHAPE, CPU), self.driver)
        self.buffers = DeviceBuffers(
            self.driver, "GPU-1", page, compute, config, self.model, self.cache, self.swap
        )  # fmt: skip
        self.steps = 0

    def run_on(
        self, over: Callable[[], bool] = lambda: False, group: RankGroup | None = None, **ends: Any
    ) -> None:  # fmt: skip
        """Make the runner, with its ends of edges."""
        group = group or LoneRank()
        parts = RunnerParts(
            stage=self.number, rank=group.rank, generation=1, model=self.model, state=BatchState(LENGTH, BLOCK),
            cache=self.cache, swap=self.swap, ring=self.main, ends=Ends(**ends), checks=self.checks, over=over,
            group=group,
        )  # fmt: skip
        self.runner = CudaRunner(parts, self.buffers)

    def step(self, rows: list[Row] | None = None, **more: Any) -> Any:
        """Execute the next step, and wait for a change of the cache as the core does; return what is pending of it."""
        self.steps += 1
        step = Step(1, self.steps, 0, rows=rows or [], **more)
        self.runner.announce(step)
        pending = self.runner.execute(step)
        while self.runner.changing and self.runner.mapped() is None:
            time.sleep(1e-4)
        return pending


def request(slot: int = 0, tokens: int = 6, blocks: tuple[int, ...] = (1, 2, 3)) -> dict[str, Any]:
    """Return what a step needs to make a request known."""
    register = Register(slot, f"r{slot}", list(range(1, tokens + 1)), tokens, 0.0, 1.0, 0, 0, 0, 0, [], -1)
    return {"register": [register], "tables": [(slot, 0, list(blocks))]}


def prompt(slot: int = 0, tokens: int = 6) -> list[Row]:
    """Return the row of a whole prompt."""
    return [Row(slot, 0, tokens, True, TOKEN_REGISTERED)]


def decode(position: int, token: int = 5, slot: int = 0) -> list[Row]:
    """Return the row of one token."""
    return [Row(slot, position, 1, True, token)]


def alone(device: Device, folder: Path) -> StandInStage:
    """A stage that is the whole pipeline."""
    stage = StandInStage(device, folder, 0, 1)
    stage.run_on(tokens=LocalTokenTable())
    return stage


class Pair:
    """Two stages, both of this process and thread; messages through the wire, or `by_device`."""

    def __init__(self, device: Device, folder: Path, by_device: bool, model: type[Layers] = Layers) -> None:
        self.first, self.last = (
            StandInStage(device, folder, number, 2, model(device, number == 0, number == 1)) for number in range(2)
        )
        forth, back = _edge(0, 1), _edge(1, 0)
        if by_device:
            ends = [CudaEnds(stage.driver, stage.buffers) for stage in (self.first, self.last)]
            flags = folder / "e0.words", folder / "tokens.words"
            receiver = ends[1].receiver(forth[1], flags[0])
            sender = ends[0].sender(forth[0], flags[0], self.first.main, receiver.offer)
            tokens = ends[0].tokens(back[1], flags[1], self.first.main)
            token_sender = ends[1].token_sender(back[0], flags[1], self.last.main, tokens.offer)
            self.last.run_on(receiver=receiver, token_sender=token_sender)
            self.first.run_on(sender=sender, tokens=tokens)
        else:
            first, last = self.first.buffers, self.last.buffers
            assert last.landing is not None
            self.last.run_on(
                receiver=StagedReceiver(forth[1], last, last.landing),
                token_sender=StagedTokenSender(back[0], self.last.main, self.last.ledger),
            )
            self.first.run_on(
                sender=StagedSender(forth[0], self.first.main, first.compute, first.copies, first.sums),
                tokens=HostTokenTable(self.first.main, back[1], self.first.ledger),
            )

    def step(self, rows: list[Row], **more: Any) -> list[int]:
        """Take one step through both; return the tokens."""
        self.first.step(rows, **more).finish()
        retired = self.last.step(rows, **more).finish()
        return [sampled.token for sampled in retired.sampled]

    def launch(self, rows: list[Row], **more: Any) -> list[Any]:
        """As `step`, but no host waits longer than it must: return what is pending."""
        first = self.first.step(rows, **more)
        if isinstance(self.first.runner.outgoing, StagedSender):
            first.finish()
        return [first, self.last.step(rows, **more)]


def _edge(sender: int, receiver: int) -> tuple[Edge, Edge]:
    ours, theirs = socket.socketpair()
    return Edge(Wire(_Tcp(ours), receiver, lambda: False), True), Edge(Wire(_Tcp(theirs), sender, lambda: False), False)


class _Tcp:
    """A socket that takes the options of TCP."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def setsockopt(self, *options: object) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)
