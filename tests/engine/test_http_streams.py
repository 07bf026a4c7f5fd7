"""Answers of the HTTP port under way: from pieces of the core to bytes on a connection."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from ppengine.checkpoint.absent_tokenizer import AbsentTokenizer
from ppengine.http import front_link
from ppengine.http.answer_forms import event
from ppengine.http.api_errors import ApiError
from ppengine.http.chat_answer import ChatAnswer
from ppengine.http.chat_fields import ChatRequest
from ppengine.http.client_stats import Call, ClientStats
from ppengine.http.completion_answer import CompletionAnswer
from ppengine.http.event_rows import EventRows
from ppengine.http.event_stream import EventStream, all_parts
from ppengine.http.followed import Followed
from ppengine.http.front_link import ANSWERS
from ppengine.http.front_socket import FrontSocket
from ppengine.http.generation import Generation, Part
from ppengine.http.outbox import BUFFER_MOST, Outbox
from ppengine.http.reply.reply_form import form_of
from ppengine.http.reply.reply_reader import ReplyFactory
from ppengine.http.request_fields import CompletionRequest, StreamOptions
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import Added, AddMany, Follow, News, Piece
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit


class Words(AbsentTokenizer):
    """A tokenizer whose tokens are written `<7>`; 9 has half a character."""

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{one}>" if one != 9 else "\ufffd" for one in ids)

    def fixed_text(self, token: int) -> str | None:
        return None if token == 9 else self.decode([token])

    def is_silent(self, token: int) -> bool:
        return False


class Service:
    """As much of a service as an answer reads."""

    model, tokenizer = "m", Words()

    def now(self) -> int:
        return 7


def new_call() -> Call:
    return ClientStats().begin("key", "/v1/completions")


def generation(samples: int = 1, first: int = 0, interval: int = 1, stops: tuple[str, ...] = ()) -> Generation:
    link: Any = SimpleNamespace(end_sample=lambda followed, sample: None, outbox=Outbox(), rows=EventRows())
    followed = Followed("r", samples, [0] * samples, interval=interval)
    return Generation(link, Words(), followed, [1], first, list(stops), 0)


def answer(kind: str, options: StreamOptions | None = None, choices: int = 2) -> Any:
    service: Any = Service()
    if kind == "chat":
        replies = ReplyFactory(form=form_of(None, "none", "none"), inside=False, functions={}, parallel=True)
        request = ChatRequest(messages=[], stream_options=options)
        return ChatAnswer("id", service, request, generation(choices), replies)
    return CompletionAnswer("id", service, CompletionRequest(prompt="x", stream_options=options), [generation(choices)])


# --- events -----------------------------------------------------------------------------------------------------


AT_END, ALWAYS = StreamOptions(include_usage=True), StreamOptions(continuous_usage_stats=True)


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize(
    "options", [None, StreamOptions(include_usage=True), StreamOptions(continuous_usage_stats=True)]
)
def test_a_plain_event_has_the_bytes_of_its_message(kind: str, options: StreamOptions | None) -> None:
    events, other = answer(kind, options), answer(kind, options)
    assert events.plain
    usage: Any = msgspec.UNSET if options is None else None if options.include_usage else other.usage()
    for text, reason in (
        ("a", None), ('"quoted"\n', None), ("", None), ("\u00fc\U0001f600", None), ("end", "length"),
    ):  # fmt: skip
        for choice in (0, 1):
            part = Part(choice, text, [5], [], 0, reason, 1)
            assert events.part(part) == event(other.chunk(part, usage))
    assert events.end().endswith(b"data: [DONE]\n\n")


# --- pieces -----------------------------------------------------------------------------------------------------


def test_pieces_that_come_before_the_reader_are_kept_in_order() -> None:
    followed, seen = Followed("r", 1, [0]), list[int]()
    followed.take(Piece("r", 0, 0, [1, 2]))
    followed.to(lambda piece: seen.extend(piece.token_ids))
    followed.take(Piece("r", 0, 1, [2, 3]))
    assert seen == [1, 2, 3], "known tokens are dropped"
    assert not followed.take(Piece("r", 0, 9, [4])), "tokens before it are missing"


def test_an_end_that_comes_again_counts_once() -> None:
    """A core that follows another one sends all again, also the samples that have ended."""
    followed, seen = Followed("r", 2, [0, 0]), list[Piece]()
    followed.to(seen.append)
    followed.take(Piece("r", 0, 0, [1], [], "length"))
    followed.take(Piece("r", 1, 0, [2]))
    for piece in (Piece("r", 0, 0, [1], [], "length"), Piece("r", 1, 0, [2, 3])):
        assert followed.take(piece)
    assert followed.samples == 1 and [piece.token_ids for piece in seen] == [[1], [2], [3]]
    followed.take(Piece("r", 1, 2, [], [], "stop"))
    assert followed.samples == 0 and seen[-1].finish_reason == "stop"


def test_an_interval_joins_tokens_after_the_first() -> None:
    followed, seen = Followed("r", 2, [0, 0], interval=3), list[tuple[int, list[int]]]()
    followed.to(lambda piece: seen.append((piece.sample, piece.token_ids)))
    for token in range(8):
        followed.take(Piece("r", 0, token, [token], [], "length" if token == 7 else None))
    followed.take(Piece("r", 1, 0, [50]))
    followed.take(Piece("r", 1, 1, [51, 52, 53, 54]))
    assert seen == [(0, [0]), (0, [1, 2, 3]), (0, [4, 5, 6]), (0, [7]), (1, [50]), (1, [51, 52, 53, 54])]


async def test_whole_answers_have_the_parts_of_all_choices() -> None:
    first, second = generation(2), generation(1, first=2, stops=("<6>",))
    waiting = asyncio.ensure_future(all_parts([first, second], new_call()))
    await asyncio.sleep(0)
    for piece in (Piece("r", 1, 0, [4], [], "length"), Piece("r", 0, 0, [3, 9], [], "length")):
        first.followed.take(piece)
    assert not waiting.done()
    second.followed.take(Piece("r", 0, 0, [5, 6, 7]))
    parts = await waiting
    assert ["".join(part.text for part in one) for one in parts] == ["<3>\ufffd", "<4>", "<5>"]
    assert [one[-1].finish_reason for one in parts] == ["length", "length", "stop"]
    assert first.over and second.over and second.output_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "reason", "tokens"),
    [([[3], [4], [5]], "length", 3), ([[3], [4, 0]], "stop", 3), ([[0]], "stop", 1), ([[3], [6, 7, 8], []], None, 3)],
)
async def test_a_client_is_counted_the_tokens_of_its_usage(
    pieces: list[list[int]], reason: str | None, tokens: int
) -> None:  # fmt: skip
    """With a stop token, which has no text, and without those behind a stop text."""
    one, stats, traced, place = generation(stops=("<7>",)), ClientStats(), list[int](), 0
    call = stats.begin("key", "/v1/completions")
    trace: Any = SimpleNamespace(part=lambda choice, count, reason: traced.append(count))
    call.trace = trace
    waiting = asyncio.ensure_future(all_parts([one], call))
    await asyncio.sleep(0)
    for number, ids in enumerate(pieces, 1):
        one.followed.take(Piece("r", 0, place, ids, [], reason if number == len(pieces) else None))
        place += len(ids)
    await waiting
    (counts,) = stats.counts()
    assert counts.tokens == sum(traced) == one.output_tokens == tokens
    assert sum(counts.ttft.values()) == 1


def test_choices_that_share_a_prompt_have_what_the_first_found_in_the_cache() -> None:
    one = generation(3)
    for sample, cached in ((1, 499), (0, 16), (2, 500)):
        assert one.take(Piece("r", sample, 0, [5]))
        one.take(Piece("r", sample, 1, [6], [], "length", cached_tokens=cached))
    assert one.cached_tokens == 16
    assert generation().cached_tokens == 0


async def test_a_loss_is_an_error() -> None:
    one = generation()
    one.followed.take(Piece("r", 0, 0, [], [], "error", loss="stage 1 is gone"))
    with pytest.raises(ApiError, match="the request was error: stage 1 is gone"):
        await all_parts([one], new_call())
    other = generation()
    other.followed.error = "the engine failed"
    other.followed.give(Piece("r", 0, 0, []))
    with pytest.raises(ApiError, match="the engine failed"):
        await all_parts([other], new_call())


class Wire:
    """The socket of a link: it keeps what is sent."""

    def __init__(self, endpoint: str, take: object) -> None:
        self.questions: list[Follow] = []

    def send(self, message: bytes) -> None:
        self.questions.append(msgspec.msgpack.decode(message, type=Follow))


def test_a_link_goes_on_with_its_question_and_asks_again_after_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_link, "FrontSocket", Wire)
    link = front_link.FrontLink("x", "http0", lambda state: None)
    questions, one = link._socket.questions, Followed("r", 1, [0])  # type: ignore[attr-defined]
    link._open["r"] = one
    link._follow()
    for token in range(ANSWERS):
        link._read(encode(News(nonce=questions[-1].nonce, cursor=token, pieces=[Piece("r", 0, token, [token])])))
    first, *more = questions
    assert first.since == -1 and first.answers == ANSWERS and one.counts == [ANSWERS]
    assert [(each.nonce, each.since) for each in more] == [
        (first.nonce, ANSWERS // 2 - 1), (first.nonce, ANSWERS - 1)
    ]  # fmt: skip
    link._read(encode(News(nonce=first.nonce, cursor=200, pieces=[Piece("r", 0, 150, [1])])))
    assert questions[-1].nonce != first.nonce and questions[-1].since == -1, "tokens are missing"
    link._read(encode(News(nonce=first.nonce, cursor=201, pieces=[])))
    assert len(questions) == 4, "an answer to the earlier question"


async def test_times_are_awaited_only_of_requests_that_the_core_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(
        front_link, "FrontSocket", lambda endpoint, take: SimpleNamespace(send=lambda data: sent.append(data))
    )  # fmt: skip
    traces: Any = SimpleNamespace(take=lambda *given: None)
    link = front_link.FrontLink("x", "http0", lambda state: None, 1, traces)

    def submit(name: str) -> asyncio.Task[tuple[Added, list[Followed]]]:
        one = Submit(prompt_token_ids=[1], sampling=SamplingParams(n=2), request=name)
        return asyncio.create_task(link.submit([one], "o", "c", 0.0))

    early = submit("early")
    await asyncio.sleep(0)
    early.cancel()
    with pytest.raises(asyncio.CancelledError):
        await early
    assert b"abort-many" in sent[-1] and not link._left and not link._following
    late = submit("late")
    await asyncio.sleep(0)
    (nonce,) = link._asked
    link._read(encode(Added(nonce=nonce, requests=["late"])))
    link.leave((await late)[1])
    for name, left in (("early", {"late": 2}), ("late", {"late": 1}), ("late", {})):
        link._read(encode(News(nonce=0, cursor=1, pieces=[Piece(name, 0, 0, [], [], "abort")])))
        assert link._left == left


async def test_token_ids_go_as_bytes_unless_the_core_must_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    monkeypatch.setattr(
        front_link, "FrontSocket", lambda endpoint, take: SimpleNamespace(send=lambda data: sent.append(data))
    )  # fmt: skip
    link = front_link.FrontLink("x", "http0", lambda state: None)
    prompts = [[1, 2, 70_000], [3, -1]]
    submissions = [Submit(prompt_token_ids=ids, request=f"r{number}") for number, ids in enumerate(prompts)]
    asking = asyncio.create_task(link.submit(submissions, "o", "c", 0.0))
    await asyncio.sleep(0)
    message = Codec(AddMany).decode(sent[-1])
    assert [ids.tolist() for ids in message.tokens] == [prompts[0], []]
    assert [one.prompt_token_ids for one in message.submissions] == [None, prompts[1]]
    assert [one.prompt_token_ids for one in submissions] == prompts, "those of the caller stay"
    asking.cancel()


# --- connections ------------------------------------------------------------------------------------------------


class Transport:
    """A connection whose client reads when it is let."""

    def __init__(self) -> None:
        self.written, self.unread = b"", 0
        self.closed = False

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes) -> None:
        if self.closed:  # as uvloop does
            raise RuntimeError("the handler is closed")
        self.written += data
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    @property
    def body(self) -> bytes:
        """The chunks without their frames."""
        rest, body = self.written, b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        return body


def texts(body: bytes) -> str:
    lines = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    return "".join(line["choices"][0]["text"] for line in lines if "choices" in line)


def running(one: Generation, transport: Any, room: asyncio.Event, call: Call) -> asyncio.Task[ApiError | None]:
    async def send(message: Any) -> None:
        assert message == {"type": "http.response.body", "body": b"", "more_body": True}
        await room.wait()

    return asyncio.ensure_future(EventStream(answer("completion"), [one], call, transport).run(send))


async def test_a_piece_is_on_the_connection_when_the_link_has_handed_it_out() -> None:
    one, transport = generation(), Transport()
    task = running(one, transport, asyncio.Event(), new_call())
    await asyncio.sleep(0)
    for token in (3, 4):
        one.followed.take(Piece("r", 0, token - 3, [token]))
        assert texts(transport.body).endswith(f"<{token}>")
    one.followed.take(Piece("r", 0, 2, [5], [], "length"))
    assert await task is None
    assert texts(transport.body) == "<3><4><5>" and transport.body.endswith(b"data: [DONE]\n\n")


async def test_events_are_held_back_while_the_client_does_not_read() -> None:
    one, transport, room, call = generation(), Transport(), asyncio.Event(), new_call()
    task = running(one, transport, room, call)
    await asyncio.sleep(0)
    count = 2 * BUFFER_MOST // 100
    for token in range(count):
        one.followed.take(Piece("r", 0, token, [token + 10]))
    assert BUFFER_MOST < transport.unread < BUFFER_MOST + 1000
    await asyncio.sleep(0.01)
    assert not task.done() and call.slow(asyncio.get_running_loop().time() + 5)
    one.followed.take(Piece("r", 0, count, [5], [], "length"))
    transport.unread = 0
    room.set()
    await task
    assert texts(transport.body) == "".join(f"<{token + 10}>" for token in range(count)) + "<5>"
    assert not call.slow(asyncio.get_running_loop().time() + 5)


async def test_events_for_a_client_that_has_left_are_dropped_without_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, transport = generation(), Transport()
    task = running(one, transport, asyncio.Event(), new_call())
    await asyncio.sleep(0)
    one.followed.take(Piece("r", 0, 0, [3]))
    transport.closed = True
    one.followed.take(Piece("r", 0, 1, [4]))
    one.followed.take(Piece("r", 0, 2, [5], [], "length"))
    assert await task is None
    assert texts(transport.body) == "<3>" and not caplog.records


async def test_a_failure_of_one_answer_ends_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, transport = generation(), Transport()
    task = running(one, transport, asyncio.Event(), new_call())
    await asyncio.sleep(0)
    monkeypatch.setattr(one.tokenizer, "decode", lambda ids: 1 / 0)
    one.followed.take(Piece("r", 0, 0, [3]))
    error = await task
    assert error is not None and error.status == 500
    *_, failed, done, _ = transport.body.split(b"\n\n")
    assert json.loads(failed[6:])["error"]["type"] == "server_error" and done == b"data: [DONE]"


# --- the core's socket ------------------------------------------------------------------------------------------


async def test_the_socket_hands_out_messages_until_one_is_refused() -> None:
    seen: list[bytes] = []

    def take(data: bytes) -> None:
        if data == b"bad":
            raise ValueError("refused")
        seen.append(data)

    with zmq.Context() as context, context.socket(zmq.ROUTER) as core:
        core.bind("tcp://127.0.0.1:0")
        link = FrontSocket(core.getsockopt_string(zmq.LAST_ENDPOINT), take)
        link.send(b"before")
        task = asyncio.ensure_future(link.run())
        client, data = await asyncio.to_thread(core.recv_multipart)
        assert data == b"before"
        for number in range(100):
            core.send_multipart([client, b"%d" % number])
            link.send(b"x")
        while len(seen) < 100:
            await asyncio.sleep(0.001)
        assert seen == [b"%d" % number for number in range(100)]
        core.send_multipart([client, b"bad"])
        with pytest.raises(ValueError, match="refused"):
            await task
