"""One verb on many requests: one plan with its sums, one list of conflicts, one operation with one outcome.

Each request is atomic, the whole is not: a request that cannot be changed is a conflict, and the others go on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from ppengine.common.sizes import counted, size_text
from ppengine.core import ownership
from ppengine.core.health import Health
from ppengine.core.live_requests import SLICE
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.request_verbs import Effects, RequestVerbs, reported
from ppengine.core.scheduler import Refused as NotPossible
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.results import Room
from ppengine.protocol.control import Command, Conflict
from ppengine.protocol.verbs import Abort, Many, Preempt, Priority, Release, RequestVerb, SwapIn, SwapOut, label_of

_IDS_SHOWN, _CONFLICTS_SHOWN = 8, 3
_SUMMED = (
    "blocks", "blocks_back", "in_flight", "host_needed", "host_blocks", "computed_tokens", "output_tokens",
    "device_needed",
)  # fmt: skip
"""Figures of one request that are added up; free blocks are not, because all take from the same."""
_TAKING = (Preempt, SwapOut, SwapIn)
"""Verbs that may take room at once."""


@dataclass(eq=False)
class _Run:
    """One operation on many requests, and how far it has come."""

    operation: Operation
    command: Command
    count: int
    left: list[tuple[str, Effects]]
    """Requests whose effect has not happened yet."""
    conflicts: list[Conflict]
    ahead: deque[tuple[RequestVerb, int | None]]
    """Verbs that have not begun, with the revisions that their requests must have."""
    ended: list[str] = field(default_factory=list)
    """Those of the conflicts that were live at the revision of the command, and are not any more."""
    applied: int = 0
    step: int | None = None
    """Newest step at which an effect happened."""


@dataclass(slots=True)
class _Draft:
    """Sums of a plan while it goes through its requests."""

    room: Room
    """Blocks and places that the requests so far leave."""
    states: Counter[str] = field(default_factory=Counter)
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0))
    recomputed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_SUMMED, 0))
    """Sums of the requests that go into no host block."""
    ids: list[str] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    owners: Counter[str] = field(default_factory=Counter)
    """Requests of other keys, by the name of the key."""

    def add(self, figures: Mapping[str, float], *, recomputed: bool) -> None:
        """Add the figures of one sample."""
        for name in _SUMMED:
            amount = int(figures[name])
            self.sums[name] += amount
            if recomputed:
                self.recomputed[name] += amount


@dataclass(eq=False)
class ManyRequests:
    """Plans `Many`, begins its verbs one by one, and ends its operation with the last of their effects."""

    _health: Health
    _verbs: RequestVerbs
    _operations: Operations
    _runs: list[_Run] = field(init=False, default_factory=list)

    def plan(self, many: Many, command: Command) -> Plan:
        """Return the one plan of all. Requests to which the verb does not apply are in its conflicts.

        Only a dry run shows lines and figures, so only for one they are computed: of a thousand requests that is as
        much work as the verbs themselves.
        """
        target = counted(len(many.verbs), "request")
        if not command.dry_run:
            self._health.require()
            return Plan([], lambda operation: self._begin(many, operation, command), target=target)
        actions = self._health.require().scheduler.actions
        draft, moves = _Draft(actions.room()), not isinstance(many.verbs[0], Priority)
        for verb, revision in _pairs(many):
            host = draft.room.host
            try:
                able = self._able(verb, revision, command)
                lack = self._take_room(draft, verb, able) if isinstance(verb, _TAKING) else ""
            except (CommandError, NotPossible) as error:
                draft.conflicts.append(Conflict(request=verb.request, code=error.code, text=error.text))
                continue
            if lack:
                draft.conflicts.append(Conflict(request=verb.request, code="DOES_NOT_FIT", text=lack))
                continue
            draft.ids.append(verb.request)
            draft.states[able[0].state] += 1
            draft.owners.update(ownership.owners(able[:1], command))
            for sample in able if moves else ():
                draft.add(actions.figures(sample), recomputed=draft.room.host == host)
        free = actions.room()
        total: dict[str, float] = {"requests": len(draft.ids), "conflicts": len(draft.conflicts)}
        if moves:
            total |= draft.sums
            total |= {"blocks_free": free.device, "host_free": free.host}
        lines = _lines(many, draft, free, self._health.require().memory.capacity.block_bytes)
        return Plan(
            [*lines, *ownership.lines(draft.owners)], lambda operation: self._begin(many, operation, command),
            target=target, figures=total, conflicts=draft.conflicts, owners=dict(draft.owners),
        )  # fmt: skip

    @property
    def under_way(self) -> bool:
        """Whether verbs are left to begin."""
        return any(run.ahead for run in self._runs)

    def settle(self) -> None:
        """Begin the next slice of verbs; count the effects that have happened, and end the operations that have all."""
        budget = SLICE
        for run in self._runs:
            budget = self._go_on(run, budget)
            self._settle(run)
        self._runs = [run for run in self._runs if run.left or run.ahead]

    def _able(self, verb: RequestVerb, revision: int | None, command: Command) -> list[Request]:
        members = self._verbs.members(verb.request)
        ownership.check(members[0], command)
        if revision is not None:
            self._verbs.check_revision(verb.request, revision)
        return self._verbs.able(verb, members)

    def _take_room(self, draft: _Draft, verb: RequestVerb, able: list[Request]) -> str:
        """Take the room of one request from the draft's; return what it lacks, in words, empty without."""
        actions = self._health.require().scheduler.actions
        needs = [actions.needs(verb, sample.id) for sample in able]
        need = Room(*map(sum, zip(*needs, strict=True)))
        for amount, left, name in zip(need, draft.room, ("host blocks", "device blocks", "places"), strict=True):
            if amount <= left or not amount:
                continue
            if isinstance(verb, Preempt) and verb.mode is None:
                return ""  # Without room it is recomputed, and takes nothing.
            return f"{verb.request} needs {amount} {name}, the others leave {max(left, 0)}"
        draft.room = Room(*(left - amount for amount, left in zip(need, draft.room, strict=True)))
        return ""

    def _begin(self, many: Many, operation: Operation, command: Command) -> None:
        run = _Run(operation, command, len(many.verbs), [], [], deque(_pairs(many)))
        self._go_on(run, SLICE)
        self._settle(run)
        if run.left or run.ahead:
            self._runs.append(run)

    def _go_on(self, run: _Run, budget: int) -> int:
        """Begin at most `budget` verbs; return how many more may begin in this turn."""
        if run.operation.ended is not None:
            run.ahead.clear()  # the engine has failed meanwhile, and the operation with it
        while run.ahead and budget:
            (verb, revision), budget = run.ahead.popleft(), budget - 1
            try:
                # Planned again: an earlier one may have taken the room of this one.
                able = self._able(verb, revision, run.command)
                effects = self._verbs.begin(verb, able, run.command.by)
            except (CommandError, NotPossible) as error:
                run.conflicts.append(Conflict(request=verb.request, code=error.code, text=error.text))
                if error.code == "NOT_FOUND" and revision is not None:
                    run.ended.append(verb.request)
            else:
                run.left.append((verb.request, effects))
        return budget

    def _settle(self, run: _Run) -> None:
        left = []
        for name, effects in run.left:
            effect, _ = reported(effects)
            if effect.state == "pending":
                left.append((name, effects))
                continue
            self._verbs.note(effects)
            if effect.state == "applied":
                run.applied += 1
                run.step = max(effect.step or 0, run.step or 0) or None
            else:
                run.conflicts.append(Conflict(request=name, code="CONFLICT", text=f"{effect.state}: {effect.text}"))
        run.left = left
        if left:
            name, effects = left[0]
            where = self._verbs.where(reported(effects)[1])
            self._operations.defer(run.operation, f"{run.applied} of {run.count} applied; {name} {where}")
        elif run.ahead:
            self._operations.defer(run.operation, f"{run.applied} of {run.count} applied")
        if left or run.ahead:
            return
        self._operations.end(
            run.operation, "applied" if run.applied else "failed", _end_text(run), step=run.step,
            figures={"applied": run.applied, "conflicts": len(run.conflicts)}, conflicts=run.conflicts,
        )  # fmt: skip


def _pairs(many: Many) -> list[tuple[RequestVerb, int | None]]:
    """Return the verbs with the revisions that their requests must have."""
    return list(zip(many.verbs, many.revisions or [None] * len(many.verbs), strict=True))


def _end_text(run: _Run) -> str:
    """Return how many requests were changed, and the first that were not; apart those that had ended by then."""
    gone = set(run.ended)
    others = [each.request for each in run.conflicts if each.request not in gone]
    ended, refused = _some(run.ended, _CONFLICTS_SHOWN), _some(others, _CONFLICTS_SHOWN)
    text = f"{run.applied} of {counted(run.count, 'request')}" + (f"; ended meanwhile: {ended}" if ended else "")
    return text + (f"; not: {refused}" if refused else "")


def _lines(many: Many, draft: _Draft, free: Room, block_bytes: int) -> list[str]:
    """Return the plan in words: count, fate of the requests, sums, first ids. `block_bytes`: of one in all stages."""
    verb, sums, count = many.verbs[0], draft.sums, len(draft.ids)
    lines = [f"{label_of(many)} {count} of {counted(len(many.verbs), 'request')}"]
    if draft.conflicts:
        lines[0] += f"; {len(draft.conflicts)} cannot be done"
    if not count:
        return lines
    states = ", ".join(f"{number} {state}" for state, number in draft.states.most_common())
    if isinstance(verb, Priority):
        return [*lines, f"priority {verb.priority}; smaller first", states, _some(draft.ids, _IDS_SHOWN)]
    lines += [*_fate(verb, draft, free, block_bytes), states]
    if isinstance(verb, SwapIn):
        lines.append(f"takes {sums['device_needed']} device blocks of {free.device} free")
    elif not isinstance(verb, Release):
        # A block that two of them share is in neither's count.
        blocks = sums["blocks_back"]
        lines.append(f"at least {blocks} device blocks ({size_text(blocks * block_bytes)}) come back")
    if sums["in_flight"]:
        lines.append("those in flight follow when their steps have retired")
    return [*lines, _some(draft.ids, _IDS_SHOWN)]


def _fate(verb: RequestVerb, draft: _Draft, free: Room, block_bytes: int) -> list[str]:
    """Return what the requests lose, or where their blocks go."""
    lines, sums = [], draft.sums
    if isinstance(verb, Abort):
        lines.append(f"{sums['computed_tokens']} computed tokens are lost, after {sums['output_tokens']} of output")
    if isinstance(verb, Preempt) and draft.recomputed["computed_tokens"]:
        tokens, size = draft.recomputed["computed_tokens"], size_text(draft.recomputed["blocks"] * block_bytes)
        lines.append(f"mode recompute: {tokens} computed tokens ({size}) are computed again")
    if host := free.host - draft.room.host:
        lines.append(f"mode swap: takes {host} host blocks ({size_text(host * block_bytes)}) of {free.host} free")
    return lines


def _some(ids: list[str], most: int) -> str:
    """Return the first ids, and how many more there are."""
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return " ".join(ids[:most]) + more
