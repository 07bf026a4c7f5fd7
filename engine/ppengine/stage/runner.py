"""Executing one step: memory work in the protocol's order, then the rows through this stage's layers."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ppengine.common.ring import Gauge, Kind
from ppengine.models import StageModel
from ppengine.protocol.stage_info import PlaceLinks
from ppengine.protocol.steps import Mapped, Mask, Move, MoveKind, Register, Retired, Step
from ppengine.stage.backends.base import ActivationReceiver, EdgeEnd, Ends, KvCache, Sender, SwapSpace
from ppengine.stage.batch_state import BatchState
from ppengine.stage.checks import StageChecks
from ppengine.stage.finite_check import FiniteCheck
from ppengine.stage.pending_step import Pending
from ppengine.stage.rank_group import LoneRank, RankGroup
from ppengine.stage.recorder import Recorder
from ppengine.stage.wire import PeerLostError

log = logging.getLogger("ppengine.stage")

MOVE_RECORDS = {
    MoveKind.DEVICE: Kind.COPY, MoveKind.OUT: Kind.SWAP_OUT, MoveKind.IN: Kind.SWAP_IN, MoveKind.LOAD: Kind.SWAP_IN,
}  # fmt: skip


def _never() -> bool:
    return False


def _no_masks(number: int) -> list[Mask]:
    raise ValueError(f"step {number} has masks that come later, and nothing brings them")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """Everything that a runner of one generation is made of."""

    stage: int
    rank: int
    generation: int
    model: StageModel
    state: BatchState
    cache: KvCache
    swap: SwapSpace
    ring: Recorder
    """The main thread's."""
    ends: Ends
    checks: StageChecks
    group: RankGroup = field(default_factory=LoneRank)
    over: Callable[[], bool] = _never
    """Returns whether the generation is over: then no device is waited for any more."""
    late_masks: Callable[[int], list[Mask]] = _no_masks
    """Waits for the masks that come behind a step."""


class Runner(ABC):
    """One stage's model, memory and edges in one generation. Its caller hands it steps in order, from one thread."""

    def __init__(self, parts: RunnerParts) -> None:
        self.stage, self.rank, self.generation = parts.stage, parts.rank, parts.generation
        self.cache = parts.cache
        self._swap = parts.swap
        self._model = parts.model
        self._state = parts.state
        self._ring = parts.ring
        self._checks = parts.checks
        self._group = group = parts.group
        self._receiver, self._sender, self._token_sender, self._tokens = parts.ends
        ends: tuple[EdgeEnd | None, ...] = (self._receiver, self._tokens, self._sender, self._token_sender)
        self._ends = [end for end in ends if end is not None]
        # The control thread may be late, and the group is in its next generation by then.
        self._releases = [*(end.release for end in self._ends), *group.releases()]
        self._finite = FiniteCheck(parts.stage, parts.model, parts.state, parts.cache, parts.checks)
        self._change: tuple[int, int] | None = None
        """Step and blocks of the change of the cache that has not ended."""
        self._mapped: Mapped | None = None

    @property
    def links(self) -> PlaceLinks:
        """How it is linked with the other places that it has met."""
        carrier = None if self._receiver is None else self._receiver.edge.wire.carrier
        return PlaceLinks(carrier=carrier, sums=self._group.sums)

    @property
    def outgoing(self) -> Sender | None:
        """The end that this stage sends by: to the next stage, or tokens to the first one."""
        return self._token_sender if self._sender is None else self._sender

    def check_neighbours(self) -> None:
        """Raise PeerLostError if a device may wait for a neighbour that is gone."""
        for end in self._ends:
            end.check_peer()
        self._group.check_peer()

    def release(self) -> None:
        """Let a device that waits for a neighbour run on, at the cost of its results.

        Any thread may call it, also when the generation is over: all that it reaches is of this one.
        """
        for release in self._releases:
            release()

    def leave(self) -> None:
        """Close all edges with the messages under way on them; requests are forgotten with this runner."""
        for end in self._ends:
            end.close()
        self._group.close()

    def announce(self, step: Step) -> None:
        """Prepare for a step that has arrived: its hidden states are expected."""
        if self._receiver is not None and step.rows:
            self._receiver.expect(step.number, sum(row.count for row in step.rows))

    @property
    def lacks_masks(self) -> int:
        """Number of the launched step whose sampling waits for masks; 0: none does."""
        return 0

    def sample_late(self, masks: list[Mask]) -> None:
        """Launch the sampling of the step that `lacks_masks`."""
        raise ValueError(f"no step waits for {len(masks)} masks")

    def prepare(self, step: Step) -> None:  # noqa: B027 (a CPU computes meanwhile)
        """Do what a step needs of the host and not of the device: masks of the step before are waited for.

        It may be called several times.
        """

    def execute(self, step: Step) -> Pending:
        """Do or launch one step; its acknowledgement is sent when it is done. Raises errors of model and transport."""
        if step.checks is not None:
            self._checks.apply(step.checks)
        self._state.release(step.release)
        if self._tokens is not None and step.release:
            self._tokens.forget(step.release)
        self._state.register(step.register)
        self._state.set_tables(step.tables)
        self._state.give(step.given)
        # The state is whole: a GPU may wait for masks here, and prepare the step behind this one meanwhile.
        self._registered(step.register)
        self._group.step = step.number
        retired = Retired(self.generation, step.number, self.stage, self.rank)
        pending = Pending(retired)
        if step.map_blocks is not None:
            self._map(step.number, step.map_blocks)
        if step.moves:
            self._move(step.number, step.moves, pending)
        if step.rows:
            try:
                self._rows(step, pending)
            finally:
                self._ring.end_part()
        return pending

    def _registered(self, registers: list[Register]) -> None:  # noqa: B027 (a CPU needs no more than the state)
        """Note requests that the step has registered."""

    @abstractmethod
    def _move(self, number: int, moves: list[Move], pending: Pending) -> None:
        """Move blocks between cache and swap space, and within the cache, in list order."""

    @abstractmethod
    def _rows(self, step: Step, pending: Pending) -> None:
        """Take the step's rows through the layers, and pass the result on."""

    def _take(self, receiver: ActivationReceiver, number: int, count: int) -> Tensor:
        """Return the hidden states of a step that has `count` tokens.

        Raises PeerLostError. It names this stage itself if a message was not due because this stage expected others.
        """
        try:
            return receiver.take(number)
        except PeerLostError as error:
            if error.rows is None or error.rows == count:
                raise
            text = f"{error}; m{number} has {count} tokens, so stage {self.stage} expected a wrong message"
            raise PeerLostError(text, self.stage, self.rank) from None

    @property
    def changing(self) -> bool:
        """Whether `mapped` has something to return, now or later."""
        return self._change is not None or self._mapped is not None

    def mapped(self) -> Mapped | None:
        """Return, once, the result of the newest change of the cache when it has ended; does not wait."""
        self._end_change()
        mapped, self._mapped = self._mapped, None
        return mapped

    def _map(self, number: int, blocks: int) -> None:
        """Begin a change of the cache. One that needs no preparation (on a CPU) ends within the step."""
        with self._ring.operation(Kind.MAP, number, size=blocks):
            self.cache.prepare(blocks)
            self._change = number, blocks
            self._end_change()

    def _end_change(self) -> None:
        if self._change is None or not self.cache.prepared(self._change[1]):
            return
        (number, blocks), self._change = self._change, None
        error = self.cache.map_blocks(blocks)
        self._ring.gauge(Gauge.MAPPED_BLOCKS, self.cache.mapped)
        self._ring.gauge(Gauge.KV_MAPPED_BYTES, self.cache.mapped * self.cache.shape.block_bytes)
        log.info("step %d maps %d blocks: %s", number, blocks, error or "done")
        self._mapped = Mapped(self.generation, number, self.stage, self.rank, self.cache.mapped, error)
