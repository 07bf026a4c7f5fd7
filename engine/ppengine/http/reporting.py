"""The reports of an HTTP process: to the gateway for consoles, to the core for `/metrics`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

import zmq

from ppengine.common import procfs
from ppengine.common.open_files import OpenFiles, open_files
from ppengine.http.client_stats import ClientStats
from ppengine.http.front_link import FrontLink
from ppengine.protocol.clients import HttpReport, ProcessFigures
from ppengine.protocol.frames import encode

REPORT_S = 1.0
_QUEUE = 4


async def report(endpoint: str, role: str, stats: ClientStats, link: FrontLink, begun: asyncio.Event) -> None:
    """Send the counts of all clients to gateway and core each second, until this is cancelled.

    The first report comes when the process takes connections (`begun`): the gateway knows by it that the port serves.
    """
    started = time.time() - time.process_time()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.sndhwm = _QUEUE
        socket.connect(endpoint)
        await begun.wait()
        while True:
            now_ns, process = time.monotonic_ns(), own_figures(started)
            message = HttpReport(role=role, mono_ns=now_ns, clients=stats.counts(), process=process)
            with contextlib.suppress(zmq.Again):
                socket.send(encode(message), zmq.NOBLOCK)
            link.report(message)
            await asyncio.sleep(REPORT_S)


def own_figures(started: float) -> ProcessFigures:
    """Return this process as it is now; `started` in Unix seconds."""
    # To look takes a descriptor, and connections may have all of them.
    resident, files = procfs.resident_bytes(os.getpid()) or 0, open_files(os.getpid()) or OpenFiles(0, 0)
    return ProcessFigures(started, time.process_time(), resident, files.used, files.limit)
