"""The device of a stage as boot sees it: its memory, and the parts of a stage that it makes.

`cpu/cpu_hardware` and `cuda/cuda_hardware` implement it; `selection` chooses between them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from ppkernels.batch import Batch
from torch import Tensor

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import EngineConfig
from ppengine.common.ring import Kind
from ppengine.models import StageModel
from ppengine.protocol.place import Place
from ppengine.stage.backends.base import (
    ActivationReceiver,
    ActivationSender,
    KvCache,
    KvShape,
    OfferedReceiver,
    OfferedTokens,
    SwapSpace,
    TokenSender,
    TokenTable,
)
from ppengine.stage.edge import Edge
from ppengine.stage.edge_offers import Offer
from ppengine.stage.rank_group import RankGroup
from ppengine.stage.recorder import Recorder
from ppengine.stage.runner import Runner, RunnerParts


class Room(NamedTuple):
    """Blocks that a stage has room for: addresses in its cache, and slots on the host."""

    shape: KvShape
    reserved_blocks: int
    swap_blocks: int


class DeviceEnds(Protocol):
    """Makes ends of edges that a device serves. A method raises RefusedError if the wire must carry the messages.

    `flags` is the path of the edge's progress flags; `offer` is the receiver's.
    """

    def receiver(self, edge: Edge, flags: Path) -> OfferedReceiver:
        """Return the receiving end for hidden states."""

    def tokens(self, edge: Edge, flags: Path, ring: Recorder) -> OfferedTokens:
        """Return the first stage's end for sampled tokens."""

    def sender(self, edge: Edge, flags: Path, ring: Recorder, offer: Offer) -> ActivationSender:
        """Return the sending end for hidden states."""

    def token_sender(self, edge: Edge, flags: Path, ring: Recorder, offer: Offer) -> TokenSender:
        """Return the last stage's end for sampled tokens."""


class RunnerResources(ABC):
    """Everything that the runners of one stage keep for life; each generation has a runner and ends of its own.

    `ring` is the main thread's.
    """

    launches: bool
    """Whether a step is only launched by its runner, and done later."""
    model: StageModel
    cache: KvCache
    swap: SwapSpace

    @property
    def device_ends(self) -> DeviceEnds | None:
        """The maker of ends that a device serves; None: the wire carries all messages."""
        return None

    @abstractmethod
    def receiver(self, edge: Edge) -> ActivationReceiver:
        """Return a receiver of hidden states by wire."""

    @abstractmethod
    def sender(self, edge: Edge, ring: Recorder) -> ActivationSender:
        """Return a sender of hidden states by wire."""

    @abstractmethod
    def token_sender(self, edge: Edge, ring: Recorder) -> TokenSender:
        """Return a sender of sampled tokens by wire."""

    @abstractmethod
    def tokens(self, ring: Recorder, edge: Edge | None) -> TokenTable:
        """Return the table of sampled tokens, which come by wire; `edge` None: this stage samples itself."""

    @abstractmethod
    def runner(self, parts: RunnerParts) -> Runner:
        """Return a runner for one generation."""


class Hardware(ABC):
    """One stage's device. Sizes in bytes."""

    kind: str
    name: str
    uuid: str | None
    device: torch.device
    total: int
    """Memory that this stage may count as its own: a utilization of 1."""
    half = False
    """Whether half precision is computed in half precision if the profile leaves the type to the checkpoint."""

    def batch(self, batch: Batch) -> Batch:
        """Return a step's batch with its tensors in the kernels' memory."""
        return batch

    @contextmanager
    def recording(self, ring: Recorder, tokens: int) -> Iterator[None]:
        """Return a block in which boot times `tokens` tokens: it is recorded as work of no step."""
        with ring.operation(Kind.FORWARD, size=tokens):
            yield

    @abstractmethod
    def make_group(
        self, config: EngineConfig, place: Place, ring: Recorder, spec: ModelSpec, dtype: torch.dtype
    ) -> RankGroup:
        """Return the group of the stage's ranks, which have not met; `ring` is the main thread's."""

    @abstractmethod
    def activations(self, run: Callable[[], None]) -> int:
        """Return the memory that `run` needs for a while, beside the memory in use before and after."""

    @abstractmethod
    def peak(self, weights: int, activations: int, mapped: int = 0) -> int:
        """Return the memory that this stage needs before it has a block: weights, the largest activations, all else.

        `mapped` are the bytes behind the cache, once it is there; graphs made since then count.
        """

    @abstractmethod
    def quantum_blocks(self, shape: KvShape) -> int:
        """Return the smallest number of blocks by which a cache changes."""

    @abstractmethod
    def scratch(self, shape: KvShape) -> list[Tensor]:
        """Return the layers of a cache of one block, for the profile run."""

    @abstractmethod
    def make_resources(
        self, config: EngineConfig, model: StageModel, room: Room, progress: Callable[[int, int], None]
    ) -> RunnerResources:
        """Make cache, swap space and everything else that runners keep for life; the null block is mapped.

        `progress(done, total)` is called for each graph. Raises ConfigError if the host has too
        little memory.
        """
