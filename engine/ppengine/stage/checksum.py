"""The checksum of hidden states: made where they are computed, carried by the message, compared before use.

A CPU makes a CRC-32, a device a weighted sum (`ppkernels.weighted_sum`). Each end compares the kind
that it makes itself.

Two checksums show that a message changed, and not at which end. So a CPU that has found one makes a
third for those that follow, at their arrival. The next one that changed shows the end.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ppengine.protocol.reports import Finding
from ppengine.stage.edge import Edge

_MADE = 1 << 32
"""Bit of a header's checksum that says that a CPU has made one."""
BY_DEVICE = 1 << 63
"""Bit of a header's checksum that says that a device has made one; without any other, it lies behind the message."""
_WORD = (1 << 64) - 1


class Side(NamedTuple):
    """The end of an edge at which messages change, and the evidence for it."""

    stage: int
    why: str


class Arrival(NamedTuple):
    """A message that has come to this stage, and the checksum in its header."""

    peer: int
    number: int
    step: int
    shape: torch.Size
    size: int
    """Bytes."""
    checksum: int

    @classmethod
    def newest(cls, edge: Edge, step: int, hidden: Tensor) -> Arrival:
        """Return the newest message of `edge`, which brought `hidden`."""
        return cls(edge.peer, edge.number, step, hidden.shape, hidden.nbytes, edge.checksum)


def checksum(tensor: Tensor) -> int:
    """Return the checksum of a contiguous tensor in host memory; never 0, which a message without one has."""
    # An array is read as it is: a view of bytes would cost as much as the checksum of a decode step.
    return _MADE | zlib.crc32((tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy().data)


def as_checksum(made: int) -> int:
    """Return the weighted sum that a device made, an int64, as a header carries it."""
    return made & _WORD


def difference(stage: int, edge: Edge, step: int, hidden: Tensor) -> Finding | None:
    """Return the finding on hidden states that differ from the newest message's checksum; None: they are as sent."""
    sent = edge.checksum
    if not sent or sent & BY_DEVICE or (used := checksum(hidden)) == sent:
        return None
    return changed(stage, Arrival.newest(edge, step, hidden), sent, used)


def end_at_fault(stage: int, edge: Edge) -> Side | None:
    """Return which end of the newest message's edge changed it; None: no checksum was made at its arrival."""
    if not edge.arrived:
        return None
    if edge.arrived == edge.checksum:
        return Side(stage, f"message {edge.number} arrived as it was sent: a buffer of stage {stage} was overwritten")
    return Side(
        edge.peer,
        f"message {edge.number} had the checksum {_digits(edge.arrived)} at its arrival: a buffer of stage "
        f"{edge.peer} was overwritten",
    )


def changed(stage: int, arrival: Arrival, sent: int, used: int) -> Finding:
    """Return the finding on a message whose checksum was `sent`, and is `used` before use; at the sender, for now."""
    link, step = f"stage {arrival.peer} -> stage {stage}", arrival.step
    rows, width = arrival.shape
    return Finding(
        stage=arrival.peer,
        cause="corrupted",
        summary=f"edge {link}: the hidden states of m{step} changed on their way",
        since_s=0.0,
        evidence=[
            f"message {arrival.number} (m{step}, {rows} tokens of {width} values, {arrival.size} B): checksum "
            f"{_digits(sent)} as sent, {_digits(used)} before use",
            _either(arrival.peer, stage),
            f"results from m{step} on are wrong, and so are the cached blocks behind them",
            "try: ppconsole check ledger on",
        ],
    )


def at_end(finding: Finding, stage: int, side: Side) -> Finding:
    """Return the finding of stage `stage` at the end of the edge that a later message has shown."""
    either = _either(finding.stage, stage)
    evidence = [side.why if line == either else line for line in finding.evidence]
    return msgspec.structs.replace(finding, stage=side.stage, evidence=evidence)


def _either(sender: int | None, receiver: int) -> str:
    return f"it is the first: a buffer of stage {sender} or of stage {receiver} was overwritten in flight"


def _digits(value: int) -> str:
    return f"{value - BY_DEVICE:016x}" if value & BY_DEVICE else f"{value - _MADE:08x}"
