"""The checksum of hidden states: made where they are computed, carried by the message's header, compared before use."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ppengine.protocol.reports import Finding
from ppengine.stage.edge import Edge

_MADE = 1 << 32
"""Bit of a header's checksum that says that there is one."""


def checksum(tensor: Tensor) -> int:
    """Return the checksum of a contiguous tensor in host memory; never 0, which a message without one has."""
    # An array is read as it is: a view of bytes would cost as much as the checksum of a decode step.
    return _MADE | zlib.crc32((tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor).numpy().data)


def difference(stage: int, edge: Edge, step: int, hidden: Tensor) -> Finding | None:
    """Return the finding on hidden states that differ from the newest message's checksum; None: they are as sent."""
    if not edge.checksum or (arrived := checksum(hidden)) == edge.checksum:
        return None
    link = f"stage {edge.peer} -> stage {stage}"
    rows, width = hidden.shape
    return Finding(
        stage=edge.peer,
        cause="corrupted",
        summary=f"edge {link}: the hidden states of m{step} changed on their way",
        since_s=0.0,
        evidence=[
            f"message {edge.number} (m{step}, {rows} tokens of {width} values, {hidden.nbytes} B): checksum "
            f"{edge.checksum - _MADE:08x} as sent, {arrived - _MADE:08x} before use",
            f"it is the first: a buffer of stage {edge.peer} or of stage {stage} was overwritten in flight",
            f"results from m{step} on are wrong, and so are the cached blocks behind them",
            "try: ppconsole check ledger on",
        ],
    )
