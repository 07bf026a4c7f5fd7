"""How the state moves: every function takes a state and returns the next one."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from ppengine.protocol.control import Fetched
from ppengine.protocol.snapshot import Event, Snapshot

from ppconsole.link.source import LinkState, Update
from ppconsole.model.rows import visible_requests
from ppconsole.model.state import (
    MAX_EVENTS,
    MAX_OUTPUT_CHARACTERS,
    MAX_OUTPUTS,
    ConsoleState,
    Output,
    SortKey,
)


def reduce(state: ConsoleState, update: Update, now: float) -> ConsoleState:
    """Return the state after `update` arrived at `now`."""
    if isinstance(update, LinkState):
        return _on_link(state, update)
    if isinstance(update, Snapshot):
        return _on_snapshot(state, update, now)
    return replace(state, events=(*state.events, update)[-MAX_EVENTS:])


def select(state: ConsoleState, request: str | None) -> ConsoleState:
    """Select a request by id; None selects nothing."""
    return replace(state, selected=request)


def move_selection(state: ConsoleState, by: int) -> ConsoleState:
    """Select the request `by` rows below (negative: above) in what is visible; stops at the ends."""
    rows = [request.id for request in visible_requests(state)]
    if not rows:
        return state
    if state.selected not in rows:
        return replace(state, selected=rows[0] if by >= 0 else rows[-1])
    index = rows.index(state.selected) + by
    return replace(state, selected=rows[min(max(index, 0), len(rows) - 1)])


def set_filter(state: ConsoleState, text: str) -> ConsoleState:
    """Show only requests that match `text`; the selection stays, also when it is hidden."""
    return replace(state, filter=text.strip())


def set_sort(state: ConsoleState, key: SortKey) -> ConsoleState:
    """Sort by `key`; the same key again turns the order round. Figures begin with the largest."""
    if state.sort == key:
        return replace(state, descending=not state.descending)
    return replace(state, sort=key, descending=key in ("age", "in", "out", "blocks", "swap"))


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
        fetched.finish_reason,
    )
    others = [output for output in state.outputs.values() if output.request != fetched.request]
    kept = [*others, new][-MAX_OUTPUTS:]
    return replace(state, outputs=MappingProxyType({output.request: output for output in kept}))


def _on_link(state: ConsoleState, link: LinkState) -> ConsoleState:
    if link.state == "new-epoch":
        return replace(state, link=link, selected=None, previous=None, outputs=MappingProxyType({}))
    return replace(state, link=link)


def _on_snapshot(state: ConsoleState, snapshot: Snapshot, now: float) -> ConsoleState:
    epoch = snapshot.engine.epoch
    link = state.link
    if link.state != "live":  # a snapshot is what live means; recordings and gateways may come without the word
        link = LinkState(state="live", age_s=0.0)
    if epoch == state.epoch:
        return replace(state, link=link, snapshot=snapshot, previous=state.snapshot, snapshot_at=now)
    events = state.events
    if state.epoch is not None:
        text = f"{snapshot.engine.name} restarted: requests and events before this line are of another epoch"
        mark = Event(seq=0, wall=snapshot.sampled_at, kind="link.new-epoch", text=text)
        events = (*events, mark)[-MAX_EVENTS:]
    return replace(
        state,
        link=link,
        snapshot=snapshot,
        previous=None,
        snapshot_at=now,
        epoch=epoch,
        epochs=state.epochs + 1,
        events=events,
        selected=state.selected if state.epoch is None else None,
        outputs=state.outputs if state.epoch is None else MappingProxyType({}),
    )
