"""The words that the console and the commands share: titles of columns, states, reasons, open operations.

It imports nothing that draws, because the commands print with it.
"""

from __future__ import annotations

import re

from ppengine.protocol.operation_kinds import RANK_WAIT_WORDS, Kind
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import RequestInfo, Snapshot
from ppengine.protocol.stage_info import StageInfo, StreamInfo, Waiting

from ppconsole.model.facts import STOPPING, place, root_verdict, serves_again
from ppconsole.model.ranks import short, words
from ppconsole.model.units import count_text
from ppconsole.view import figures

STAGE = {
    "stage": "STG", "state": "STATE", "memory": "MEMORY", "kv": "KV-USE/MAP/CAP", "swap": "SWAP", "io": "I>O",
    "micro": "MB", "step": "STEP", "idle": "IDLE", "ranks": "RANKW", "age": "AGE", "op": "STREAM:OP",
}  # fmt: skip
"""Titles of the stage table by column."""
REQUEST = {
    "id": "REQ", "owner": "OWNER", "state": "STATE", "age": "AGE", "in": "IN", "out": "OUT", "blk": "BLK",
    "swp": "SWP", "why": "WHY",
}  # fmt: skip
"""Titles of the request table by column."""
FINISHED = {
    "id": "REQ", "owner": "OWNER", "ended": "ENDED", "took": "TOOK", "in": "IN", "out": "OUT", "queue": "QUEUE",
    "ttft": "TTFT", "itl": "ITL", "itl99": "ITL99", "pre": "PRE", "reason": "REASON",
}  # fmt: skip
"""Titles of the table of requests that have ended, by column."""
STREAM = {
    "stage": "STG", "name": "STREAM", "owner": "OWNER", "op": "OPERATION", "age": "AGE", "pending": "PEND",
    "waits": "WAITS-FOR",
}  # fmt: skip
"""Titles of tables of streams by column."""
HANDOFF = {"producer": "PRODUCER", "consumer": "CONSUMER", "event": "ORDERED-BY", "count": "TIMES"}
"""Titles of the ledger's table of hand-offs by column."""
BUFFER = {
    "name": "BUFFER", "bytes": "SIZE", "generation": "GEN", "writer": "LAST-WRITER", "readers": "READ-NOW-BY",
}  # fmt: skip
"""Titles of the ledger's table of buffers by column."""

SHORT = {
    "receive": "recv", "forward": "fwd", "token_return": "token", "swap_out": "out", "swap_in": "in",
    "collective": "coll", "device": "gpu", "all_reduce": "reduce", "all_gather": "gather",
}  # fmt: skip
"""Kinds of operations by the shorter word that STREAM:OP has for them."""
_RANK_WAITS = RANK_WAIT_WORDS | {Kind.COLLECTIVE.word}
"""Operations that may wait for a rank of the same stage."""
MAIN = "main"
"""Name of the stream of the step loop."""
OPERATION = re.compile(r"([a-z_]+)([<>]\d+(?:\.\d+)?)?(.*)", re.DOTALL)
"""Kind, peer and micro-batch of an operation's text: `receive<1 m7`."""

_STAGE_OF_RANK = re.compile(r"\d+(?=\.)")


def open_stream(stage: StageInfo) -> StreamInfo | None:
    """Return the stream with the longest open operation; None if there is none."""
    busy = [stream for stream in stage.streams if stream.op]
    return max(busy, key=lambda each: each.age_ms or 0.0, default=None)


def operation(stage: StageInfo, brief: bool = False) -> str:
    """Return the longest open operation of the stage, its stream, and the peer that it waits for.

    A stream with the name of its operation is not repeated. `brief` leaves out the number of the micro-batch, and
    `main:`, the stream of the step loop.
    """
    stream = open_stream(stage)
    text = with_rank((stream.op if stream else stage.op) or figures.NOTHING, stage)
    found = OPERATION.fullmatch(text)
    if found is not None:
        word, other, rest = found[1], found[2] or "", found[3]
        waiting = stage.waiting_on
        if not other and waiting is not None and waiting.stage is not None:
            other = f"{'>' if waiting.what == 'send' else '<'}{waiting.stage}"
        text = f"{SHORT.get(word, word)}{other}{'' if brief else rest}"
    if stream is None or (found is not None and stream.name == found[1]) or (brief and stream.name == MAIN):
        return text
    return f"{stream.name}:{text}"


def fitting_op(op: str, room: int) -> str:
    """Return an operation in the longest of its forms with at most `room` cells, or its shortest one.

    They are `all_reduce<1.0`, `reduce<1.0`, `reduce<.0` of a rank of the same stage, and `reduce`.
    """
    found = OPERATION.fullmatch(op)
    if found is None:
        return op
    kind, other, rest = SHORT.get(found[1], found[1]), found[2] or "", found[3]
    forms = (op, f"{kind}{other}{rest}", f"{kind}{_STAGE_OF_RANK.sub('', other)}{rest}")
    return next((form for form in forms if len(form) <= room), kind)


def with_rank(op: str, stage: StageInfo) -> str:
    """Return an operation of a stage; one that waits for a rank names it in full, `all_reduce<1.0 m7`."""
    found = OPERATION.fullmatch(op)
    if found is None or found[1] not in _RANK_WAITS:
        return op
    waiting = stage.waiting_on
    rank = int(found[2][1:]) if found[2] else None if waiting is None else waiting.rank
    return op if rank is None else f"{found[1]}<{short(Place(stage.index, rank), ranked=True)}{found[3]}"


def peer(stage: StageInfo, waiting: Waiting) -> str:
    """Return the one that a stage waits for: `the core`, `stage 2`, or `rank 1` of its own stage."""
    if waiting.rank is not None:
        return f"rank {waiting.rank}" if waiting.stage in (None, stage.index) else words(waiting.stage, waiting.rank)
    return "the core" if waiting.stage is None else f"stage {waiting.stage}"


def why(request: RequestInfo, where: dict[int, int], stuck: str = "") -> str:
    """Return why the request waits, with the numbers; of a running one, where its micro-batch is.

    `stuck`: the stage that stops the pipeline, as `stuck_at` has it; it is the reason of all in flight.
    """
    reason = request.why
    if reason is not None and not (reason.code == "in_flight" and request.in_flight):
        if reason.need is not None and reason.have is not None:
            figure = f"need {count_text(reason.need)}, have {count_text(reason.have)}"
            return figure if not reason.text or figure in reason.text else f"{figure}: {reason.text}"
        return reason.text or reason.code
    if request.in_flight:
        number = request.in_flight[0]
        if stuck:
            return f"{stuck} {figures.micro_batch(number)}"
        place_of = f" at stage {where[number]}" if number in where else " in flight"
        ahead = f" +{len(request.in_flight) - 1}" if len(request.in_flight) > 1 else ""
        return f"{figures.micro_batch(number)}{place_of}{ahead}"
    if request.finish_reason:
        return request.finish_reason
    return ""


def stuck_at(snapshot: Snapshot) -> str:
    """Return the root of a fault that stops the pipeline, `stage 0.1 stopped`; empty without one."""
    verdict = root_verdict(snapshot)
    if verdict is None or not verdict.root or verdict.cause not in STOPPING or serves_again(verdict, snapshot):
        return ""
    if verdict.stage is None:
        engine = snapshot.engine
        # The gateway says so of a core that has ended; one that hangs leaves its last state and message.
        ended = verdict.cause == "core" and engine.state == "degraded" and engine.message.startswith("the engine core ")
        return f"{place(verdict).lower()} {'ended' if ended else 'stuck'}"
    name = short(Place(verdict.stage, verdict.rank), ranked=True) if verdict.rank is not None else str(verdict.stage)
    return f"stage {name} {verdict.cause}"


def flying(snapshot: Snapshot) -> list[int]:
    """Return the micro-batches in flight: those that a WHY names, and those that a stage has."""
    found = {number for request in snapshot.requests for number in request.in_flight}
    return sorted(found | {number for stage in snapshot.stages for number in stage.micro_batches})


def locate(snapshot: Snapshot) -> dict[int, int]:
    """Return the last stage that holds each micro-batch, by its number."""
    return {number: stage.index for stage in snapshot.stages for number in stage.micro_batches}
