"""Opening the edges of one stage in one generation: who meets whom, and what carries the messages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ppengine.common.config import EngineConfig
from ppengine.common.ring import Kind
from ppengine.stage.backends.hardware import Hardware
from ppengine.stage.edge import Edge
from ppengine.stage.edge_offers import Offer, RefusedError, consider, propose
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.recorder import Rings
from ppengine.stage.token_return import TokenTable
from ppengine.stage.transport import Inlet, Outbox
from ppengine.stage.wire import meet

log = logging.getLogger("ppengine.stage")


class Ends(NamedTuple):
    """This stage's ends of its edges; None where it has no such edge."""

    inlet: Inlet | None
    outbox: Outbox | None
    tokens: TokenTable | None


@dataclass(frozen=True)
class Connector:
    """Meets the neighbours of `stage`. `left` tells whether the generation is over."""

    config: EngineConfig
    stage: int
    generation: int
    hardware: Hardware
    card: Any
    rings: Rings
    ledger: Ledger
    left: Callable[[], bool]
    width: int
    dtype: torch.dtype
    """Of hidden states [tokens, width]."""

    def connect(self) -> Ends:
        """Open all edges. Raises SupersededError when `left()` is true before all are open, PeerLostError."""
        with contextlib.ExitStack() as made:
            ends = self._connect(made)
            # From here on the runner closes them.
            made.pop_all()
        return ends

    def _connect(self, made: contextlib.ExitStack) -> Ends:
        """Upstream first: along the pipeline somebody can always go on."""
        stage, last = self.stage, self.config.stages - 1
        ahead = self.config.profile.scheduler.schedule_ahead
        inlet = outbox = tokens = None
        if not last:
            return Ends(None, None, self.hardware.own_tokens(self.rings.main) if ahead else None)
        if stage > 0:
            inlet = self._inlet(f"e{stage - 1}", made)
        if stage < last:
            outbox = self._outbox(f"e{stage}", stage + 1, made)
        if ahead and stage == 0:
            tokens = self._tokens(last, made)
        elif ahead and stage == last:
            outbox = self._outbox("tokens", 0, made)
        return Ends(inlet, outbox, tokens)

    def _inlet(self, name: str, made: contextlib.ExitStack) -> Inlet:
        edge = self._edge(name, False, self.stage - 1, made)
        served: Inlet | None = self._offer(edge, made, lambda ends: ends.inlet(edge, self._words(name)))
        if served is not None:
            return served
        limit = self.config.profile.scheduler.max_num_batched_tokens
        return Inlet(edge, limit, self.width, self.dtype, self.ledger, self.hardware.pinned)

    def _tokens(self, peer: int, made: contextlib.ExitStack) -> TokenTable:
        edge, ring = self._edge("tokens", False, peer, made), self.rings.main
        served: TokenTable | None = self._offer(edge, made, lambda ends: ends.tokens(edge, self._words("tokens"), ring))
        return TokenTable(ring, edge, self.ledger) if served is None else served

    def _outbox(self, name: str, peer: int, made: contextlib.ExitStack) -> Outbox:
        edge, ends = self._edge(name, True, peer, made), self.hardware.ends(self.card)

        def accept(offer: Offer) -> Any:
            if ends is None:
                raise RefusedError(f"stage {self.stage} uses no other's memory")
            make = ends.token_return if name == "tokens" else ends.outbox
            return make(edge, self._words(name), self.rings.main, offer)

        outbox, refusal = consider(edge.wire, accept)
        _tell(edge, "to", refusal)
        if outbox is None:
            outbox = Outbox(edge, self.rings.main, self.ledger)
        made.callback(outbox.close)
        return outbox

    def _offer(self, edge: Edge, made: contextlib.ExitStack, make: Callable[[Any], Any]) -> Any:
        """Return the receiving end that the device serves if there can be one and the sender takes part, else None."""
        ends: Any = self.hardware.ends(self.card)
        served: Any = None
        with contextlib.ExitStack() as unless_used:
            if ends is not None:
                try:
                    served = make(ends)
                    unless_used.callback(served.drop)
                except RefusedError as error:
                    log.warning("no memory for stage %d to write to: %s", edge.peer, error)
            refusal = propose(edge.wire, None if served is None else served.offer)
            _tell(edge, "from", refusal)
            if refusal:
                return None
            unless_used.pop_all()
        made.callback(served.close)
        return served

    def _edge(self, name: str, upstream: bool, peer: int, made: contextlib.ExitStack) -> Edge:
        with self.rings.main.operation(Kind.COLLECTIVE, peer=peer):
            wire = meet(Path(self.config.run_dir), f"g{self.generation}-{name}", upstream, peer, self.left)
            edge = Edge(wire, upstream, self.rings.send if upstream else self.rings.receive)
        made.callback(edge.close)
        return edge

    def _words(self, name: str) -> Path:
        return Path(self.config.ring_dir) / f"{name}.words"


def _tell(edge: Edge, direction: str, refusal: str) -> None:
    how = f"the wire carries messages, since {refusal}" if refusal else "the device carries messages"
    log.info("edge %s stage %d: %s", direction, edge.peer, how)
