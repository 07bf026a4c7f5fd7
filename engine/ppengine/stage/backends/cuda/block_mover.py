"""Moving blocks of a stage on a GPU: to the host, back, and within the cache, each in the order that streams need.

Here is the order alone; `copy_lanes` has the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ppkernels.block_copy import Pairs

from ppengine.protocol.steps import MoveKind
from ppengine.stage.backends.cuda.copy_lanes import DeviceLane, SwapLane
from ppengine.stage.backends.cuda.streams import Event, Stream

_EVENTS = {MoveKind.OUT: "swapped out", MoveKind.IN: "swapped in", MoveKind.LOAD: "loaded"}


@dataclass(frozen=True, slots=True)
class _UnderWay:
    stream: Stream
    event: Event
    touched: frozenset[tuple[bool, int]]
    """(is a device block, number) of every block that is read or written."""


class BlockMover:
    """Puts copies on their lanes, and between lanes the waits that list order needs.

    Events are named by their producer. A swap waits for `compute before swap`, since older kernels
    write the blocks that go out and read those that are overwritten; `compute` waits for `swapped
    in`, and not for `loaded`. A copy waits for any copy under way on another lane that touches one of its blocks. The
    caller must wait for the event that `move` returns before it uses the blocks of a swap for
    something else, or acknowledges the step.
    """

    def __init__(self, compute: Stream, lanes: Mapping[MoveKind, DeviceLane | SwapLane]) -> None:
        self._compute = compute
        self._lanes = lanes
        self._under_way: list[_UnderWay] = []

    def move(self, kind: MoveKind, pairs: Pairs) -> Event | None:
        """Begin copies (src, dst) of one kind; return the event of a swap, None for one that is in compute's order.

        Raises IndexError for a block outside of its memory.
        """
        lane = self._lanes[kind]
        touched = frozenset(_touched(kind, pairs))
        self._under_way = [copy for copy in self._under_way if not copy.event.done()]
        for copy in self._under_way:
            if copy.stream is not lane.stream and copy.touched & touched:
                lane.stream.wait(copy.event)
        if kind is MoveKind.DEVICE:
            lane.copy(pairs)
            return None
        lane.stream.wait(self._compute.record("compute before swap"))
        lane.copy(pairs)
        event = lane.stream.record(_EVENTS[kind])
        self._under_way.append(_UnderWay(lane.stream, event, touched))
        if kind is MoveKind.IN:
            self._compute.wait(event)
        return event

    def drain(self) -> None:
        """Wait in the calling thread for the copies under way. Compute must be drained. Raises TimeoutError."""
        for stream in dict.fromkeys(copy.stream for copy in self._under_way if not copy.event.done()):
            stream.drain([])
        self._under_way.clear()


def _touched(kind: MoveKind, pairs: Pairs) -> Iterable[tuple[bool, int]]:
    for source, target in pairs:
        yield not kind.from_host, source
        yield not kind.to_host, target
