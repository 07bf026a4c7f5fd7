"""Kinds of faults and the table of all of them. A kind is one decorated function with a docstring.

The docstring describes the fault and, after `Verdict:`, the text that an operator should read. `expects` has the right
causes of `protocol.snapshot.Cause`, the best first; it is empty if no alarm is right.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ppengine.common.groups import Groups
from ppengine.protocol.inspection import FaultInfo
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Cause

How = Literal["strike", "arm", "outside"]
"""`strike`: at a point of the step loop; `arm`: once, by a fault thread of stage or core; `outside`: by the gateway."""
Effect = Literal["hang", "death", "slow", "wrong", "grow", "blind", "none"]
"""Effect on the engine. `grow`: it uses up memory or descriptors; `blind`: it works, but is no longer observed;
`none`: it works and is observed."""
On = Literal["stage", "store", "core", "agent", "gateway", "texts"]
"""The struck process. `store`: the one of a stage's place, whose faults are no fault of the stage."""
Where = Literal["any", "last", "not first", "not last"]
Undo = Callable[[], None]
Action = Callable[..., Any]

POINTS = ("step", "receive", "expect", "forward", "reduce", "send", "copy", "map", "ack", "poll")
_MODULES = (
    "hang_faults", "edge_faults", "end_faults", "slow_faults", "memory_faults", "number_faults", "incident_programs",
    "watcher_faults", "store_faults", "device_faults", "core_faults",
)  # fmt: skip
_KINDS: dict[str, Kind] = {}


class FaultError(Exception):
    """The fault cannot be injected here. One line: the reason and the right usage."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault. `before`: the first part, from outside, of kinds that need both sides."""

    name: str
    how: How
    act: Action
    does: str
    verdict: str
    effect: Effect
    expects: tuple[Cause, ...]
    point: str = ""
    clears: bool = False
    lossless: bool = True
    """Whether requests in flight still get the right tokens once the fault is cleared."""
    held_out: bool = False
    """Whether it was first injected after the rules of the diagnosis were written, so that they do not target it."""
    on: On = "stage"
    where: Where = "any"
    pair: bool = False
    """Whether it strikes the edge behind the stage (for the last one, before it): both ends are right."""
    needs: Literal["", "swap", "resize", "restart", "ledger", "finite", "checksum", "lookups"] = ""
    """Operation or live check without which the fault does not show. `lookups`: slow ones, in a backend."""
    before: Callable[[Any], Undo | None] | None = None
    ranks: bool = False
    """Whether it strikes what the ranks of a stage exchange; a stage of one rank has none of that."""
    gpu: bool = False
    """Whether it strikes a part that only a stage on a GPU has."""
    prepare: Callable[[Any], Any] | None = None
    """Called with the parts in the fault thread, ahead of the first strike; what it returns is `Fault.tool`."""

    def stages(self, stage: int, count: int) -> tuple[int, ...]:
        """Return the stages that it strikes, any of which is a right verdict; none if it strikes no stage."""
        if self.on != "stage":
            return ()
        return edge_of(stage, count) if self.pair else (stage,)

    def check(self, stage: int | None, groups: Groups, rank: int = 0) -> None:
        """Raise FaultError unless the kind can strike at rank `rank` of `stage`."""
        count = groups.pipeline
        if not self.placed:
            if stage is not None or rank:
                options = "--stage and --rank" if rank else "--stage"
                raise FaultError(f"{self.name} strikes the {self.on}: leave {options} out")
            return
        if stage is None:
            what = "a stage" if self.on == "stage" else "the store of a stage"
            raise FaultError(f"{self.name} strikes {what}: say which with --stage, 0 to {count - 1}")
        if not 0 <= stage < count:
            raise FaultError(f"no stage {stage}: this engine has 0 to {count - 1}")
        if not self.fits(stage, count):
            raise FaultError(f"{self.name} strikes {self.where_words()}, stage {stage} of {count} is none of these")
        if not 0 <= rank < groups.tensor:
            raise FaultError(f"no rank {rank}: each stage of this engine has {groups.tensor}, from 0")
        if self.ranks and groups.tensor == 1:
            raise FaultError(f"{self.name} strikes {self.where_words()}, and each stage of this engine has one")

    @property
    def placed(self) -> bool:
        """Whether it strikes a process of a place."""
        return self.on in ("stage", "store")

    def process(self, place: Place | None) -> tuple[str, int | None, int]:
        """Return role, stage and rank of the struck process, as its report has them. `place` None: it has none."""
        if place is None:
            return self.on, None, 0
        return (place.store_role, None, 0) if self.on == "store" else ("stage", *place)

    def fits(self, stage: int, count: int) -> bool:
        """Return whether the kind can strike at `stage` of `count`."""
        first, last = stage == 0, stage == count - 1
        allowed = {"any": True, "last": last, "not first": not first, "not last": not last}[self.where]
        return allowed and (count > 1 or not self.pair)

    def where_words(self) -> str:
        """Return the struck place, in words."""
        if not self.placed:
            return f"the {self.on}"
        if self.on == "store":
            return "the store of any stage, with tiers.backends"
        if self.ranks:
            return "a rank of several"
        pair = "an edge, by the stage before it" if self.pair else "any stage on a GPU" if self.gpu else "any stage"
        return {
            "any": pair,
            "last": "the last stage",
            "not first": "a stage after the first",
            "not last": "a stage before the last",
        }[self.where]

    def info(self) -> FaultInfo:
        """Return the row of the kind for consoles."""
        return FaultInfo(
            kind=self.name,
            does=self.does,
            told=self.verdict,
            where=self.where_words(),
            expects=list(self.expects),
            clears=self.clears,
            held_out=self.held_out,
        )


def edge_of(stage: int, count: int) -> tuple[int, int]:
    """Return the two ends of the edge behind `stage`, for the last stage of the edge before it."""
    return (stage, stage + 1) if stage + 1 < count else (stage - 1, stage)


def strike(point: str, effect: Effect, *expects: Cause, **more: Any) -> Callable[[Action], Action]:
    """Register `function(fault, go, *args)`, called in place of `go` at `point` (see `POINTS`)."""
    if point not in POINTS:
        raise ValueError(f"no point {point!r}; points: {', '.join(POINTS)}")
    return _register("strike", effect, expects, point=point, **more)


def arm(effect: Effect, *expects: Cause, **more: Any) -> Callable[[Action], Action]:
    """Register `function(parts)`, called once in the fault thread of stage or core; it returns its undoing, or None."""
    return _register("arm", effect, expects, **more)


def outside(effect: Effect, *expects: Cause, **more: Any) -> Callable[[Action], Action]:
    """Register `function(target)`, called once in the gateway; it returns its undoing, or None."""
    return _register("outside", effect, expects, **more)


def _register(how: How, effect: Effect, expects: tuple[Cause, ...], **more: Any) -> Callable[[Action], Action]:
    unknown = [cause for cause in expects if cause not in get_args(Cause)]
    if unknown:
        raise ValueError(f"no cause {unknown[0]!r}; see protocol.snapshot.Cause")

    def register(function: Action) -> Action:
        name = function.__name__.replace("_", "-")
        does, separator, verdict = inspect.cleandoc(function.__doc__ or "").partition("\n\nVerdict: ")
        if not separator:
            raise ValueError(f"the docstring of fault {name} must have an effect and, after 'Verdict: ', a verdict")
        does, verdict = " ".join(does.split()), " ".join(verdict.split())
        _KINDS[name] = Kind(
            name=name, how=how, act=function, effect=effect, expects=expects, does=does, verdict=verdict, **more
        )
        return function

    return register


def kinds() -> dict[str, Kind]:
    """Return all kinds by name."""
    for module in _MODULES:
        importlib.import_module(f"ppengine.drills.{module}")
    return _KINDS


def find(name: str) -> Kind:
    """Return the kind of that name. Raises FaultError with the nearest ones."""
    import difflib

    known = kinds()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}?" if near else "ppconsole fault --list names all"
    raise FaultError(f"no fault {name[:64]!r}; {hint}")
