"""Groups of ranks: a pure table of places, their tensor-parallel peers and their pipeline neighbours.

A place is a stage and a tensor rank in it. Ranks are numbered stage by stage, so that the ranks of one
stage are consecutive: they share a host and talk most.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppengine.protocol.place import Place

EMBED, ATTENTION, MLP, HEAD = range(4)
_PARTS = ("embedding", "attention", "MLP", "head")


@dataclass(frozen=True, slots=True)
class Groups:
    """`pipeline` stages of `tensor` ranks each.

    Data-parallel replicas and expert groups are not built: a replica would be another table, an expert
    group is the ranks of one stage.
    """

    pipeline: int
    tensor: int = 1

    def __len__(self) -> int:
        return self.pipeline * self.tensor

    @property
    def places(self) -> list[Place]:
        """All places in the order of their numbers."""
        return [Place(stage, rank) for stage in range(self.pipeline) for rank in range(self.tensor)]

    def number(self, place: Place) -> int:
        """Return the rank of `place` among all."""
        return place.stage * self.tensor + place.rank

    def tensor_peers(self, place: Place) -> list[Place]:
        """Return all places of the stage, `place` among them, in rank order."""
        return [Place(place.stage, rank) for rank in range(self.tensor)]

    def previous(self, place: Place) -> Place | None:
        """Return the place that sends hidden states to `place`: its own rank one stage before; None on the first."""
        return Place(place.stage - 1, place.rank) if place.stage > 0 else None

    def next(self, place: Place) -> Place | None:
        """Return the place that receives hidden states from `place`; None on the last stage."""
        return Place(place.stage + 1, place.rank) if place.stage + 1 < self.pipeline else None

    def token_source(self, place: Place) -> Place:
        """Return the place whose sampled tokens `place`, of the first stage, receives: every rank samples the same."""
        return Place(self.pipeline - 1, place.rank)

    def text(self, place: Place) -> str:
        """Return the name for operators: `stage 1`, or `stage 1 rank 0` where stages have several ranks."""
        return f"stage {place.stage}" if self.tensor == 1 else f"stage {place.stage} rank {place.rank}"


def site(layer: int, part: int) -> int:
    """Return the number of a collective's call site: `part` of `layer`, 0 for embedding and head."""
    return layer << 2 | part


def site_text(number: int) -> str:
    """Return a call site in words: `attention of layer 3`."""
    layer, part = number >> 2, number & 3
    return _PARTS[part] if part in (EMBED, HEAD) else f"{_PARTS[part]} of layer {layer}"
