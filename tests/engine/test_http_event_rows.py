"""Events of single tokens take a short way to the connection: their bytes and counts are those of the long one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import json
import os
import select
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.checkpoint.absent_tokenizer import AbsentTokenizer
from ppengine.common.durations import bucket_of
from ppengine.http import client_stats, event_library, event_rows, front_link
from ppengine.http.api_errors import ApiError
from ppengine.http.client_stats import ClientStats
from ppengine.http.event_rows import EventRow, EventRows
from ppengine.http.event_stream import EventStream
from ppengine.http.front_link import FrontLink
from ppengine.http.outbox import BUFFER_MOST
from ppengine.protocol.clients import ClientCounts
from ppengine.protocol.frames import encode
from ppengine.protocol.offline import News, Piece, Singles
from test_http_streams import Transport, Words, answer, generation, texts

LIBRARY: list[ctypes.PyDLL | None] = []


@pytest.fixture(scope="module", autouse=True)
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile the code once."""
    LIBRARY[:] = [asyncio.run(event_library.load(tmp_path_factory.mktemp("library")))]
    if LIBRARY == [None]:
        pytest.skip("there is no C compiler")
    yield


def news(pieces: Sequence[Piece]) -> News:
    """Return the pieces as the core sends them, those of one token in columns."""
    single = [len(piece.token_ids) == 1 and piece.finish_reason is None for piece in pieces]
    alone = [piece for piece, is_single in zip(pieces, single, strict=True) if is_single]
    others = [piece for piece, is_single in zip(pieces, single, strict=True) if not is_single]
    columns = Singles(
        [piece.request for piece in alone], [piece.offset for piece in alone], [piece.token_ids[0] for piece in alone]
    )
    return News(nonce=1, cursor=1, singles=columns, pieces=others)


class Connected(Transport):
    """A connection to a client: as uvloop's, it sends at the end of a turn of the loop what was written in it."""

    def __init__(self) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.client = socket.create_connection(listener.getsockname())
            self.socket, _ = listener.accept()
        self.socket.setblocking(False)
        self.client.setblocking(False)
        self._buffer = self._read = b""

    def get_extra_info(self, name: str) -> socket.socket:
        assert name == "socket"
        return self.socket

    def write(self, data: bytes) -> None:
        super().write(data)
        self._buffer += data
        self.unread = len(self._buffer)

    def turn(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._buffer:
                self._buffer = self._buffer[self.socket.send(self._buffer) :]
        self.unread = len(self._buffer)

    def read(self, most: int = 2**24) -> None:
        """Let the client read."""
        with contextlib.suppress(BlockingIOError):
            while most > 0 and (data := self.client.recv(min(most, 65536))):
                self._read += data
                most -= len(data)

    @property
    def received(self) -> bytes:
        """The bytes that the client has got, once it has read all."""
        self.turn()
        self.read()
        return self._read

    def close(self) -> None:
        self.socket.close()
        self.client.close()


class World:
    """A stream of a link to the core, whose messages a test makes. `observed`: all events take the long way."""

    def __init__(
        self, kind: str = "completion", *, observed: bool = False, streams: int = 1, name: str = "r",
        tokenizer: AbsentTokenizer | None = None, chunked: bool = True, link: FrontLink | None = None, **form: Any,
    ) -> None:  # fmt: skip
        self.link = link or FrontLink("x", "http0", lambda state: None, rows=EventRows(LIBRARY[0]))
        self.stats, self.transport, self.room = ClientStats(), Connected(), asyncio.Event()
        self.call = self.stats.begin("key", "/v1/completions")
        if observed:
            trace: Any = SimpleNamespace(part=lambda *given: None, end=lambda *given: None)
            self.call.trace = trace
        self.generations = [generation(first=number, **form) for number in range(streams)]
        if tokenizer is not None:
            self.generations = [dataclasses.replace(one, tokenizer=tokenizer) for one in self.generations]
        for number, one in enumerate(self.generations):
            one.link, one.followed.request = self.link, f"{name}{number}"
            self.link._open[f"{name}{number}"] = one.followed
        transport: Any = self.transport
        stream = EventStream(answer(kind), self.generations, self.call, transport, chunked=chunked)
        self.task: asyncio.Future[ApiError | None] = asyncio.ensure_future(stream.run(self._send))

    async def _send(self, message: Any) -> None:
        await self.room.wait()

    def hear(self, *pieces: Piece) -> None:
        """Take a message of the core, in a turn of the loop."""
        self.link._read(encode(news(pieces)))
        self.transport.turn()

    @property
    def sent_short(self) -> bytes:
        """The bytes that did not go through the transport."""
        return self.transport.received.replace(self.transport.written, b"")

    @property
    def short(self) -> bool:
        """Whether the first stream has a row."""
        return self.generations[0].followed.request in self.link.rows._numbers

    @property
    def body(self) -> bytes:
        """The chunks that the client has got, without their frames."""
        self.transport.written = self.transport.received
        return self.transport.body

    @property
    def counts(self) -> ClientCounts:
        (counts,) = self.stats.counts()
        return counts

    def end(self) -> None:
        """Leave as a connection that is lost."""
        self.task.cancel()
        for one in self.generations:
            one.followed.leave()
        self.transport.close()


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
    assert sum(taken) > len(PIECES) / 3
    for world in worlds:
        assert await world.task is None
        assert world.generations[0].output_tokens == 22 and world.generations[0].followed.samples == 0
        assert world.counts.tokens == 22 and sum(world.counts.itl.values()) == len(PIECES) - 2
        assert not world.short
    short, long = (world.transport for world in worlds)
    assert short.received == long.received == long.written
    assert len(short.written) < len(long.written) * 0.8, "the rest did not go through the transport"
    assert len({one.generations[0]._choices[0].given for one in worlds}) == 1


async def test_counts_have_all_tokens_while_a_stream_goes_on() -> None:
    world = World()
    await asyncio.sleep(0)
    for token in range(10):
        world.hear(Piece("r0", 0, token, [token + 10]))
        assert world.counts.tokens == token + 1 and sum(world.counts.itl.values()) == token
    assert world.short and not world.task.done()
    world.end()


async def test_each_way_counts_the_time_since_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    world, now = World(), [100.0]
    await asyncio.sleep(0)
    monkeypatch.setattr(client_stats.time, "monotonic", lambda: now[0])
    for piece in (*PIECES[:6], Piece("r0", 0, 6, [30, 31]), Piece("r0", 0, 8, [32])):
        now[0] += 1.0
        world.hear(piece)
    assert world.counts.itl == {bucket_of(1.0): 7}
    world.end()


async def test_streams_whose_tokens_came_at_many_times_are_counted_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than a message has groups for take the long way in it."""
    now = [100.0]
    monkeypatch.setattr(client_stats.time, "monotonic", lambda: now[0])
    first = World(name="a")
    worlds = [first, *(World(name=f"b{number}-", link=first.link) for number in range(99))]
    await asyncio.sleep(0)
    for token in range(4):
        for world in worlds:
            now[0] += 1.0
            name = world.generations[0].followed.request
            world.hear(Piece(name, 0, token, [token + 20]))
    assert all(world.short for world in worlds)
    now[0] += 1.0
    names = [world.generations[0].followed.request for world in worlds]
    first.link._read(encode(news([Piece(name, 0, 4, [30]) for name in names])))
    for number, world in enumerate(worlds):
        assert world.counts.tokens == 5 and texts(world.body) == "<20><21><22><23><30>"
        assert world.counts.itl == {bucket_of(100.0): 3} | {bucket_of(100.0 - number): 1} or number < 20
        world.end()
    assert sorted(first.link.rows._free) == list(range(event_rows.ROWS_MOST))


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
    assert worlds[0].transport.received == worlds[1].transport.received
    assert worlds[0].body.count(b'"text":""') == 7


async def test_a_stop_text_samples_and_intervals_take_the_long_way() -> None:
    for form in ({"stops": ("<12>",)}, {"samples": 2}, {"interval": 2}):
        world = World(**form)
        await asyncio.sleep(0)
        for token in range(6):
            world.hear(Piece("r0", 0, token, [token + 20]))
        assert not world.short and texts(world.body).startswith("<20><21><22>")
        world.end()


async def test_a_stream_without_chunks_takes_the_long_way() -> None:
    world = World(chunked=False)
    await asyncio.sleep(0)
    for token in range(6):
        world.hear(Piece("r0", 0, token, [token + 20]))
    assert not world.short and texts(world.transport.received) == "<20><21><22><23><24><25>"
    world.end()


async def test_streams_that_share_a_connection_take_the_long_way() -> None:
    """Bytes of one may wait in the transport while another sends; nothing follows the error of one."""
    world = World(streams=2)
    await asyncio.sleep(0)
    for token in range(5):
        world.hear(*(Piece(name, 0, token, [token + 20]) for name in ("r0", "r1")))
    assert not world.short
    world.hear(Piece("r1", 0, 5, [], [], "error", loss="stage 1 is gone"), Piece("r0", 0, 5, [98]))
    assert texts(world.body).endswith("<98>"), "single tokens of a message come first"
    world.hear(Piece("r0", 0, 6, [99]))
    error = await world.task
    assert error is not None and "stage 1 is gone" in str(error)
    world.hear(Piece("r0", 0, 7, [99]))
    assert "<99>" not in texts(world.body) and world.transport.body.endswith(b"data: [DONE]\n\n")


async def test_an_event_waits_for_bytes_that_wait_in_the_transport() -> None:
    """Two messages of the core in a turn of the loop: the transport has not sent the event of the first one."""
    world = World()
    await asyncio.sleep(0)
    for token in range(3):
        world.hear(Piece("r0", 0, token, [token + 20]))
    for token in range(3, 8):  # none of them finds an empty transport
        world.link._read(encode(news([Piece("r0", 0, token, [token + 20 if token != 3 else 9])])))
        assert not world.short
    world.transport.turn()
    world.hear(Piece("r0", 0, 8, [28]))
    assert world.short and texts(world.body) == "<20><21><22>\ufffd<24><25><26><27><28>".replace("\ufffd", "\ufffd")
    world.end()


@pytest.mark.parametrize("strange", [22, 9], ids=["whole", "half a character"])
async def test_messages_that_come_before_the_answer_begins_leave_one_row(strange: int) -> None:
    """Several may come in one turn of the loop, together with the answer that the core has taken the request."""
    world, other = World(), World(observed=True)
    for each in (world, other):
        for token in range(4):
            each.hear(Piece("r0", 0, token, [strange if token == 3 else token + 20]))
    await asyncio.sleep(0)
    for each in (world, other):
        for token in range(4, 8):
            each.hear(Piece("r0", 0, token, [token + 20]))
        assert len(each.link.rows._owners) == (each is world)
        each.hear(Piece("r0", 0, 8, [5], [], "length"))
        assert await each.task is None
        assert not each.link.rows._owners and each.counts.tokens == 9
    assert world.transport.received == other.transport.received


async def test_events_are_held_back_behind_a_full_buffer_and_keep_their_order() -> None:
    world = World()
    world.transport.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    await asyncio.sleep(0)
    token = 0
    while world.transport.unread <= BUFFER_MOST:
        world.hear(Piece("r0", 0, token, [token + 10]))
        token += 1
        assert token < 5000, "the kernel takes few of them"
    for _ in range(5):
        world.hear(Piece("r0", 0, token, [token + 10]))
        token += 1
    assert world.transport.unread < BUFFER_MOST + 1000 and not world.short
    await asyncio.sleep(0.01)
    while world.transport.unread:
        world.transport.read()
        world.transport.turn()
    world.room.set()
    await asyncio.sleep(0.01)
    for _ in range(5):
        world.hear(Piece("r0", 0, token, [token + 10]))
        token += 1
    assert world.short
    world.hear(Piece("r0", 0, token, [5], [], "length"))
    assert await world.task is None
    assert texts(world.body) == "".join(f"<{number + 10}>" for number in range(token)) + "<5>"
    assert world.transport.body.endswith(b"data: [DONE]\n\n")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3000), st.booleans()), max_size=60), st.integers(0, 3))
def test_a_client_that_reads_now_and_then_gets_all_bytes_in_order(
    steps: list[tuple[int, int, bool]], strange: int
) -> None:
    """The kernel takes events in part, or none; `strange` tokens have no text of their own."""

    async def run() -> None:
        world = World("chat")
        world.transport.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        world.room.set()
        await asyncio.sleep(0)
        token, said = 0, ""
        for count, read, turns in steps:
            for _ in range(count):
                number = 9 if strange and token % 7 < strange else token + 10
                world.link._read(encode(news([Piece("r0", 0, token, [number])])))
                token, said = token + 1, said + (f"<{number}>" if number != 9 else "\ufffd")
                if turns:
                    world.transport.turn()
            world.transport.read(read)
            await asyncio.sleep(0)
        world.link._read(encode(news([Piece("r0", 0, token, [5], [], "length")])))
        while not world.task.done() or world.transport.unread:
            world.transport.turn()
            world.transport.read()
            await asyncio.sleep(0)
        lines = [json.loads(one[6:]) for one in world.body.split(b"\n\n") if one.startswith(b"data: {")]
        spoken = "".join(line["choices"][0]["delta"].get("content", "") for line in lines)
        assert spoken == said + "<5>" and world.counts.tokens == token + 1
        world.end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(front_link, "FrontSocket", lambda endpoint, take: SimpleNamespace(send=lambda data: None))
        asyncio.run(run())


class Long(Words):
    """A tokenizer with texts that a Unix socket takes in two parts."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{one:03000}>" for one in ids)


async def test_the_rest_of_an_event_that_the_kernel_took_in_part_follows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rests, send_rest = list[int](), EventRows._send_rest

    def noting(rows: EventRows, owner: EventRow, token: int, sent: int) -> None:
        rests.append(sent)
        send_rest(rows, owner, token, sent)

    monkeypatch.setattr(EventRows, "_send_rest", noting)
    for room in range(2304, 4097, 256):
        world = World(tokenizer=Long())
        connected = world.transport
        connected.close()
        connected.socket, connected.client = socket.socketpair()
        connected.client.setblocking(False)
        connected.socket.setblocking(False)
        connected.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        part = connected.socket.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2 - 64
        await asyncio.sleep(0)
        for token in range(20):
            world.hear(Piece("r0", 0, token, [token + 20]))
            # If the first part of an event is read, there may be room for the first part of the next one.
            connected.read(part if world.short else 2**24)
            while connected.unread:
                connected.turn()
                connected.read()
        assert texts(world.body) == Long().decode(list(range(20, 40))) and world.counts.tokens == 20
        world.end()
    assert rests


async def test_a_connection_that_took_the_number_of_a_closed_one_gets_nothing() -> None:
    world = World()
    await asyncio.sleep(0)
    for token in range(5):
        world.hear(Piece("r0", 0, token, [token + 20]))
    assert world.short
    number = world.transport.socket.fileno()
    world.transport.socket.close()
    other, reader = socket.socketpair()
    reader.setblocking(False)
    with other, reader:
        assert number in (other.fileno(), reader.fileno()) or os.dup2(other.fileno(), number) == number
        world.link._read(encode(news([Piece("r0", 0, 5, [25])])))
        with pytest.raises(BlockingIOError):
            reader.recv(1)
    world.end()


async def test_an_ended_stream_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    made, dup, close = set[int](), os.dup, os.close

    def duplicate(descriptor: int) -> int:
        made.add(new := dup(descriptor))
        return new

    def closing(descriptor: int) -> None:
        made.discard(descriptor)
        close(descriptor)

    monkeypatch.setattr(event_rows.os, "dup", duplicate)
    monkeypatch.setattr(event_rows.os, "close", closing)
    for leaves in (False, True):
        world = World()
        await asyncio.sleep(0)
        for token in range(6):
            world.hear(Piece("r0", 0, token, [token + 20]))
        assert world.short and len(made) == 1
        if leaves:
            world.end()
        else:
            world.hear(Piece("r0", 0, 6, [5], [], "length"))
        assert not made and not world.link.rows._owners and not world.link.rows._waiting


async def test_a_process_without_descriptors_or_code_sends_by_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> int:
        raise OSError(24, "Too many open files")

    for rows in (EventRows(LIBRARY[0]), EventRows(None)):
        world = World(link=FrontLink("x", "http0", lambda state: None, rows=rows))
        await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(event_rows.os, "dup", refuse)
            for token in range(6):
                world.hear(Piece("r0", 0, token, [token + 20]))
        assert not world.short and texts(world.body) == "<20><21><22><23><24><25>"
        world.end()


async def test_streams_beyond_a_quarter_of_the_descriptors_take_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a process of 1,024 would refuse connections from 500 streams on."""
    monkeypatch.setattr(event_rows.resource, "getrlimit", lambda which: (12, 4096))
    rows = EventRows(LIBRARY[0], event_rows.most_rows())
    first = World(link=FrontLink("x", "http0", lambda state: None, rows=rows), name="a")
    worlds = [first, *(World(name=name, link=first.link) for name in "bcde")]
    await asyncio.sleep(0)
    for token in range(6):
        for world in worlds:
            world.hear(Piece(world.generations[0].followed.request, 0, token, [token + 20]))
    assert [world.short for world in worlds] == [True, True, True, False, False]
    for world in worlds:
        assert texts(world.body) == "<20><21><22><23><24><25>"
        world.end()


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
    *_, failed, done, _ = world.body.split(b"\n\n")
    assert json.loads(failed[6:])["error"]["type"] == "server_error" and done == b"data: [DONE]"


async def test_code_that_cannot_be_made_is_explained_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ppengine.http")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await event_library.load(tmp_path) is None and "no C compiler (cc, gcc, clang)" in caplog.text
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'stdint.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert shutil.which("cc") == str(compiler)
    assert await event_library.load(tmp_path) is None and "stdint.h: No such file" in caplog.text
    assert list(tmp_path.iterdir()) == [compiler], "no file stays"
    assert await event_library.load(tmp_path / "full") is None and "No such file or directory" in caplog.text


@pytest.mark.parametrize("late", [True, False], ids=["late", "cancelled"])
async def test_a_compiler_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, late: bool
) -> None:
    compiler, begun = tmp_path / "cc", tmp_path / "begun"
    os.mkfifo(begun)
    compiler.write_text(f"#!/bin/sh\nexec 9> {begun}\n(echo >&9; exec sleep 1000)\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(event_library, "COMPILER_S", 0.5 if late else 1000)
    # The child writes to it, and has its other end open while it lives.
    line = os.open(begun, os.O_RDONLY | os.O_NONBLOCK)
    loading = asyncio.create_task(event_library.load(tmp_path))
    try:
        while select.select([line], [], [], 0)[0] == [] or not os.read(line, 1):
            await asyncio.sleep(0.01)
        if late:
            assert await loading is None and "it took longer than 0.5 s" in caplog.text
        else:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
        os.set_blocking(line, True)
        assert await asyncio.to_thread(os.read, line, 1) == b""
    finally:
        os.close(line)
    assert sorted(tmp_path.iterdir()) == [begun, compiler], "no file stays"
