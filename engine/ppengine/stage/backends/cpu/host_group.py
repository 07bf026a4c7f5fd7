"""Collectives between the ranks of one stage on CPUs: data in shared memory, one header a rank by wire.

Each rank writes its part into its own file in /dev/shm and sends a header to every other rank. A
rank with all headers reads all parts and adds them in rank order, so that every rank has the same bits.

Two buffers alternate. A rank writes one again only after all others have sent their header of the call
between, which each of them sends after it has read the buffer. So no second round is needed.

A header says which call its sender has launched. Ranks that launched different things stop here, with
both call sites, and not with wrong sums.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic_ns

import torch
from torch import Tensor
from typing_extensions import override

from ppengine.common import mapped_file
from ppengine.common.ring import DTYPES, Gauge, Kind
from ppengine.common.sizes import size_text
from ppengine.protocol.stage_info import SumRoute, SumsInfo, SumTime
from ppengine.stage.rank_calls import Call, code_of, differ
from ppengine.stage.rank_group import MeetAll, RankGroup, rounds
from ppengine.stage.recorder import Recorder
from ppengine.stage.wire import Wire

BUFFER_BYTES = 2**20
"""Bytes of one call in one go; a longer one takes several rounds."""
_ROUTES = [
    SumRoute(most_bytes=BUFFER_BYTES, way="shared memory, one round"),
    SumRoute(most_bytes=None, way=f"shared memory, rounds of {size_text(BUFFER_BYTES)}"),
]
_MEASURED, _CALLS = (2**13, 2**17, BUFFER_BYTES), 6
"""Bytes of the parts that are summed when ranks have met, and how often. The calls are even in number, so that the
first call of a step finds the buffer that is its turn."""
_HEADER = struct.Struct("<QIIQII")
"""Number of the round, kind, call site, step, bytes, shape code."""


def group_path(folder: Path, stage: int, rank: int) -> Path:
    """Return the file of a rank's parts, in the engine's ring folder."""
    return folder / f"s{stage}.{rank}.group"


class HostGroup(RankGroup):
    """A rank on a CPU. `folder` has the parts of all ranks; a wait for a rank is a record of `ring`, the main one."""

    def __init__(self, stage: int, rank: int, size: int, folder: Path, ring: Recorder) -> None:
        self.rank, self.size = rank, size
        self._stage, self._folder, self._ring = stage, folder, ring
        self._wires: dict[int, Wire] = {}
        self._buffers: list[list[Tensor]] = []
        """[buffer][rank], in bytes; empty: the ranks have not met."""
        self._number = 0
        self._waited_ns = 0

    @override
    def join(self, generation: int, meet_all: MeetAll) -> None:
        """Make this rank's file, meet the other ranks, and map theirs."""
        mine = mapped_file.make(group_path(self._folder, self._stage, self.rank), 2 * BUFFER_BYTES)
        maps = {self.rank: mine}
        try:
            self._wires = meet_all()
            for peer in self._wires:
                maps[peer] = mapped_file.open_for_reading(group_path(self._folder, self._stage, peer))
        except BaseException:
            self.close()
            raise
        whole = [torch.frombuffer(maps[peer], dtype=torch.uint8) for peer in sorted(maps)]
        self._buffers = [[each[:BUFFER_BYTES] for each in whole], [each[BUFFER_BYTES:] for each in whole]]
        self._number = self.step = 0
        try:
            self.sums = SumsInfo(routes=_ROUTES, times=[self._measured(size) for size in _MEASURED])
        except BaseException:
            self.close()
            raise
        self._number = 0

    def _measured(self, size: int) -> SumTime:
        """Return the time of a sum of parts of `size` bytes, which all ranks make now."""
        part, times = torch.zeros(1, size // 4), []
        for _ in range(_CALLS):
            begun_ns = monotonic_ns()
            self._sum(part, 0)
            times.append(monotonic_ns() - begun_ns)
        return SumTime(bytes=size, us=median(times) / 1e3, way="shared memory")

    @override
    def all_reduce(self, part: Tensor, site: int) -> Tensor:
        return self._sum(part, site) if self._buffers else part

    def _sum(self, part: Tensor, site: int) -> Tensor:
        for piece in rounds(part, BUFFER_BYTES):
            parts = self._share(piece, Kind.ALL_REDUCE, site, part.shape[-1])
            if piece.dtype in (torch.bfloat16, torch.float16):
                total = parts[0].float()
                for each in parts[1:]:
                    total += each
                piece.copy_(total)
                continue
            torch.add(parts[0], parts[1], out=piece)
            for each in parts[2:]:
                piece += each
        return part

    @override
    def all_gather(self, part: Tensor, widths: list[int], site: int) -> Tensor:
        rows = part.shape[0]
        whole = part.new_zeros(rows, sum(widths))
        if not self._buffers:
            return whole
        columns = torch.split(whole, widths, 1)
        most = max(1, BUFFER_BYTES // (max(widths) * part.itemsize))
        for first in range(0, rows, most):
            piece = part[first : first + most].contiguous()
            sizes = [len(piece) * width for width in widths]
            parts = self._share(piece.view(-1), Kind.ALL_GATHER, site, part.shape[-1], sizes)
            for column, each, width in zip(columns, parts, widths, strict=True):
                column[first : first + most] = each.view(-1, width)
        return whole

    def _share(self, piece: Tensor, kind: Kind, site: int, width: int, sizes: list[int] | None = None) -> list[Tensor]:
        """Return all ranks' pieces, flat, of this round. `sizes`: elements of each; None: as many as this one's."""
        self._number += 1
        buffers = self._buffers[self._number & 1]
        buffers[self.rank][: piece.nbytes] = piece.view(torch.uint8)
        call = Call(self._number, kind, site, self.step, piece.nbytes, code_of(piece, width))
        header = memoryview(_HEADER.pack(*call))
        for wire in self._wires.values():
            wire.send([header])
        for peer, wire in self._wires.items():
            self._compare(self._receive(wire, peer, call), call, peer, None if sizes is None else sizes[peer])
        counts = [len(piece)] * len(buffers) if sizes is None else sizes
        return [each[: count * piece.itemsize].view(piece.dtype) for each, count in zip(buffers, counts, strict=True)]

    def _receive(self, wire: Wire, peer: int, call: Call) -> Call:
        """Return the header of another rank; a wait for it is recorded, if it is in a step."""
        header = memoryview(bytearray(_HEADER.size))
        if wire.readable or not call.step:
            wire.receive(header)
        else:
            begun_ns = monotonic_ns()
            seq = self._ring.begin(call.kind, call.step, peer, call.size, call.site, call.code, begun_ns)
            try:
                wire.receive(header)
            finally:
                self._ring.end(seq)
                self._waited_ns += monotonic_ns() - begun_ns
                self._ring.gauge(Gauge.COLLECTIVE_WAIT_NS, self._waited_ns)
        return Call._make(_HEADER.unpack(header))

    def _compare(self, theirs: Call, mine: Call, peer: int, elements: int | None) -> None:
        size = mine.size if elements is None else elements * _item_bytes(mine.code)
        code = mine.code if elements is None else theirs.code
        if theirs != mine._replace(size=size, code=code):
            raise differ(self._stage, self.rank, mine, peer, theirs, launched=False)

    @override
    def check_peer(self) -> None:
        for wire in self._wires.values():
            wire.check_open()

    @override
    def releases(self) -> list[Callable[[], None]]:
        return []  # A host that waits sees a rank go.

    @override
    def close(self) -> None:
        # The file stays, as rings do: a rank that is still about to map it would fail for no fault of its own.
        wires, self._wires, self._buffers = self._wires, {}, []
        for wire in wires.values():
            wire.close()


def _item_bytes(code: int) -> int:
    kind = code >> 24
    return getattr(torch, DTYPES[kind - 1]).itemsize if 0 < kind <= len(DTYPES) else 1
