"""The results of drills on cards: whether place and cause were right, and their tables."""

from __future__ import annotations

from dataclasses import dataclass, field

from drill import names
from ppengine.drills.registry import Kind
from ppengine.protocol.place import Place
from ppengine.protocol.snapshot import Verdict


@dataclass
class Result:
    """One drill. Seconds are from the command that asked for the fault."""

    kind: Kind
    place: Place
    stages: int
    """Stages of the engine."""
    tensor: int = 1
    """Ranks of each stage."""
    named_s: float | None = None
    """First root verdict of the struck place alone; without one, the first root verdict."""
    named: list[Verdict] = field(default_factory=list)
    """Root verdicts once they had settled."""
    false: list[str] = field(default_factory=list)
    """Root verdicts of other places, at any moment."""
    summary: str = ""
    evidence: list[str] = field(default_factory=list)
    target_s: float | None = None
    back: str = ""
    """How the engine came out of it."""
    problem: str = ""

    @property
    def where(self) -> str:
        """The struck place: `1`, with several ranks `1.0`."""
        return f"{self.place.stage}.{self.place.rank}" if self.tensor > 1 else str(self.place.stage)

    def at_place(self, verdict: Verdict) -> bool:
        """Return whether a verdict names the struck stage, and the rank; some causes are of all ranks of a stage."""
        stages, rank = self.kind.stages(self.place.stage, self.stages), self.place.rank
        return names((verdict.stage, verdict.cause), verdict.rank, stages, rank if self.tensor > 1 else None)

    @property
    def right_place(self) -> bool:
        """Whether the stage was named, and the rank, and no other."""
        return bool(self.named) and all(map(self.at_place, self.named))

    @property
    def right_cause(self) -> bool:
        """Whether the place was named with an expected cause."""
        return self.right_place and all(one.cause in self.kind.expects for one in self.named)

    @property
    def late(self) -> bool:
        """Whether it was named later than its target."""
        return self.named_s is not None and self.target_s is not None and self.named_s > self.target_s

    @property
    def right(self) -> str:
        """Whether stage and cause were named, and in time."""
        place, cause = self.right_place, self.right_cause
        return f"{'stage' if place else 'NOT the stage'}, {'cause' if cause else 'NOT the cause'}" + (
            f", LATE: {self.target_s:.1f} s" if self.late else ""
        )


def line(result: Result) -> str:
    """Return one drill in one line."""
    if result.problem:
        return f"SPOILED {result.problem}"
    named = ", ".join(f"{one.cause}@{one.stage}.{one.rank}" for one in result.named) or "nothing"
    false = f" false: {', '.join(result.false)}" if result.false else ""
    seconds = "-" if result.named_s is None else f"{result.named_s:.2f} s"
    return f"{seconds} {result.right} [{named}]{false} {result.summary} | {result.back}"


def totals(results: list[Result]) -> str:
    """Return the counts of each place, a row each."""
    rows = [
        "| place | drills | right place | right cause | in time | false roots | spoiled |",
        "|---|---|---|---|---|---|---|",
    ]
    for where in sorted({one.where for one in results}):
        some = [one for one in results if one.where == where and not one.problem]
        spoiled = sum(one.where == where and bool(one.problem) for one in results)
        counts = (
            sum(one.right_place for one in some), sum(one.right_cause for one in some),
            sum(one.right_place and not one.late for one in some), sum(bool(one.false) for one in some), spoiled,
        )  # fmt: skip
        rows.append(f"| {where} | {len(some)} | {' | '.join(map(str, counts))} |")
    return "\n".join(rows)


def table(results: list[Result]) -> str:
    """Return the drills as Markdown."""
    rows = ["| kind | expected | stage | seconds | named | summary | afterwards |", "|---|---|---|---|---|---|---|"]
    for one in results:
        held = " (held out)" if one.kind.held_out else ""
        seconds = "-" if one.named_s is None else f"{one.named_s:.1f}"
        fields = (
            f"{one.kind.name}{held}", " or ".join(one.kind.expects), one.where, seconds, one.right,
            one.problem or one.summary, one.back,
        )  # fmt: skip
        rows.append(f"| {' | '.join(fields)} |")
    return "\n".join(rows)
