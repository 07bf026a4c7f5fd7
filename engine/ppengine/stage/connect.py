"""Opening the edges of one place in one generation: which places meet, and what carries the messages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ppengine.common.config import EngineConfig
from ppengine.common.ring import Kind
from ppengine.stage.backends.base import (
    ActivationReceiver,
    ActivationSender,
    Ends,
    OfferedReceiver,
    OfferedTokens,
    TokenSender,
    TokenTable,
)
from ppengine.stage.backends.hardware import DeviceEnds, RunnerResources
from ppengine.stage.edge import Edge
from ppengine.stage.edge_addresses import AddressBook
from ppengine.stage.edge_offers import Offer, RefusedError, consider, propose
from ppengine.stage.meeting import meet
from ppengine.stage.rank_group import RankGroup, pairs
from ppengine.stage.rdma_agent import NoRdmaError
from ppengine.stage.rdma_meeting import receive_by_rdma, send_by_rdma
from ppengine.stage.rdma_wire import RdmaWire
from ppengine.stage.recorder import Rings
from ppengine.stage.wire import PeerLostError, Wire

log = logging.getLogger("ppengine.stage")
_Receiving = TypeVar("_Receiving", OfferedReceiver, OfferedTokens)
_Sending = TypeVar("_Sending", ActivationSender, TokenSender)
_TOKENS = "tokens"


@dataclass(frozen=True)
class Connector:
    """Meets the neighbours of `stage`. `left` returns whether the generation is over.

    `meanwhile` is called while a message is waited for; see `Edge`.
    """

    config: EngineConfig
    stage: int
    rank: int
    book: AddressBook
    resources: RunnerResources
    rings: Rings
    left: Callable[[], bool]
    meanwhile: Callable[[], bool] | None = None

    def connect(self) -> Ends:
        """Open all edges. Raises SupersededError when `left()` is true before all are open, PeerLostError."""
        with contextlib.ExitStack() as made:
            ends = self._connect(made)
            # From here on the runner closes them.
            made.pop_all()
        return ends

    def join(self, group: RankGroup, generation: int) -> None:
        """Meet the other ranks of the stage. Raises as `connect` does, and OSError."""
        with contextlib.ExitStack() as unless_met:

            def meet_all() -> dict[int, Wire]:
                wires: dict[int, Wire] = {}
                for first, second in pairs(range(group.size)):
                    if self.rank in (first, second):
                        peer = second if self.rank == first else first
                        with self.rings.main.operation(Kind.COLLECTIVE, peer=self.stage):
                            name = f"g{self.stage}.{first}.{second}"
                            wires[peer] = meet(self.book, name, self.rank == second, self.stage, self.left, peer)
                        unless_met.callback(wires[peer].close)
                return dict(sorted(wires.items()))

            group.join(generation, meet_all)
            unless_met.pop_all()

    def _connect(self, made: contextlib.ExitStack) -> Ends:
        """Upstream first: along the pipeline some stage can always go on."""
        stage, last = self.stage, self.config.stages - 1
        ahead = self.config.profile.scheduler.schedule_ahead
        if not last:
            return Ends(tokens=self.resources.tokens(self.rings.main, None) if ahead else None)
        receiver = self._receiver(f"e{stage - 1}", made) if stage > 0 else None
        sender = self._sender(f"e{stage}", made) if stage < last else None
        tokens = self._tokens(last, made) if ahead and stage == 0 else None
        token_sender = self._token_sender(made) if ahead and stage == last else None
        return Ends(receiver, sender, token_sender, tokens)

    def _receiver(self, name: str, made: contextlib.ExitStack) -> ActivationReceiver:
        edge, flags = self._edge(name, False, self.stage - 1, made), self._flags(name)
        offered = self._offer(edge, made, lambda ends: ends.receiver(edge, flags))
        if offered is not None:
            return offered
        self._by_rdma(edge, receive_by_rdma)
        return self.resources.receiver(edge)

    def _tokens(self, peer: int, made: contextlib.ExitStack) -> TokenTable:
        edge, flags, ring = self._edge(_TOKENS, False, peer, made), self._flags(_TOKENS), self.rings.main
        offered = self._offer(edge, made, lambda ends: ends.tokens(edge, flags, ring))
        return self.resources.tokens(ring, edge) if offered is None else offered

    def _sender(self, name: str, made: contextlib.ExitStack) -> ActivationSender:
        edge, flags, ring = self._edge(name, True, self.stage + 1, made), self._flags(name), self.rings.main
        sender = self._accept(edge, lambda ends, offer: ends.sender(edge, flags, ring, offer))
        if sender is None:
            self._by_rdma(edge, send_by_rdma)
            sender = self.resources.sender(edge, ring)
        made.callback(sender.close)
        return sender

    def _token_sender(self, made: contextlib.ExitStack) -> TokenSender:
        edge, flags, ring = self._edge(_TOKENS, True, 0, made), self._flags(_TOKENS), self.rings.main
        sender = self._accept(edge, lambda ends, offer: ends.token_sender(edge, flags, ring, offer))
        if sender is None:
            sender = self.resources.token_sender(edge, ring)
        made.callback(sender.close)
        return sender

    def _accept(self, edge: Edge, make: Callable[[DeviceEnds, Offer], _Sending]) -> _Sending | None:
        """Return the sending end that the device serves, if there can be one and the receiver offers memory."""
        ends = self.resources.device_ends

        def accept(offer: Offer) -> _Sending:
            if ends is None:
                raise RefusedError(f"stage {self.stage} uses no other's memory")
            return make(ends, offer)

        sender, refusal = consider(edge.wire, accept)
        _log(edge, "to", refusal)
        return sender

    def _offer(
        self, edge: Edge, made: contextlib.ExitStack, make: Callable[[DeviceEnds], _Receiving]
    ) -> _Receiving | None:
        """Return the receiving end that the device serves, if there can be one and the sender accepts its offer."""
        ends, offered = self.resources.device_ends, None
        with contextlib.ExitStack() as unless_used:
            if ends is not None:
                try:
                    offered = make(ends)
                    unless_used.callback(offered.drop)
                except RefusedError as error:
                    log.warning("no memory for stage %d to write to: %s", edge.peer, error)
            refusal = propose(edge.wire, None if offered is None else offered.offer)
            _log(edge, "from", refusal)
            if refusal or offered is None:
                return None
            unless_used.pop_all()
        made.callback(offered.close)
        return offered

    def _by_rdma(self, edge: Edge, agree: Callable[[Wire], RdmaWire]) -> None:
        """Have adapters of the network carry the messages of an edge, if the profile wants it and both hosts can."""
        edges = self.config.profile.parallel.edges
        if edges == "tcp":
            return
        try:
            edge.wire = agree(edge.wire)
        except NoRdmaError as error:
            if edges == "rdma":
                text = f"no RDMA with stage {edge.peer}: {error}; with parallel.edges: auto TCP carries messages then"
                raise PeerLostError(text) from None  # the neighbour lives
            log.warning("TCP carries the messages of stage %d, since there is no RDMA: %s", edge.peer, error)
        else:
            log.info("RDMA carries the messages of stage %d", edge.peer)

    def _edge(self, name: str, upstream: bool, peer: int, made: contextlib.ExitStack) -> Edge:
        """Meet the same rank of stage `peer`."""
        with self.rings.main.operation(Kind.COLLECTIVE, peer=peer):
            wire = meet(self.book, self._own(name), upstream, peer, self.left)
            ring, meanwhile = (self.rings.send, None) if upstream else (self.rings.receive, self.meanwhile)
            edge = Edge(wire, upstream, ring, meanwhile)
        made.callback(edge.close)
        return edge

    def _flags(self, name: str) -> Path:
        return Path(self.config.ring_dir) / f"{self._own(name)}.words"

    def _own(self, name: str) -> str:
        """Return the name of this rank's edge: each rank of a stage has its own to the same rank of the next."""
        return f"{name}.{self.rank}" if self.rank else name


def _log(edge: Edge, direction: str, refusal: str) -> None:
    how = f"the wire carries messages, since {refusal}" if refusal else "the device carries messages"
    log.info("edge %s stage %d: %s", direction, edge.peer, how)
