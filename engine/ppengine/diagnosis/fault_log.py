"""Facts of core and supervisor, reduced to the ends of processes and the broken wires that are news.

The order in which facts arrive does not matter, and neither does a repetition: a process is known by its place and
generation, and the other facts are sorted by their times. A sender pushes its facts again to a new gateway.
An end is news until a later process of its place serves: its successor is there within a moment, and an operator must
have time to read the verdict.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from ppengine.diagnosis.evidence import Key, StageEvidence, WireLoss
from ppengine.diagnosis.finding_rules import FRESH_S
from ppengine.protocol.facts import Exited, Fact, GenerationBegan, LinkBroke, Lost, Serving
from ppengine.protocol.place import Place
from ppengine.protocol.reports import Finding

SHOWN_NS = 2_000_000_000
"""Least nanoseconds for which an end is reported, from the first judgement with it: a fork serves in less."""
FACTS_KEPT = 100
"""Most facts about all stages."""
_CoreFact = LinkBroke | GenerationBegan | Serving
NEAR_NS = 500_000_000
"""Nanoseconds by which an end may come before the broken wire that it explains, before a finding of its process, or
before the end of a gateway that had no time to show it.

The core waits as long for an exit status, and ages of findings are those of a report.
"""


class End(msgspec.Struct):
    """The end of one process: its exit status, its last words, or both."""

    generation: int
    exited: Exited | None = None
    lost: Lost | None = None
    findings: tuple[Finding, ...] = ()
    """Findings of live checks in this process shortly before; the core forgets them when all stages have met."""
    shown_ns: int | None = None
    """Time of the first judgement with it."""

    @property
    def pid(self) -> int | None:
        """Pid of the process; None: it is not known."""
        known = self.exited or self.lost
        return None if known is None else known.pid

    @property
    def dead_ns(self) -> int | None:
        """Time of its exit; None: it is not known to have exited."""
        return None if self.exited is None else self.exited.mono_ns

    @property
    def at_ns(self) -> int:
        """Time of the first fact of it."""
        return min(fact.mono_ns for fact in (self.exited, self.lost) if fact is not None)

    def entered(self, base: StageEvidence, now_ns: int, *, replaced: bool) -> StageEvidence:
        """Return `base` with the facts of this end. `replaced`: without an exit of its own it was ended on purpose."""
        if self.lost is not None:
            base = replace(base, lost=self.lost.words, lost_for_s=(now_ns - self.lost.mono_ns) / 1e9)
        if self.exited is not None:
            dead_for_s = max(base.dead_for_s or 0.0, (now_ns - self.exited.mono_ns) / 1e9)
            base = replace(
                base, dead_for_s=dead_for_s, exit_code=self.exited.exit_code, exit_detail=self.exited.detail
            )  # fmt: skip
        elif replaced:
            base = replace(base, dead_for_s=None)
        return replace(base, findings=self.findings)


class FaultLog:
    """The two newest ends of each place, the newest broken wire, and the processes that served last."""

    def __init__(self, since_ns: int = 0) -> None:
        """`since_ns`: an end that was over by then is no news; another gateway has shown it, unless it had ended."""
        self._since_ns = since_ns
        self._gateway_ns = 0
        """End of the gateway before this one; 0: there was none, or it is not known yet."""
        self._ends: dict[Key, list[End]] = {}
        """In the order of their generations."""
        self._facts: list[_CoreFact] = []
        """The newest facts about all stages, in the order of their times."""
        self.served: Serving | None = None
        """The newest fact that the engine serves again after a fault or a restart."""
        self._core: Exited | None = None
        """The newest end of a core, or of the supervisor, with which the core ends."""
        self._core_shown_ns: int | None = None
        """Time of the first judgement with it."""
        self._link: LinkBroke | None = None
        self._began: GenerationBegan | None = None
        """The newest generation that began after `_link`."""
        self._healed: Serving | None = None
        """The first generation that served after `_link`."""

    def take(self, fact: Fact) -> None:
        """Enter a fact."""
        match fact:
            case Exited():
                if fact.place is not None:
                    end = self._end(fact.place, fact.generation)
                    end.exited = min(end.exited or fact, fact, key=lambda one: one.mono_ns)
                elif fact.role == "gateway":
                    self._gateway_ns = max(self._gateway_ns, fact.mono_ns)
                elif fact.role in ("core", "supervisor") and (self._core is None or fact.mono_ns > self._core.mono_ns):
                    self._core, self._core_shown_ns = fact, None
            case Lost():
                end = self._end(fact.place, fact.generation)
                end.lost = min(end.lost or fact, fact, key=lambda one: one.mono_ns)
            case LinkBroke() | GenerationBegan() | Serving():
                if fact not in self._facts:
                    insort(self._facts, fact, key=lambda one: one.mono_ns)
                    del self._facts[:-FACTS_KEPT]
                    self._arrange()

    def end(self, key: Key, now_ns: int) -> End | None:
        """Return the newest end of a place if it is news at `now_ns`: a successor has not served, or too short."""
        ends = self._ends.get(key)
        if not ends:
            return None
        end = ends[-1]
        end.shown_ns = end.shown_ns or now_ns
        if self.served is None or dict(self.served.processes).get(Place(*key), 0) <= end.generation:
            return end
        over = now_ns - end.shown_ns >= SHOWN_NS or self._was_shown(end.at_ns, self.served)
        return None if over else end

    def core_end(self, now_ns: int) -> Exited | None:
        """Return the newest end of a core or a supervisor if it is news at `now_ns`.

        It is until another one serves, and for a moment longer.
        """
        end = self._core
        if end is None:
            return None
        self._core_shown_ns = self._core_shown_ns or now_ns
        if self.served is None or self.served.mono_ns < end.mono_ns:
            return end
        over = now_ns - self._core_shown_ns >= SHOWN_NS or self._was_shown(end.mono_ns, self.served)
        return None if over else end

    def note_findings(self, findings: Iterable[Finding], now_ns: int) -> None:
        """Keep those of the core's findings with the newest end of their stage that are of its process."""
        for (stage, rank), ends in self._ends.items():
            end, from_ns = ends[-1], ends[-1].at_ns - int(FRESH_S * 1e9)
            if len(ends) > 1:
                # The core reports findings of a predecessor until all stages have met.
                from_ns = max(from_ns, ends[-2].at_ns + NEAR_NS)
            mine = tuple(
                finding
                for finding in findings
                if finding.stage == stage
                and finding.rank in (None, rank)
                and from_ns <= now_ns - finding.since_s * 1e9 <= end.at_ns + NEAR_NS
            )
            end.findings = max(end.findings, mine, key=len)

    def losses(self, now_ns: int) -> tuple[WireLoss, ...]:
        """Return the newest broken wire with its ages at `now_ns`, unless the end of a process explains it."""
        link, healed = self._link, self._healed
        if link is None:
            return ()
        for place in (Place(link.stage, link.rank), Place(link.peer, link.peer_rank)):
            if any(end.at_ns >= link.mono_ns - NEAR_NS for end in self._ends.get(place, ())):
                return ()
        loss = WireLoss(
            stage=link.stage, rank=link.rank, peer=link.peer, peer_rank=link.peer_rank, text=link.text,
            closed=link.closed, since_s=(now_ns - link.mono_ns) / 1e9,
            generation=None if self._began is None else self._began.generation,
        )  # fmt: skip
        if healed is None:
            return (loss,)
        since_s = (now_ns - healed.mono_ns) / 1e9
        return (replace(loss, healed_s=since_s, recomputed=healed.recomputed),)

    def _was_shown(self, end_ns: int, served: Serving) -> bool:
        """Return whether an end was over before this gateway began, and another one had the time to show it."""
        return served.mono_ns <= self._since_ns and not 0 < self._gateway_ns - NEAR_NS <= end_ns

    def _arrange(self) -> None:
        """Find the newest broken wire, and the generations that began and served after it."""
        self._link = self._began = self._healed = None
        for fact in self._facts:
            match fact:
                case LinkBroke():
                    self._link, self._began, self._healed = fact, None, None
                case GenerationBegan():
                    self._began = fact
                case Serving():
                    self._healed, self.served = self._healed or fact, fact

    def _end(self, key: Key, generation: int) -> End:
        ends = self._ends.get(key, [])
        if known := [end for end in ends if end.generation == generation]:
            return known[0]
        end = End(generation)
        self._ends[key] = sorted([*ends, end], key=lambda one: one.generation)[-2:]
        return end
