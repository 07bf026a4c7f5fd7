"""Answers under way: pieces of the core become parts, and events that are written straight to the connection.

No task wakes up for a token. The link hands each piece to its generation, and the bytes of the event go to the socket
in the same call. Only a full buffer wakes the task of the answer, which then waits for the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from starlette.types import Send

from ppengine.http.answer_forms import Answer
from ppengine.http.api_errors import ApiError
from ppengine.http.client_stats import Call
from ppengine.http.generation import Generation, Part
from ppengine.protocol.offline import Piece

log = logging.getLogger("ppengine.http")

HELD_MOST = 2**24
"""Bytes of events that are held back for a client; beyond that its connection is cut."""


class Reading:
    """Hands the parts of `generations` to `take` as they come. `ended` gets the error at the end, if there is one."""

    __slots__ = ("_call", "_ended", "_generations", "_left", "_take", "error", "over")

    def __init__(
        self, generations: Sequence[Generation], call: Call, take: Callable[[Generation, Part], None],
        ended: Callable[[ApiError | None], None],
    ) -> None:  # fmt: skip
        self._generations, self._call, self._take, self._ended = generations, call, take, ended
        self._left = len(generations)
        self.over = not generations
        """Whether no part will come."""
        self.error: ApiError | None = None
        """Reason why it cannot go on."""
        for one in generations:
            # Only the log-probabilities of a prompt make pieces wait for others.
            one.followed.to(partial(self._piece if one.scored else self._take_piece, one))

    def _piece(self, generation: Generation, piece: Piece) -> None:
        for each in generation.ready(piece):
            self._take_piece(generation, each)

    def _take_piece(self, generation: Generation, piece: Piece) -> None:
        if self.over or generation.over:
            return
        try:
            part = generation.take(piece)
            if part is not None:
                self._call.part(part.choice, part.kept)
                if self._call.trace is not None:
                    self._call.trace.part(part.choice, part.kept, part.finish_reason)
                self._take(generation, part)
                if part.finish_reason is None:
                    return
        except ApiError as error:
            self.error = error
        except Exception:
            # It must not end the link, which serves the other clients too.
            log.exception("request %s failed", piece.request)
            self.error = ApiError(500, "server_error", "the server failed at this request; its log has the reason")
        self._left -= generation.over
        self.over = not self._left or self.error is not None
        if self.over:
            for one in self._generations:
                one.followed.settle()
            self._ended(self.error)


async def all_parts(generations: Sequence[Generation], call: Call) -> list[list[Part]]:
    """Return the parts of each choice once all have ended. Raises ApiError."""
    parts: list[list[Part]] = [[] for one in generations for _ in range(one.choices)]
    ended = asyncio.Event()
    reading = Reading(generations, call, lambda _, part: parts[part.choice].append(part), lambda _: ended.set())
    await ended.wait()
    if reading.error is not None:
        raise reading.error
    return parts


class EventStream:
    """Writes the events of an answer to `transport`, whose headers were sent through ASGI."""

    __slots__ = (
        "_answer", "_call", "_chunked", "_close", "_ended", "_failure", "_full", "_generations", "_held", "_held_bytes",
        "_outbox", "_transport", "_wake",
    )  # fmt: skip

    def __init__(
        self, answer: Answer, generations: Sequence[Generation], call: Call, transport: asyncio.WriteTransport, *,
        chunked: bool = True, close: Callable[[], bytes] = bytes,
    ) -> None:  # fmt: skip
        """`close` returns the bytes behind the last event, once it is written."""
        self._close = close
        self._answer, self._generations, self._call, self._transport = answer, generations, call, transport
        self._chunked, self._full, self._outbox = chunked, False, generations[0].link.outbox
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._ended = False
        """Whether the last event is written."""
        self._failure: Exception | None = None
        self._wake = asyncio.Event()

    async def run(self, send: Send) -> ApiError | None:
        """Return after the last event was written, with the error that ended the answer."""
        self._write(self._answer.begin())
        reading = Reading(self._generations, self._call, self._part, self._over)
        while not self._ended:
            await self._wake.wait()
            self._wake.clear()
            if self._full and not self._ended:
                await self._drain(send)
                if reading.over and not self._full:
                    self._end(reading.error)
        if self._failure is not None:
            raise self._failure
        return reading.error

    def _over(self, error: ApiError | None) -> None:
        """Write the last events together with the last part, unless they must wait."""
        if not self._full:
            self._end(error)
        self._wake.set()

    def _end(self, error: ApiError | None) -> None:
        self._ended = True
        try:
            last = self._answer.end() if error is None else self._answer.failed(error)
        except Exception as failure:  # noqa: BLE001  # It must not end the link; `run` raises it.
            self._failure = failure
            return
        self._write(last)
        if behind := self._close():
            self._send(behind)

    def fill(self) -> None:
        """See `Writer`."""
        self._full = True
        for one in self._generations:
            one.followed.settle()
        self._wake.set()

    def _part(self, generation: Generation, part: Part) -> None:
        """Write the events of a part. Later ones get a row if they are plain, and alone on their connection."""
        self._write(self._answer.part(part))
        frame, followed = self._answer.frame(part.choice), generation.followed
        if frame is None or self._full or not self._chunked or followed.interval > 1 or self._call.observed:
            return
        if generation.even and len(self._generations) == 1:
            followed.single = generation.link.rows.add(generation, frame, self._call, self._transport, self._send)

    def _write(self, data: bytes) -> None:
        """Write events, as a chunk or as they are, unless there are none, or the client has not read many before."""
        if not data:
            return  # An empty chunk would end the answer.
        if self._full:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes > HELD_MOST and not self._transport.is_closing():
                log.warning("a client read nothing of %d bytes; its connection is cut", self._held_bytes)
                self._transport.abort()
            return
        self._send(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def _send(self, data: bytes) -> None:
        # Otherwise the client has left; uvicorn reports that in a later turn of the loop.
        if not self._transport.is_closing():
            self._outbox.write(self._transport, data, self)

    async def _drain(self, send: Send) -> None:
        """Wait until the client has read, then send the events that were held back."""
        with self._call.sending():
            # Without data it waits for room in the buffer.
            await send({"type": "http.response.body", "body": b"", "more_body": True})
        held, self._held, self._held_bytes, self._full = b"".join(self._held), [], 0, False
        self._write(held)
