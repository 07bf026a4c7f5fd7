"""A large engine that is busy: pictures of 1,000 requests and 64 stages that change every second, and their events.

`LargeEngine` makes them, `LargeGateway` publishes them on real sockets, `write_hour` keeps an hour of them on disk.
"""

from __future__ import annotations

import random
import time
from typing import Any
from unittest import mock

import msgspec
import snapshots
from fake_gateway import FakeGateway
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.discovery import keep_record
from ppengine.protocol.frames import TOPIC_EVENT, encode
from ppengine.protocol.kept_files import engine_folder
from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.recording import Recorder, Update
from ppengine.protocol.snapshot import Event, Events, Latency, Queues, RequestInfo, Why
from ppengine.protocol.stage_info import Waiting

STAGES, REQUESTS, RUNNING = 64, 1000, 600
TOKENS_S = 20.0
BLOCK, BLOCKS = 16, 65_536
TIMELINE = 48
"""Operations of a stage in a snapshot, as many as the agent keeps."""
HOUR_S, SEGMENT_S = 3600, 60
KEPT_EVERY_S = 10
"""Seconds between two snapshots of a history: the gateway keeps no more of an engine of this size."""
_STATES = ("receiving", "computing", "computing", "sending")


class LargeEngine:
    """Serves requests of random lengths; those that end are replaced by new ones. `advance` lets time pass."""

    def __init__(self, wall: float, stages: int = STAGES, requests: int = REQUESTS) -> None:
        self._dice = random.Random(1)
        self._made = 0
        self._goals: dict[str, int] = {}
        self._running = requests * RUNNING // REQUESTS
        self.snapshot = snapshots.snapshot(stages, 0)
        self.snapshot.sampled_at = wall
        self.snapshot.event_seq = 0
        self.snapshot.requests = [self._new_request() for _ in range(requests)]
        for request in self.snapshot.requests[: self._running]:
            self._run(request)
            request.output_tokens = self._dice.randrange(self._goals[request.id])
        self.advance(0.0)

    def advance(self, seconds: float) -> list[Event]:
        """Let `seconds` pass; return the events meanwhile."""
        picture = self.snapshot
        picture.sampled_at += seconds
        engine = picture.engine
        engine.uptime_s += seconds
        engine.step += int(40 * seconds)
        engine.retired_step = engine.step - len(picture.stages)
        tokens, events = self._advance_requests(seconds)
        picture.requests_total = len(picture.requests)
        states = [request.state for request in picture.requests]
        picture.queues = Queues(**{name: states.count(name) for name in Queues.__struct_fields__})
        picture.throughput.output_tok_s = tokens / seconds if seconds else 0.0
        picture.throughput.prompt_tok_s = 400 * self._dice.random()
        picture.latency = Latency(
            queue_s=self._quantiles(2.0), ttft_s=self._quantiles(3.0), itl_ms=self._quantiles(50.0)
        )
        self._advance_stages()
        return events

    def _advance_requests(self, seconds: float) -> tuple[int, list[Event]]:
        """Write tokens, end requests and begin others; return the tokens and the events."""
        picture, dice = self.snapshot, self._dice
        share = int(TOKENS_S * seconds)
        total, ended, step = 0, [], picture.engine.step
        have = dice.randrange(100)
        for index, request in enumerate(picture.requests):
            request.age_s += seconds
            if request.state == "running":
                total += share
                request.output_tokens += share
                request.computed_tokens = request.prompt_tokens + request.output_tokens
                request.blocks = -(-request.computed_tokens // BLOCK)
                request.in_flight = [step - index % 4]
                request.itl_ms = 45.0 + (step + index) % 97 / 10
                if request.output_tokens >= self._goals[request.id]:
                    ended.append(request)
            elif request.state == "waiting" and request.why is not None:
                need = request.why.need
                request.why = Why(code="blocks", need=need, have=have, text=f"need {need}, have {have}")
        for request in ended:
            del self._goals[request.id]
        fresh = [self._new_request() for _ in ended]
        over = {request.id for request in ended}
        picture.requests = [request for request in picture.requests if request.id not in over] + fresh
        events = [self._event("request.finished", f"stop after {each.output_tokens} tokens", each) for each in ended]
        events += [self._event("request.added", f"{each.prompt_tokens} tokens", each) for each in fresh]
        if seconds:
            self._swap_one()
        waits = [request for request in picture.requests if request.state == "waiting"]
        for request in waits[: self._running - (len(picture.requests) - len(waits))]:
            self._run(request)
        return total, events

    def _swap_one(self) -> None:
        """Swap one request out, and the one before it in again."""
        picture = self.snapshot
        for request in picture.requests:
            if request.state == "swapped":
                self._run(request)
        request = self._dice.choice([request for request in picture.requests if request.state == "running"])
        request.state, request.swap_blocks, request.blocks = "swapped", request.blocks, 0
        request.why = Why(code="blocks", need=request.swap_blocks, have=3, text="swapped out for another")
        request.preemptions += 1
        picture.preemptions_total += 1
        picture.swaps_total += 1

    def _run(self, request: RequestInfo) -> None:
        request.state, request.why, request.swap_blocks = "running", None, 0
        if request.queue_s is None:
            request.queue_s, request.ttft_s = request.age_s, request.age_s + 0.2

    def _new_request(self) -> RequestInfo:
        self._made += 1
        name, prompt = f"r-{self._made:06x}", self._dice.randrange(16, 1990)
        self._goals[name] = self._dice.randrange(100, 1200)
        need = -(-prompt // BLOCK)
        return RequestInfo(
            id=name, owner=snapshots.OWNERS[self._made % len(snapshots.OWNERS)], state="waiting", age_s=0.0,
            prompt_tokens=prompt, output_tokens=0, blocks=0, swap_blocks=0, cached_tokens=prompt // 64 * 16,
            why=Why(code="blocks", need=need, have=0, text=f"need {need}, have 0"),
        )  # fmt: skip

    def _event(self, kind: str, text: str, request: RequestInfo) -> Event:
        picture = self.snapshot
        picture.event_seq += 1
        return Event(
            seq=picture.event_seq, wall=picture.sampled_at, kind=kind, text=text, by=request.owner,
            request=request.id, step=picture.engine.step,
        )  # fmt: skip

    def _advance_stages(self) -> None:
        picture, dice = self.snapshot, self._dice
        used = sum(request.blocks for request in picture.requests) % BLOCKS
        for stage in picture.stages:
            step = picture.engine.step - stage.index
            stage.state = _STATES[dice.randrange(len(_STATES))]
            stage.op = f"forward m{step}" if stage.state == "computing" else stage.state
            stage.waiting_on = None if stage.state == "computing" else Waiting(stage=0, what="receive", since_ms=2.0)
            stage.micro_batches, stage.retired_step = [step], step - 1
            stage.sample_age_ms, stage.progress_age_ms = 300 * dice.random(), 25 * dice.random()
            stage.inbox, stage.outbox = dice.randrange(3), dice.randrange(2)
            stage.step_ms.p50, stage.idle_fraction = 20 + 4 * dice.random(), 0.3 * dice.random()
            stage.kv_blocks.used, stage.kv_blocks.mapped = used, BLOCKS
            stage.kv_blocks.free, stage.kv_blocks.capacity = BLOCKS - used, BLOCKS + 100 + stage.index
            stage.memory.used = (stage.memory.weights or 0) + used * 2**19
            for stream in stage.streams:
                stream.op, stream.age_ms = f"m{step}", 25 * dice.random()
            late = 25 * dice.random()
            stage.timeline = [
                [(1, 3, 6)[number % 3], step - number // 3, late + 8.0 * number, (3.0, 16.0, 2.0)[number % 3]]
                for number in reversed(range(TIMELINE))
            ]

    def _quantiles(self, least: float) -> Quantiles:
        p50, p90, p99 = (round(least * (1 + more + self._dice.random()), 3) for more in (0, 1, 3))
        return Quantiles(p50=p50, p90=p90, p99=p99, count=5000)


class LargeGateway(FakeGateway):
    """Publishes a large engine: a snapshot a second, after the events that it includes, and a block map of its size."""

    def __init__(self, engine: LargeEngine) -> None:
        super().__init__("large", engine.snapshot, hz=1.0)
        self._large = engine

    def start(self, epoch: str | None = None) -> None:
        """Begin, and keep the record as a gateway does."""
        super().start(epoch)
        keep_record(self.record)

    def _advance(self) -> None:
        fresh = self._large.advance(1 / self.hz)
        self.snapshot.sampled_at = time.time()
        self.events += fresh
        if fresh:
            self._publish(TOPIC_EVENT, Events(fresh), fresh[-1].seq)

    def _inspect(self, question: Inspect) -> Inspected | Failed:
        if question.what != "blocks":
            return super()._inspect(question)
        blocks = snapshots.blocks(self.snapshot, BLOCKS, max(1, question.cells), question.request)
        return Inspected(nonce=question.nonce, what="blocks", data=msgspec.Raw(encode(blocks)))


def write_hour(engine_id: str, end: float, **sizes: Any) -> int:
    """Write the history of an engine up to `end` (Unix seconds), as its gateway would; return the bytes."""
    folder = engine_folder(engine_id) / "history"
    folder.mkdir(parents=True, exist_ok=True)
    now = [end - HOUR_S]
    engine = LargeEngine(now[0], **sizes)
    while now[0] < end:
        path = folder / f"{int(now[0] * 1e3):015d}.rec"
        with mock.patch("time.time", return_value=now[0]):
            recorder = Recorder(path, engine=engine_id, name="large", packed=True, clock=lambda: now[0])
        with recorder:
            for _ in range(SEGMENT_S // KEPT_EVERY_S):
                events = engine.advance(float(KEPT_EVERY_S))
                for number, event in enumerate(events):
                    event.wall = now[0] + KEPT_EVERY_S * number / len(events)
                    recorder.write(event)
                now[0] += KEPT_EVERY_S
                recorder.write(engine.snapshot)
    return sum(path.stat().st_size for path in folder.iterdir())


def copied(message: Update) -> Update:
    """Return a snapshot or an event as a console receives it: encoded and decoded again."""
    return msgspec.msgpack.decode(encode(message), type=type(message))
