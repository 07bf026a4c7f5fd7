"""The reports of an HTTP process: to the gateway for consoles, to the core for `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import time

import zmq

from ppengine.http.client_stats import ClientStats
from ppengine.http.front_link import FrontLink
from ppengine.protocol.clients import HttpReport
from ppengine.protocol.frames import encode

REPORT_S = 1.0
_QUEUE = 4


async def report(endpoint: str, role: str, stats: ClientStats, link: FrontLink) -> None:
    """Send the counts of all clients to gateway and core each second, until this is cancelled."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.sndhwm = _QUEUE
        socket.connect(endpoint)
        while True:
            await asyncio.sleep(REPORT_S)
            message = HttpReport(role=role, mono_ns=time.monotonic_ns(), clients=stats.counts())
            with contextlib.suppress(zmq.Again):
                socket.send(encode(message), zmq.NOBLOCK)
            link.report(message)
