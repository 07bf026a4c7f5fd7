"""Events of single tokens take a short way to the connection: their bytes and counts are those of the long one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ppengine.checkpoint.absent_tokenizer import AbsentTokenizer
from ppengine.common.durations import bucket_of
from ppengine.http import client_stats, front_link
from ppengine.http.api_errors import ApiError
from ppengine.http.client_stats import ClientStats
from ppengine.http.event_stream import EventStream
from ppengine.http.front_link import FrontLink
from ppengine.http.outbox import BUFFER_MOST
from ppengine.protocol.clients import ClientCounts
from ppengine.protocol.frames import encode
from ppengine.protocol.offline import News, Piece, Singles
from test_http_streams import Transport, answer, generation, texts


def news(pieces: Sequence[Piece]) -> News:
    """Return the pieces as the core sends them, those of one token in columns."""
    single = [len(piece.token_ids) == 1 and piece.finish_reason is None for piece in pieces]
    alone = [piece for piece, is_single in zip(pieces, single, strict=True) if is_single]
    others = [piece for piece, is_single in zip(pieces, single, strict=True) if not is_single]
    columns = Singles(
        [piece.request for piece in alone], [piece.offset for piece in alone], [piece.token_ids[0] for piece in alone]
    )
    return News(nonce=1, cursor=1, singles=columns, pieces=others)


class World:
    """Streams of a link to the core, whose messages a test makes. `observed`: all events take the long way."""

    def __init__(
        self, kind: str = "completion", *, observed: bool = False, streams: int = 1,
        tokenizer: AbsentTokenizer | None = None, chunked: bool = True, **form: Any,
    ) -> None:  # fmt: skip
        self.link = FrontLink("x", "http0", lambda state: None)
        self.stats, self.transport, self.room = ClientStats(), Transport(), asyncio.Event()
        self.call = self.stats.begin("key", "/v1/completions")
        if observed:
            trace: Any = SimpleNamespace(part=lambda *given: None, end=lambda *given: None)
            self.call.trace = trace
        self.generations = [generation(first=number, **form) for number in range(streams)]
        if tokenizer is not None:
            self.generations = [dataclasses.replace(one, tokenizer=tokenizer) for one in self.generations]
        for number, one in enumerate(self.generations):
            one.link, one.followed.request = self.link, f"r{number}"
            self.link._open[f"r{number}"] = one.followed
        transport: Any = self.transport
        stream = EventStream(answer(kind), self.generations, self.call, transport, chunked=chunked)
        self.task: asyncio.Future[ApiError | None] = asyncio.ensure_future(stream.run(self._send))

    async def _send(self, message: Any) -> None:
        await self.room.wait()

    def hear(self, *pieces: Piece) -> None:
        self.link._read(encode(news(pieces)))

    @property
    def short(self) -> bool:
        """Whether the first stream's next event may take the short way."""
        return self.generations[0].followed.single is not None

    @property
    def counts(self) -> ClientCounts:
        (counts,) = self.stats.counts()
        return counts


@pytest.fixture(autouse=True)
def no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_link, "FrontSocket", lambda endpoint, take: SimpleNamespace(send=lambda data: None))


PIECES = [
    *(Piece("r0", 0, token, [token + 10]) for token in range(6)),
    Piece("r0", 0, 6, [9]),  # the first half of a character
    Piece("r0", 0, 7, [20]),
    *(Piece("r0", 0, token, [token + 20]) for token in range(8, 12)),
    Piece("r0", 0, 10, [30, 31, 32]),  # all but one are known
    Piece("r0", 0, 11, [31]),  # known
    *(Piece("r0", 0, token, [token + 40]) for token in range(13, 18)),
    Piece("r0", 0, 18, [5, 6]),
    Piece("r0", 0, 20, [7]),
    Piece("r0", 0, 21, [8], [], "length"),
]


@pytest.mark.parametrize("kind", ["completion", "chat"])
async def test_both_ways_write_the_same_bytes_and_count_the_same(kind: str) -> None:
    worlds = World(kind), World(kind, observed=True)
    await asyncio.sleep(0)
    taken = []
    for piece in PIECES:
        worlds[0].hear(piece)
        taken.append(worlds[0].short)
        worlds[1].hear(piece)
        assert not worlds[1].short
    assert sum(taken) > len(PIECES) / 2
    for world in worlds:
        assert await world.task is None
        assert world.generations[0].output_tokens == 22 and world.generations[0].followed.samples == 0
        assert world.counts.tokens == 22 and sum(world.counts.itl.values()) == len(PIECES) - 2
    assert worlds[0].transport.written == worlds[1].transport.written
    assert len({one.generations[0]._choices[0].given for one in worlds}) == 1


async def test_counts_have_all_tokens_while_a_stream_goes_on() -> None:
    world = World()
    await asyncio.sleep(0)
    for token in range(10):
        world.hear(Piece("r0", 0, token, [token + 10]))
        assert world.counts.tokens == token + 1 and sum(world.counts.itl.values()) == token
    assert world.short and not world.task.done()
    world.task.cancel()


async def test_each_way_counts_the_time_since_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world, now = World(), [100.0]
    await asyncio.sleep(0)
    monkeypatch.setattr(client_stats.time, "monotonic", lambda: now[0])
    for piece in (*PIECES[:6], Piece("r0", 0, 6, [30, 31]), Piece("r0", 0, 8, [32])):
        now[0] += 1.0
        world.hear(piece)
    assert world.counts.itl == {bucket_of(1.0): 7}
    world.task.cancel()


async def test_events_without_a_text_take_the_short_way_too() -> None:
    """An engine without a tokenizer sends them."""
    worlds = [World(observed=observed, tokenizer=AbsentTokenizer()) for observed in (False, True)]
    await asyncio.sleep(0)
    for world in worlds:
        for token in range(6):
            world.hear(Piece("r0", 0, token, [token]))
        assert world.short == (world is worlds[0])
        world.hear(Piece("r0", 0, 6, [6], [], "length"))
        assert await world.task is None
    assert worlds[0].transport.written == worlds[1].transport.written
    assert worlds[0].transport.body.count(b'"text":""') == 7


async def test_a_stop_text_samples_and_intervals_take_the_long_way() -> None:
    for form in ({"stops": ("<12>",)}, {"samples": 2}, {"interval": 2}):
        world = World(**form)
        await asyncio.sleep(0)
        for token in range(6):
            world.hear(Piece("r0", 0, token, [token + 20]))
        assert not world.short and texts(world.transport.body).startswith("<20><21><22>")
        world.task.cancel()


async def test_a_stream_without_chunks_takes_the_long_way() -> None:
    world = World(chunked=False)
    await asyncio.sleep(0)
    for token in range(6):
        world.hear(Piece("r0", 0, token, [token + 20]))
    assert not world.short and texts(world.transport.written) == "<20><21><22><23><24><25>"
    world.task.cancel()


async def test_events_are_held_back_behind_a_full_buffer_and_keep_their_order() -> None:
    world, count = World(), BUFFER_MOST // 100
    await asyncio.sleep(0)
    for token in range(count):
        world.hear(Piece("r0", 0, token, [token + 10]))
    assert BUFFER_MOST < world.transport.unread < BUFFER_MOST + 1000 and not world.short
    await asyncio.sleep(0.01)
    world.transport.unread = 0
    world.room.set()
    await asyncio.sleep(0.01)
    for token in range(count, count + 5):
        world.hear(Piece("r0", 0, token, [token + 10]))
    assert world.short
    world.hear(Piece("r0", 0, count + 5, [5], [], "length"))
    assert await world.task is None
    assert texts(world.transport.body) == "".join(f"<{token + 10}>" for token in range(count + 5)) + "<5>"
    assert world.transport.body.endswith(b"data: [DONE]\n\n")


async def test_nothing_is_written_behind_the_error_of_another_stream() -> None:
    world = World(streams=2)
    await asyncio.sleep(0)
    for token in range(5):
        world.hear(*(Piece(name, 0, token, [token + 20]) for name in ("r0", "r1")))
    assert world.short
    world.hear(Piece("r1", 0, 5, [], [], "error", loss="stage 1 is gone"), Piece("r0", 0, 5, [98]))
    assert texts(world.transport.body).endswith("<98>"), "single tokens of a message come first"
    world.hear(Piece("r0", 0, 6, [99]))
    error = await world.task
    assert error is not None and "stage 1 is gone" in str(error)
    world.hear(Piece("r0", 0, 7, [99]))
    assert "<99>" not in texts(world.transport.body) and world.transport.body.endswith(b"data: [DONE]\n\n")


async def test_a_failure_of_the_tokenizer_ends_its_stream_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    await asyncio.sleep(0)
    for token in range(5):
        world.hear(Piece("r0", 0, token, [token + 20]))
    assert world.short
    monkeypatch.setattr(world.generations[0].tokenizer, "fixed_text", lambda token: 1 / 0)
    world.hear(Piece("r0", 0, 5, [30]))
    error = await world.task
    assert error is not None and error.status == 500
    *_, failed, done, _ = world.transport.body.split(b"\n\n")
    assert json.loads(failed[6:])["error"]["type"] == "server_error" and done == b"data: [DONE]"
