"""Answers to questions on demand: one request in full, the block map, the ledger."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from ppengine.core.endings import history_of, since
from ppengine.core.outputs import Ending, Sample
from ppengine.core.scheduler import wait_reasons
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import RequestDetail

if TYPE_CHECKING:
    from ppengine.core.engine import Engine
    from ppengine.core.scheduler.request import Request


def answer(engine: Engine, question: Inspect) -> Inspected | Failed:
    """Return the answer to an Inspect of a request, of the blocks or of the ledger."""
    detail: msgspec.Struct
    if not engine.serving:
        return Failed(nonce=question.nonce, code="BUSY", text=f"the engine is {engine.state}: {engine.message}")
    if question.what == "blocks":
        detail = engine.block_map.answer(question.cells, question.request)
    elif question.what == "ledger":
        if question.stage is not None and question.stage >= engine.config.stages:
            text = f"no stage {question.stage}: this engine has 0 to {engine.config.stages - 1}"
            return Failed(nonce=question.nonce, code="NOT_FOUND", text=text)
        detail = engine.checks.ledger(question.stage)
    elif question.what == "request":
        name = question.request or ""
        members = engine.members(name)
        if not members and engine.outputs.get(name) is None:
            return Failed(nonce=question.nonce, code="NOT_FOUND", text=engine.gone_text(name))
        detail = _live(engine, members[0]) if members else _finished(engine, name)
    else:
        return Failed(nonce=question.nonce, code="UNSUPPORTED", text=f"the core knows nothing of {question.what}")
    return Inspected(nonce=question.nonce, what=question.what, data=msgspec.Raw(msgspec.msgpack.encode(detail)))


def _live(engine: Engine, request: Request) -> RequestDetail:
    scheduler, now = engine.scheduler, engine.clock()
    why = wait_reasons.why(scheduler, request)
    sample = _sample(engine, request.group, request.sample)
    first, outputs = request.first_token_time, len(request.output_ids)
    return RequestDetail(
        id=request.id,
        owner=request.owner,
        state=request.state,
        why=why.text if why else "",
        prompt_tokens=len(request.prompt_ids),
        output_tokens=outputs,
        computed_tokens=request.num_computed,
        cached_tokens=request.num_cached,
        block_table=list(request.blocks),
        shared_blocks=[block for block in request.blocks if scheduler.blocks.device.references(block) > 1],
        host_blocks=list(request.host_blocks),
        in_flight=list(request.in_flight),
        sampling=request.sampling,
        revision=request.revision,
        age_s=now - request.arrival_time,
        queued_s=since(request.admitted_time, request.arrival_time),
        first_token_s=since(first, request.arrival_time),
        inter_token_ms=None if first is None or outputs < 2 else (now - first) / (outputs - 1) * 1e3,
        preemptions=request.preemptions,
        swaps=request.swaps,
        prompt_token_ids=request.prompt_ids,
        output_token_ids=list(request.output_ids),
        output_text=sample.text if sample else "",
        history=history_of(request),
    )


def _finished(engine: Engine, name: str) -> RequestDetail:
    output = engine.outputs.get(name)
    if output is None:
        raise KeyError(name)
    sample = output.samples[0]
    detail = RequestDetail(
        id=name, owner=output.session, state="finished", why=sample.finish_reason or "", output_text=sample.text,
        prompt_tokens=len(output.prompt_ids), output_tokens=len(sample.tokens), computed_tokens=0, cached_tokens=0,
        block_table=[], shared_blocks=[], host_blocks=[], in_flight=[], sampling=output.sampling, revision=0,
        age_s=0.0, prompt_token_ids=output.prompt_ids, output_token_ids=list(sample.tokens),
    )  # fmt: skip
    return detail if sample.ending is None else _with_ending(detail, sample.ending)


def _with_ending(detail: RequestDetail, ending: Ending) -> RequestDetail:
    first, steps = ending.first_token_s, detail.output_tokens - 1
    return msgspec.structs.replace(
        detail,
        owner=ending.owner,
        age_s=ending.finished_s + max(0.0, time.time() - ending.wall),
        queued_s=ending.queued_s,
        first_token_s=first,
        finished_s=ending.finished_s,
        inter_token_ms=None if first is None or steps < 1 else (ending.finished_s - first) / steps * 1e3,
        computed_tokens=ending.computed_tokens,
        cached_tokens=ending.cached_tokens,
        revision=ending.revision,
        preemptions=ending.preemptions,
        swaps=ending.swaps,
        history=ending.history,
    )


def _sample(engine: Engine, group: str, index: int) -> Sample | None:
    output = engine.outputs.get(group)
    return None if output is None else output.samples[index]
