"""Writing the rings of a stage: one file a thread; operations that are not in every step may be `with` blocks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ppengine.common.config import EngineConfig
from ppengine.common.ring import Kind, RingWriter


class _Operation:
    __slots__ = ("_ring", "_seq")

    def __init__(self, ring: RingWriter, seq: int) -> None:
        self._ring = ring
        self._seq = seq

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._ring.end(self._seq)


class Recorder(RingWriter):
    """A ring with `with recorder.operation(Kind.FORWARD, step): ...`; owned by one thread."""

    __slots__ = ()

    def operation(self, kind: Kind, step: int = 0, peer: int = -1, size: int = 0, detail: int = 0) -> _Operation:
        """Begin an operation that ends with the block. `peer`: stage at the other side; `size`: see `ring.Kind`."""
        return _Operation(self, self.begin(kind, step, peer, size, detail))


class Rings(NamedTuple):
    """The rings of a stage's work. `main` and `receive` belong to the main thread, `send` to the one that sends."""

    main: Recorder
    receive: Recorder
    send: Recorder


def open_rings(config: EngineConfig, stage: int, rank: int, generation: int) -> Rings:
    """Make the three rings of a stage."""
    return Rings(*(open_recorder(config, stage, rank, name, generation) for name in Rings._fields))


def open_recorder(config: EngineConfig, stage: int, rank: int, thread: str, generation: int) -> Recorder:
    """Make the ring `s<stage>.<rank>.<thread>.ring` in the engine's ring folder."""
    path = Path(config.ring_dir) / f"s{stage}.{rank}.{thread}.ring"
    recorder = Recorder(path, thread, stage, rank)
    recorder.generation = generation
    return recorder
