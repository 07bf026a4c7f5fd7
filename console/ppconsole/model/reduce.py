"""How the state moves: every function takes a state and returns the next one."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ppengine.protocol.control import Fetched
from ppengine.protocol.recording import LinkState, Update
from ppengine.protocol.severity import is_routine
from ppengine.protocol.snapshot import Event, Snapshot

from ppconsole.model.filters import FilterError
from ppconsole.model.request_fields import request_filter
from ppconsole.model.state import (
    MAX_EVENTS,
    MAX_OUTPUT_CHARACTERS,
    MAX_OUTPUTS,
    ConsoleState,
    Output,
)


def reduce(state: ConsoleState, update: Update, now: float) -> ConsoleState:
    """Return the state after `update` arrived at `now`."""
    if isinstance(update, LinkState):
        return _on_link(state, update)
    if isinstance(update, Snapshot):
        return _on_snapshot(state, update, now)
    return replace(state, events=_kept((*state.events, update)))


def set_filter(state: ConsoleState, text: str) -> ConsoleState:
    """Show only requests that match `text`; one that cannot be understood keeps the last that could."""
    text = text.strip()
    try:
        return replace(state, filter=text, wanted=request_filter(text), filter_error="")
    except FilterError as error:
        return replace(state, filter=text, filter_error=str(error))


def add_output(state: ConsoleState, fetched: Fetched) -> ConsoleState:
    """Append fetched text of sample 0. A piece that does not begin where the last one ended is dropped."""
    old = state.outputs.get(fetched.request, Output(fetched.request))
    if fetched.sample != 0 or fetched.offset != old.tokens or fetched.text_offset != old.characters:
        return state
    new = Output(
        fetched.request,
        (old.text + fetched.text)[-MAX_OUTPUT_CHARACTERS:],
        old.tokens + len(fetched.token_ids),
        old.characters + len(fetched.text),
        fetched.finished,
        f"{fetched.finish_reason}: {fetched.loss}" if fetched.loss else fetched.finish_reason,
        old.prompt,
    )
    return _with_output(state, new)


def add_prompt(state: ConsoleState, request: str, prompt: str) -> ConsoleState:
    """Keep the prompt of a request beside its output."""
    return _with_output(state, replace(state.outputs.get(request, Output(request)), prompt=prompt))


def _with_output(state: ConsoleState, new: Output) -> ConsoleState:
    """Return the state with `new` as its newest output."""
    others = [output for output in state.outputs.values() if output.request != new.request]
    kept = [*others, new][-MAX_OUTPUTS:]
    return replace(state, outputs=MappingProxyType({output.request: output for output in kept}))


def _kept(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return at most MAX_EVENTS: an end of a request in the older half goes before any other event."""
    while len(events) > MAX_EVENTS:
        older = range(len(events) // 2)
        gone = next((index for index in older if is_routine(events[index])), 0)
        events = events[:gone] + events[gone + 1 :]
    return events


def _on_link(state: ConsoleState, link: LinkState) -> ConsoleState:
    if link.state == "new-epoch":
        return replace(state, link=link, outputs=MappingProxyType({}))
    return replace(state, link=link, role=link.role or state.role)


def _on_snapshot(state: ConsoleState, snapshot: Snapshot, now: float) -> ConsoleState:
    epoch = snapshot.engine.epoch
    link = state.link
    if link.state != "live":  # a snapshot is what live means; recordings and gateways may come without the word
        link = LinkState(state="live", age_s=0.0)
    if epoch == state.epoch:
        return replace(state, link=link, snapshot=snapshot, snapshot_at=now)
    events = state.events
    if state.epoch is not None:
        text = f"{snapshot.engine.name} restarted: requests and events before this line are of another epoch"
        mark = Event(seq=0, wall=snapshot.sampled_at, kind="link.new-epoch", text=text)
        events = _kept((*events, mark))
    return replace(
        state,
        link=link,
        snapshot=snapshot,
        snapshot_at=now,
        epoch=epoch,
        events=events,
        outputs=state.outputs if state.epoch is None else MappingProxyType({}),
    )
