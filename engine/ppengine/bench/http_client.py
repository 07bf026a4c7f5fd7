"""A client of any server with OpenAI's API: `python -m ppengine.bench.http_client`, a `Plan` on stdin.

It must not be the limit: requests are encoded before the start, connections are reused, httptools parses, and an event
costs a few comparisons of bytes. Only the event with the usage is decoded.

A request has ended well with as many tokens as were asked for. One that an operator aborted, or that a server ended at
an end of sequence, is less work: its times would be those of another request.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections import deque
from typing import cast

import httptools
import msgspec
import uvloop

from ppengine.bench.load_plan import Outcome, Plan, Planned, Seen, report
from ppengine.bench.server_address import parse_target

_NO_CHOICE = (b'"choices":[]', b'"choices": []')
_TEXT_MOST = 300
"""Most bytes of an error that are reported."""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _LastEvent(msgspec.Struct):
    usage: _Usage


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._now = self._sent = self._newest = 0.0
        self._rest = b""
        self._outcome, self._wanted = Outcome(0.0), 0
        self._over: asyncio.Future[None] | None = None
        self._judged = True
        self._parser = httptools.HttpResponseParser(self)

    async def ask(self, request: bytes, wanted: int, outcome: Outcome, sent: float) -> None:
        """Send a request for `wanted` tokens, and fill in its outcome until the answer has ended.

        `sent` is its time of sending.
        """
        self._wanted = wanted
        self._outcome, self._sent, self._newest, self._rest = outcome, sent, 0.0, b""
        self._parser, self._judged = httptools.HttpResponseParser(self), False
        self._over = asyncio.get_running_loop().create_future()
        if self.transport is None:
            self._end("the server closed the connection at once")
        else:
            self.transport.write(request)
        await self._over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # uvloop's transports are none by inheritance.
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse bytes; all that came together has one time."""
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(f"no HTTP: {error}")
            if self.transport is not None:
                self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        """End the request that is under way."""
        self.transport = None
        self._end("the server closed the connection before the end of its answer")

    def on_body(self, body: bytes) -> None:
        """Take a part of the body; most often it is one event."""
        *events, self._rest = (self._rest + body).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._take(event)

    def on_message_complete(self) -> None:
        """End the request, and the connection too unless it may be used again."""
        status = self._parser.get_status_code()
        if status != 200:
            self._judge(f"status {status}: {self._rest[:_TEXT_MOST].decode(errors='replace')}")
        self._end("the answer has no [DONE]")
        if not self._parser.should_keep_alive() and self.transport is not None:
            self.transport.close()

    def _take(self, event: bytes) -> None:
        data, outcome = event.removeprefix(b"data:").lstrip(), self._outcome
        if data.startswith(b"[DONE]"):
            self._judge(self._shortage())
        elif data.startswith(b'{"error"'):
            self._judge(data[:_TEXT_MOST].decode(errors="replace"))
        elif _NO_CHOICE[0] in data or _NO_CHOICE[1] in data:
            outcome.tokens = msgspec.json.decode(data, type=_LastEvent).usage.completion_tokens
        elif not data.startswith(b"{"):
            return  # A comment, as servers send to keep a connection.
        elif self._newest:
            outcome.gaps_s.append(self._now - self._newest)
            self._newest = self._now
        else:
            outcome.ttft_s, self._newest = self._now - self._sent, self._now

    def _shortage(self) -> str:
        """Return why an answer that came to its end is not the one that was asked for; empty if it is."""
        made = self._outcome.tokens
        if not made:
            return "the answer has no usage"
        return "" if made == self._wanted else f"the answer ended with {made} of {self._wanted} tokens"

    def _judge(self, error: str) -> None:
        """Note how the request went; only the first call counts. The answer may have bytes behind its last event."""
        if not self._judged:
            self._judged = True
            self._outcome.error, self._outcome.e2e_s = error, time.perf_counter() - self._sent

    def _end(self, error: str) -> None:
        """End the request: the connection has no bytes of its answer any more."""
        self._judge(error)
        if self._over is not None and not self._over.done():
            self._over.set_result(None)


class Client:
    """Sends the requests of a plan, over connections that are reused."""

    def __init__(self, plan: Plan) -> None:
        self._target = parse_target(plan.target)
        key = f"authorization: Bearer {plan.key}\r\n" if plan.key else ""
        head = f"POST {self._target.prefix}/v1/completions HTTP/1.1\r\nhost: {self._target.named}\r\n{key}"
        self._head = head.encode()
        self._idle: deque[Connection] = deque()
        self._planned = [(one.at_s, self._encoded(plan.model, one), one.output_len) for one in plan.requests]

    async def run(self) -> Seen:
        """Send each request at its time, and return when the last answer has ended."""
        loop = asyncio.get_running_loop()
        gc.collect()
        gc.disable()
        cpu, self._began = time.process_time(), time.perf_counter()
        tasks = []
        for at_s, request, wanted in self._planned:
            if (wait := self._began + at_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(loop.create_task(self._ask(at_s, request, wanted)))
        outcomes = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - self._began
        self._close()
        return Seen(outcomes=outcomes, seconds=seconds, busy=(time.process_time() - cpu) / seconds)

    async def run_at_most(self, count: int) -> list[Outcome]:
        """Send the requests in order, `count` at a time; their times of arrival are ignored."""
        self._began, limit = time.perf_counter(), asyncio.Semaphore(count)

        async def ask(request: bytes, wanted: int) -> Outcome:
            async with limit:
                return await self._ask(0.0, request, wanted)

        outcomes = await asyncio.gather(*(ask(request, wanted) for _, request, wanted in self._planned))
        self._close()
        return outcomes

    async def _ask(self, at_s: float, request: bytes, wanted: int) -> Outcome:
        sent = time.perf_counter()
        outcome = Outcome(sent - self._began, sent - self._began - at_s)
        try:
            connection = await self._connection()
        except OSError as error:
            outcome.error = f"no connection: {error}"
            return outcome
        await connection.ask(request, wanted, outcome, sent)
        if connection.transport is not None:
            self._idle.append(connection)
        return outcome

    async def _connection(self) -> Connection:
        while self._idle:
            if (idle := self._idle.pop()).transport is not None:
                return idle
        loop, target = asyncio.get_running_loop(), self._target
        if target.file:
            _, made = await loop.create_unix_connection(Connection, target.file)
        else:
            _, made = await loop.create_connection(Connection, target.host, target.port)
        return made

    def _close(self) -> None:
        """Close the connections that wait for a further request: some servers wait for that when they end."""
        while self._idle:
            if (transport := self._idle.pop().transport) is not None:
                transport.close()

    def _encoded(self, model: str, one: Planned) -> bytes:
        fields: dict[str, object] = {
            "model": model, "prompt": one.prompt, "max_tokens": one.output_len, "temperature": one.temperature,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        if one.temperature:
            fields |= {"top_p": one.top_p, "seed": one.seed} | ({"top_k": one.top_k} if one.top_k > 0 else {})
        body = msgspec.json.encode(fields)
        return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (self._head, len(body), body)


def main() -> None:
    """Run the plan on stdin and print the outcomes."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(Client(plan).run())
    report(seen)


if __name__ == "__main__":
    main()
