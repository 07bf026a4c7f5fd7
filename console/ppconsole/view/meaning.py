"""The selected row in words: the state, the reason, and the open operation behind its letters."""

from __future__ import annotations

from ppengine.protocol.snapshot import RequestInfo, Snapshot, Why
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.facts import cordon_text
from ppconsole.model.ranks import words_of
from ppconsole.model.units import count_text, percent_text
from ppconsole.view import figures, stage_table, wording
from ppconsole.view.legend import OPERATIONS, REQUEST_STATES, STAGE_STATES, Section
from ppconsole.view.marks import CORDONED, FAULT, STAGE, faulty_places, request_mark, stage_mark

_GONE = {"-": "not in the table any more"}
_REASONS = {
    "fenced": "a verb takes effect when the step in flight has retired; until then nothing new is scheduled",
    "held": "that verb holds it; release or swap-in lets it go on",
    "in_flight": "its step is in the pipeline; the next one is scheduled when that has retired",
    "paused": "the engine is paused; resume lets it run",
    "blocks": "KV blocks are missing; it goes on when others finish, are swapped out, or memory grows",
    "turn": "a later step takes it",
    "behind": "another request is before it; that one's reason comes first",
    "cordoned": "no request begins until the cordon is lifted",
    "max_num_seqs": "as many requests run as the profile's max_num_seqs allows",
    "mask": "its output follows a grammar; the process grammar says which tokens may follow, or is started again",
    "token_budget": "the step has no room for its prompt tokens; a later one takes it",
}
"""Meaning by the code of a reason."""


def of_selection(
    snapshot: Snapshot | None, request: str | None, stage: int | None, rank: int | None = None
) -> list[Section]:
    """Return the meaning of the selected request, or of the selected stage; empty without a selection.

    `rank`: the selected rank of the stage; None: all of them.
    """
    if snapshot is None:
        return []
    if stage is not None:
        chosen = [each for each in snapshot.stages if each.index == stage and rank in (None, each.tensor_rank)]
        found = [of_stage(snapshot, each) for each in chosen]
        return found or [Section(f"SELECTED  stage {stage}", _GONE)]
    if request is None:
        return []
    known = [of_request(snapshot, each) for each in snapshot.requests if each.id == request]
    return known or [Section(f"SELECTED  request {request}", _GONE)]


def of_request(snapshot: Snapshot, request: RequestInfo) -> Section:
    """Return the state of a request and its WHY, in words."""
    mark = request_mark(request.state)
    rows = {mark.text: REQUEST_STATES.rows.get(mark.text, request.state)}
    stuck = wording.stuck_at(snapshot)
    shown = wording.why(request, wording.locate(snapshot), stuck)
    if request.why is not None and not (request.why.code == "in_flight" and request.in_flight):
        rows["WHY"] = f"{shown}: {_reason(request.why)}"
    elif request.in_flight and stuck:
        rows["WHY"] = f"{shown}: its step is in the pipeline, which this fault stops; d shows it, and what to do"
    elif request.in_flight:
        rows["WHY"] = f"{shown}: its step in the pipeline and the newest stage that has it; +1 is one more in flight"
    elif shown:
        rows["WHY"] = f"{shown}: the reason why it ended"
    if request.blocks or request.swap_blocks:
        rows["BLK SWP"] = f"{request.blocks} KV blocks on the device, {request.swap_blocks} on the host"
    if request.preemptions:
        rows["PRE"] = f"its blocks were taken {_times(request.preemptions)}; it was recomputed or swapped"
    return Section(f"SELECTED  request {request.id}", rows, {mark.text: mark.style, "WHY": "warn"})


def of_stage(snapshot: Snapshot, stage: StageInfo) -> Section:
    """Return the state of a stage, its verdict, wait and open operation, in words."""
    mark = stage_mark(stage, faulty_places(snapshot))
    known = mark == FAULT or stage.state in STAGE
    rows = {mark.text: STAGE_STATES.rows[mark.text] if known else stage.state}
    for verdict in snapshot.verdicts:
        if verdict.stage == stage.index and verdict.rank in (None, stage.tensor_rank):
            rows["!" if verdict.root else verdict.cause] = f"{verdict.cause}: {verdict.summary}"
    if text := cordon_text(stage):
        rows[CORDONED] = f"{text}: no request begins"
    rows["STREAM:OP"] = f"{wording.operation(stage)}: {_operation(stage)}"
    if (waiting := stage.waiting_on) is not None:
        rows["waits for"] = f"{wording.peer(stage, waiting)} ({waiting.what}), for {figures.millis(waiting.since_ms)}"
    kv = stage.kv_blocks
    limit = "; no other stage can hold fewer" if kv.binding else ""
    counts = (f"{count_text(kv.used)} in use, {count_text(kv.mapped)} mapped", f"{count_text(kv.capacity)} at most")
    rows["KV"] = f"blocks: {', '.join(counts)}{limit}"
    rows["AGE"] = f"last progress {figures.age(stage.progress_age_ms)} ago"
    if (stage.sample_age_ms or 0.0) > stage_table.OLD_SAMPLE_MS:
        rows["~"] = f"these figures are {figures.age(stage.sample_age_ms)} old"
    if stage.rank_wait is not None:
        rows["RANKW"] = f"{percent_text(stage.rank_wait)} of the last second spent waiting for other ranks"
    styles = {mark.text: mark.style, "!": "bad", CORDONED: "warn", "~": "warn"}
    return Section(f"SELECTED  {words_of(snapshot, stage)}", rows, styles)


def _reason(why: Why) -> str:
    """Return the meaning of a reason; an engine that is newer than this console may have others."""
    return _REASONS.get(why.code, f"the engine's reason is {why.code}")


def _operation(stage: StageInfo) -> str:
    """Return the open operation in words, with its age if the stream reports one."""
    busy = wording.open_stream(stage)
    found = wording.OPERATION.fullmatch((busy.op if busy else stage.op) or "")
    if found is None:
        return "no open operation"
    kind = wording.SHORT.get(found[1], found[1])
    words = OPERATIONS.rows.get(kind, kind)
    return words if busy is None or busy.age_ms is None else f"{words}; open for {figures.millis(busy.age_ms)}"


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
