"""What a kind of fault is, and the table of all kinds. A kind is one decorated function with a docstring.

The docstring says what the fault does and, after `Told:`, what an operator should read. `expects` has the causes of
`protocol.snapshot.Cause` that are right, the best first; empty where nothing is to be said at all.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ppengine.protocol.inspection import FaultInfo
from ppengine.protocol.snapshot import Cause

How = Literal["strike", "arm", "outside"]
"""`strike`: at a point of the step loop; `arm`: once, by the stage's fault thread; `outside`: by the gateway."""
Effect = Literal["hang", "death", "slow", "wrong", "blind", "none"]
"""What becomes of the engine. `blind`: it works, but is no longer seen. `none`: it works and is seen."""
On = Literal["stage", "core", "agent", "gateway"]
Where = Literal["any", "last", "not first", "not last"]
Undo = Callable[[], None]
Action = Callable[..., Any]

POINTS = ("step", "receive", "expect", "forward", "send", "copy", "map", "ack", "poll")
_MODULES = (
    "hang_faults", "edge_faults", "end_faults", "slow_faults", "number_faults", "incident_faults", "watcher_faults",
    "device_faults",
)  # fmt: skip
_KINDS: dict[str, Kind] = {}


class FaultError(Exception):
    """The fault cannot be injected here. One line: why, and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of fault. `before`: done from outside first, for kinds that need both sides."""

    name: str
    how: How
    act: Action
    does: str
    told: str
    effect: Effect
    expects: tuple[Cause, ...]
    point: str = ""
    clears: bool = False
    lossless: bool = True
    """Once it is cleared, requests in flight come to the right tokens; else to some tokens."""
    held_out: bool = False
    """Not injected before the rules of the diagnosis were written: they were not shaped to it."""
    on: On = "stage"
    where: Where = "any"
    pair: bool = False
    """It strikes the edge behind the stage (at the last one, the edge before it): both ends are right."""
    needs: Literal["", "swap", "resize", "restart", "ledger", "finite"] = ""
    """What must be asked of the engine for the fault to show: an act, or a live check that is on."""
    before: Callable[[Any], Undo] | None = None
    gpu: bool = False
    """It strikes what only a stage on a GPU has."""
    prepare: Callable[[Any], Any] | None = None
    """Called with the parts in the fault thread, ahead of the first strike; what it returns is `Fault.tool`."""

    def stages(self, stage: int, count: int) -> tuple[int, ...]:
        """Return the stages that it strikes, and any of which is rightly named; none where it strikes no stage."""
        if self.on != "stage":
            return ()
        return edge_of(stage, count) if self.pair else (stage,)

    def check(self, stage: int | None, count: int) -> None:
        """Raise FaultError unless the kind can strike at `stage` of `count`."""
        if self.on != "stage":
            if stage is not None:
                raise FaultError(f"{self.name} strikes the {self.on}: leave --stage out")
            return
        if stage is None:
            raise FaultError(f"{self.name} strikes a stage: say which with --stage, 0 to {count - 1}")
        if not 0 <= stage < count:
            raise FaultError(f"no stage {stage}: this engine has 0 to {count - 1}")
        if not self.fits(stage, count):
            raise FaultError(f"{self.name} strikes {self.where_words()}, stage {stage} of {count} is none of these")

    def fits(self, stage: int, count: int) -> bool:
        """Whether the kind can strike at `stage` of `count`."""
        first, last = stage == 0, stage == count - 1
        allowed = {"any": True, "last": last, "not first": not first, "not last": not last}[self.where]
        return allowed and (count > 1 or not self.pair)

    def where_words(self) -> str:
        """Return where it strikes, in words."""
        if self.on != "stage":
            return f"the {self.on}"
        pair = "an edge, by the stage before it" if self.pair else "any stage on a GPU" if self.gpu else "any stage"
        return {
            "any": pair,
            "last": "the last stage",
            "not first": "a stage after the first",
            "not last": "a stage before the last",
        }[self.where]

    def info(self) -> FaultInfo:
        """Return what a console shows of it."""
        return FaultInfo(
            kind=self.name,
            does=self.does,
            told=self.told,
            where=self.where_words(),
            expects=list(self.expects),
            clears=self.clears,
            held_out=self.held_out,
        )


def edge_of(stage: int, count: int) -> tuple[int, int]:
    """Return the two ends of the edge behind `stage`, of the one before it where it is the last."""
    return (stage, stage + 1) if stage + 1 < count else (stage - 1, stage)


def strike(point: str, effect: Effect, *expects: Cause, **more: Any) -> Callable[[Action], Action]:
    """Register `function(fault, go, *args)`, called in place of `go` at `point` (see `POINTS`)."""
    if point not in POINTS:
        raise ValueError(f"no point {point!r}; points: {', '.join(POINTS)}")
    return _register("strike", effect, expects, point=point, **more)


def arm(effect: Effect, *expects: Cause, **more: Any) -> Callable[[Action], Action]:
    """Register `function(parts)`, called once in the stage's fault thread; it returns its undoing, or None."""
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
        does, separator, told = inspect.cleandoc(function.__doc__ or "").partition("\n\nTold: ")
        if not separator:
            raise ValueError(f"the docstring of fault {name} must say what is done, and after 'Told: ' what is told")
        does, told = " ".join(does.split()), " ".join(told.split())
        _KINDS[name] = Kind(
            name=name, how=how, act=function, effect=effect, expects=expects, does=does, told=told, **more
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
