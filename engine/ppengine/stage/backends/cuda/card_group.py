"""The ranks of one stage on GPUs of one host: parts in plain device memory, calls that are kernels.

A call is one launch on the stream in use (`ppkernels.gpu.collectives`), also in a graph: addresses of the
other ranks are in a table on the device, which each generation fills again. So a graph that was
captured before the ranks met is right in every generation. Sums of large steps go by copies instead
(`copied_sums`). Each rank notes its calls, and compares them with those of the others (`call_log`).

Numbers of calls begin at the generation's share of 64 bits. A flag that a rank of an older generation
raises late is below all numbers of this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from ppkernels.gpu import collectives
from ppkernels.gpu.greedy_ranks import Columns, choose_greedy
from ppkernels.gpu.sampling import DeviceSampling
from ppkernels.gpu.top_k_ranks import choose_below
from ppkernels.norms import Norm
from torch import Tensor
from typing_extensions import override

from ppengine.checkpoint.model_shard import Shard
from ppengine.common.device_page import DevicePage
from ppengine.common.groups import HEAD, site
from ppengine.common.ring import Kind
from ppengine.models.group import Sum
from ppengine.protocol.place import Place
from ppengine.protocol.stage_info import SumsInfo, SumTime
from ppengine.stage.backends.cuda.call_log import CallLog
from ppengine.stage.backends.cuda.copied_sums import CopiedSums
from ppengine.stage.backends.cuda.errors import DriverError
from ppengine.stage.backends.cuda.late_ranks import CallMarks, LateRanks
from ppengine.stage.backends.cuda.one_shot_sums import OneShotSums
from ppengine.stage.backends.cuda.peer_lanes import PeerLanes
from ppengine.stage.backends.cuda.peer_memory import OpenedMemory, SharedMemory
from ppengine.stage.backends.cuda.rank_offers import RankOffer, exchange
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.backends.cuda.sum_ways import StepRows, TimedSums, routes
from ppengine.stage.backends.cuda.two_shot_sums import TwoShotSums
from ppengine.stage.edge_flags import PAGE, EdgeFlags, Flag
from ppengine.stage.edge_offers import Offer, RefusedError
from ppengine.stage.rank_calls import BELOW, BEST, PIECE, code_of
from ppengine.stage.rank_group import MeetAll, RankGroup
from ppengine.stage.wire import PeerLostError, SupersededError, Wire

if TYPE_CHECKING:
    from ppengine.stage.backends.cuda.driver_api import Driver  # needs cuda-bindings

LEAST_BYTES, MOST_BYTES = 2**20, 2**25
"""Bounds of the bytes of one launch; a longer call takes several. Inboxes have at most four times the most."""
FUSED_BYTES = LEAST_BYTES
"""Largest part whose sum is normed in the same kernel, in one launch: it fits into any inbox, and beyond that two
kernels are as fast."""
_GENERATION_SHIFT = 40


class CardGroup(RankGroup):
    """A rank on a GPU. `part_bytes`: of the largest usual call; `folder` has the page that releases waits."""

    def __init__(
        self, driver: Driver, uuid: str, place: Place, size: int, folder: Path, compute: Stream, part_bytes: int,
        page: DevicePage | None = None, rows: StepRows | None = None,
    ) -> None:  # fmt: skip
        """`page`: where the ranks that this one waits for are noted. `rows`: those of steps; None: no sum is timed."""
        self._stage, self.rank, self.size = place.stage, place.rank, size
        self.sums = SumsInfo(routes=routes(size))
        self._driver, self._page = driver, folder / f"g{place.stage}.{place.rank}.words"
        most = MOST_BYTES * 2 // size
        self._part_bytes = 1 << (min(max(part_bytes, LEAST_BYTES), most).bit_length() - 1)
        self._memory = SharedMemory(driver, uuid, collectives.memory_bytes(size, self._part_bytes))
        self._lanes = lanes = PeerLanes(driver, uuid, place, size, folder, compute)
        self._copies: CopiedSums = (OneShotSums if size == 2 else TwoShotSums)(lanes, part_bytes)
        device = driver.device
        self._table = torch.zeros(collectives.table_words(size), dtype=torch.int64, device=device)
        self._counters = torch.zeros(collectives.PROGRAMS, dtype=torch.int64, device=device)
        self._place = (self._table, self._counters, place.rank, size, self._part_bytes)
        """The last arguments of each launch."""
        marks = CallMarks(self._memory.address, self._counters.data_ptr(), place.rank, size, self._part_bytes)
        self._late = None if page is None else LateRanks(driver, page, marks, lanes.sent)
        self.calls = CallLog(folder, place.stage, place.rank)
        self._timed = None if rows is None else TimedSums(self, rows, self._own_data(), compute)
        self._columns: dict[tuple[int, ...], Tensor] = {}
        self._wires: dict[int, Wire] = {}
        self._opened: list[OpenedMemory] = []
        self._flags: EdgeFlags | None = None

    @property
    def stream(self) -> Stream:
        """The stream of its copies."""
        return self._lanes.stream

    def warm_up(self) -> None:
        """Compile and load the kernels of timed sums, before the ranks meet."""
        if self._timed is not None:
            self._timed.warm_up()

    @override
    def join(self, generation: int, meet_all: MeetAll) -> None:
        """Meet the other ranks and open their parts. Raises PeerLostError where a card does not reach another."""
        self.calls.begin()
        self._wires = meet_all()
        # All ranks have left the generation before. What is in a word that no call has written since must be no data.
        begin, end = collectives.words_bytes(self.size, self._part_bytes)
        self._memory.slot(0)[begin:end].zero_()
        torch.cuda.synchronize(self._driver.device)
        try:
            self._copies.begin()
            self._lanes.begin()
            offers = self._exchange()
            self.calls.open(offers)
            self._flags = flags = EdgeFlags(self._page, create=True)
            shown = self._driver.show(flags.address, PAGE)
            addresses = {self.rank: self._memory.address}
            for peer, offer in offers.items():
                addresses[peer] = self._open(peer, offer.calls)
            self._lanes.open({peer: self._open(peer, offer.copies) for peer, offer in offers.items()})
        except BaseException:
            self.close()
            raise
        self._counters.fill_(generation << _GENERATION_SHIFT)
        self._fill(1, shown + Flag.FILLED, *(addresses[rank] for rank in sorted(addresses)))
        # Ranks that share a card take turns: no time of a sum is that of a step.
        cards = {self._memory.offer.device, *(offer.calls.device for offer in offers.values())}
        self._time_sums(flags, shown, own_cards=len(cards) == self.size)
        if self._late is not None:
            self._late.active = True
            if self._late.ident is None:
                self._late.start()

    def _time_sums(self, flags: EdgeFlags, shown: int, own_cards: bool) -> None:
        """Time sums with the other ranks, if each has a card of its own. Raises PeerLostError, SupersededError.

        They are of no step, and outside any piece of work: no rank is late in them.
        """
        self.step, compute, times = 0, self._lanes.compute, list[SumTime]()
        if self._timed is not None and own_cards:
            compute.order.watch_waits(self._look, contextlib.nullcontext)
            try:
                times = self._timed.measure(self._driver, flags, shown)
            except BaseException:
                compute.drain(self.releases())
                self.close()
                raise
        self.sums = SumsInfo(routes=routes(self.size), times=times)

    def _look(self) -> None:
        """Raise an error if the ranks cannot go on together."""
        self.check_peer()
        if any(wire.left for wire in self._wires.values()):
            raise SupersededError("ranks of a stage timed their sums")

    def _own_data(self) -> list[Tensor]:
        """Return the memory that other ranks do not write to, bytes [part_bytes] twice."""
        memory, room = self._memory.slot(0), self._part_bytes
        return [memory[at : at + room] for at in collectives.own_data(self.rank, self.size, room)]

    def _exchange(self) -> dict[int, RankOffer]:
        """Return the offers of the other ranks, by rank."""
        try:
            offer = RankOffer(self._memory.offer, self._lanes.offer)
        except RefusedError as error:
            raise PeerLostError(f"no memory for the ranks of stage {self._stage}: {error}") from None
        return exchange(offer, self._wires)

    def _open(self, peer: int, offer: Offer) -> int:
        try:
            memory = OpenedMemory(self._driver, offer)
        except DriverError as error:
            text = f"the card of rank {self.rank} does not reach that of rank {peer}, {offer.device}: {error}"
            raise PeerLostError(f"stage {self._stage}: {text}") from None
        self._opened.append(memory)
        return memory.address

    def _fill(self, *words: int) -> None:
        """Write the table, from its begin, before a later launch reads it."""
        self._table[: len(words)].copy_(torch.tensor(words, dtype=torch.int64))
        torch.cuda.synchronize(self._driver.device)

    def _note(self, kind: int, site: int, part: Tensor, width: int) -> None:
        """Note a call with rows of `width` on all ranks."""
        self.calls.note(self.step, kind, site, len(part) * width * part.itemsize, code_of(part, width))

    @override
    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        self._note(Kind.ALL_REDUCE, site, part, part.shape[1])
        for piece in torch.split(part, self._most_rows(part)):
            collectives.all_reduce(piece, *self._place)
        return part

    @override
    def reduce_norm(self, part: Tensor, residual: Tensor, norm: Norm, site: int) -> Tensor:
        if part.nbytes > FUSED_BYTES or collectives.in_two_shots(part, self.size):
            return norm.of_sum(residual, self.all_reduce(part, site))
        self._note(Kind.ALL_REDUCE, site, part, part.shape[1])
        output = torch.empty_like(part)
        parameters = collectives.NormOf(norm.weight, norm.bias, norm.eps, norm.centred)
        collectives.reduce_norm(part, residual, parameters, output, *self._place)
        return output

    @override
    def pieces(self, rows: int, row_bytes: int) -> list[slice]:
        return self._copies.pieces(rows, row_bytes)

    @override
    def send(self, part: Tensor, site: int) -> Sum:
        self._note(PIECE, site, part, part.shape[1])
        return self._copies.send(part)

    def _most_rows(self, part: Tensor) -> int:
        return max(1, self._part_bytes // (part.shape[1] * part.itemsize))

    @override
    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        self._note(Kind.ALL_GATHER, site, part, sum(widths))
        whole = part.new_zeros(len(part), sum(widths))
        most = max(1, self._part_bytes // (max(widths) * part.itemsize))
        for first in range(0, len(part), most):
            piece, into = part[first : first + most].contiguous(), whole[first : first + most]
            collectives.all_gather(piece, into, self._first_columns(widths), max(widths), *self._place)
        return whole

    def choose_greedy(
        self, logits: Tensor, shard: Shard, parameters: DeviceSampling, slots: Tensor, positions: Tensor,
        newest: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the tokens [R] of greedy rows from all ranks' `logits` [R, w], which are not gathered."""
        self._note(BEST, site(0, HEAD), logits, shard.vocab_size)
        return choose_greedy(logits, _columns(shard), parameters, slots, positions, newest, *self._place)

    def choose_below(
        self, logits: Tensor, shard: Shard, parameters: DeviceSampling, slots: Tensor, positions: Tensor, most: int,
        newest: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the tokens [R] of rows that are greedy, or have a top-k of 1 to `most`, as `choose_greedy`."""
        self._note(BELOW, site(0, HEAD), logits, shard.vocab_size)
        return choose_below(logits, _columns(shard), parameters, slots, positions, most, newest, *self._place)

    def _first_columns(self, widths: list[int]) -> Tensor:
        """Return the first column of each rank, and their sum; made once, because a graph may not make it."""
        known = tuple(widths)
        if known not in self._columns:
            self._columns[known] = torch.tensor([0, *widths], device=self._driver.device).cumsum(0)
        return self._columns[known]

    @override
    def check_peer(self) -> None:
        self.calls.compare()
        for wire in self._wires.values():
            wire.check_open()

    @override
    def compare(self) -> None:
        self.calls.compare()

    @override
    def releases(self) -> list[Callable[[], None]]:
        own = [] if self._flags is None else [partial(self._flags.release, Flag.FILLED)]
        return [*own, *self._lanes.releases()]

    @override
    def close(self) -> None:
        if self._late is not None:
            self._late.active = False
        self.calls.close()
        self._fill(0)
        self._lanes.close()
        for memory in self._opened:
            # The memory of a rank that has died cannot always be closed; it goes with this process.
            with contextlib.suppress(DriverError):
                memory.close()
        flags, wires = self._flags, self._wires
        self._flags, self._wires, self._opened = None, {}, []
        if flags is not None:
            self._driver.unpin(flags.address)
            flags.close()
        for wire in wires.values():
            wire.close()


def _columns(shard: Shard) -> Columns:
    first, end = shard.vocabulary
    return Columns(first, end - first, shard.vocab_size)
