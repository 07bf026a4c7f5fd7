"""`python -m ppengine.http --engine FILE --role ROLE`: serves OpenAI's API until its lifeline closes."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from typing_extensions import override

from ppengine.common import garbage
from ppengine.common.begin_process import begin
from ppengine.common.config import ConfigError, EngineConfig
from ppengine.common.http_address import parse_http
from ppengine.http import event_library
from ppengine.http.api_keys import ApiKeys
from ppengine.http.app import Routes
from ppengine.http.call_trace import CallTraces
from ppengine.http.chat_renderer import ChatRenderer
from ppengine.http.client_limits import ClientLimits
from ppengine.http.client_stats import ClientStats
from ppengine.http.connection import server_config
from ppengine.http.event_rows import EventRows, most_rows
from ppengine.http.front_link import FrontLink
from ppengine.http.key_limits import KeyLimits
from ppengine.http.listener import listen
from ppengine.http.reporting import report
from ppengine.http.service import Service
from ppengine.http.shared_use import SharedUse

log = logging.getLogger("ppengine.http")

DATE_S = 1.0
"""Seconds after which the date of answers is made again."""


class Server(uvicorn.Server):
    """uvicorn's server. At a signal the open answers get an end that clients know; otherwise they would be cut."""

    def __init__(self, config: uvicorn.Config, link: FrontLink) -> None:
        super().__init__(config)
        self._link = link
        self.begun = asyncio.Event()
        """Set once connections are taken."""
        self._signal = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.begun.set()

    @override
    async def main_loop(self) -> None:
        # As uvicorn does, which looks for a signal ten times a second.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signal.wait(), DATE_S)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # As uvicorn does, which raises the signal again behind the last answer: it would end the other work at once.
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True
        self._loop.call_soon_threadsafe(self._signal.set)

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._link.end("the HTTP server is stopped; send the request again")
        await super().shutdown(sockets)


def main() -> int:
    """Serve until the engine ends. Exit code 1: it cannot start, with one line."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.http")
    parser.add_argument("--role", required=True, help="name of this process in the engine, and of its session")
    arguments, config = begin(parser)
    assert config.profile.http.listen is not None, "the supervisor starts it with an address"
    try:
        keys = ApiKeys.load(config.profile.http.keys)
        address = parse_http(config.profile.http.listen)
        # The supervisor has seen the setting, not the file.
        keys.check(address)
        listener = listen(address, keys=not keys.none)
        use = use_of(config, arguments.role, keys)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config, arguments.role, keys, KeyLimits(keys.limits, use), listener))
    return 0


def use_of(config: EngineConfig, role: str, keys: ApiKeys) -> SharedUse | None:
    """Return the counts by which limits of keys hold for all processes, None without limits. Raises OSError."""
    names = sorted(keys.limits)
    return SharedUse(Path(config.ring_dir), role, config.http_roles, names) if names else None


def traces_of(config: EngineConfig, role: str) -> CallTraces | None:
    """Return the traces of this process, None without an endpoint for them."""
    endpoint = config.profile.http.otlp_traces_endpoint
    if endpoint is None:
        return None
    # Of the extra `otel`: the supervisor has seen that it is there.
    from ppengine.http.tracing import traces_to

    return traces_to(endpoint, config.model_names[0], f"{config.id}/{role}")


async def serve(config: EngineConfig, role: str, keys: ApiKeys, limits: KeyLimits, listener: socket.socket) -> None:
    """Serve until a signal comes."""
    http = config.profile.http
    stats = ClientStats(keys.limits)
    rules = ClientLimits(stats)
    traces = traces_of(config, role)
    rows = EventRows(most=most_rows())
    link = FrontLink(
        config.endpoint("front"), role, lambda state: rules.take(state.rules), http.stream_interval, traces, rows
    )  # fmt: skip
    renderer = ChatRenderer(config, role)
    service = Service(config, link, renderer, rules, http.most_open)
    app = Routes(service, keys, limits, stats, traces).app()
    server = Server(server_config(app), link)
    garbage.settle()  # Requests leave nothing for collections, which would look at all streams.
    log.info("started as %s on %s", role, http.listen)
    work = [
        link.run(),
        renderer.run(early=service.takes_chats),
        report(config.endpoint("collect"), role, stats, link, server.begun),
        server.serve([listener]),
    ]
    if traces is not None:
        work.append(traces.run())
    tasks = [asyncio.create_task(each) for each in work]
    # It serves meanwhile: a compiler on a slow disk may take seconds.
    compiling = asyncio.create_task(_compile(rows, Path(config.run_dir)))
    # The server returns at a signal; the others return only with an error.
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    compiling.cancel()
    try:
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*tasks, compiling, return_exceptions=True)
    finally:
        if traces is not None:
            listener.close()
            traces.close()


async def _compile(rows: EventRows, folder: Path) -> None:
    """Give the code of events to `rows`; streams take the longer way until then."""
    rows.library = await event_library.load(folder)


if __name__ == "__main__":
    sys.exit(main())
