"""The live checks of one stage: which are on, and their findings, for the control thread to report."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import msgspec
from torch import Tensor

from ppengine.protocol.check_messages import LedgerPicture, StageFindings
from ppengine.protocol.reports import Finding
from ppengine.protocol.steps import Check
from ppengine.stage.checksum import Arrival, at_end, changed, checksum, difference, end_at_fault
from ppengine.stage.edge import Edge
from ppengine.stage.generations import Generations
from ppengine.stage.ledger.ledger import Ledger
from ppengine.stage.ledger.picture import picture

AGAIN_S = 1.0
"""Least time between two messages about findings that only come again, and between two pictures of the ledger."""
STUCK_S = 5.0
"""Age at which an operation without another stage counts as stuck."""
SECOND_S = 0.5
"""Time for which a changed message is not reported: until then a second one may show which end changed it."""


class _First(NamedTuple):
    """The first finding of a check."""

    finding: Finding
    step: int
    since_ns: int
    generation: int


class StageChecks:
    """Switched by the step loop, between two steps; read by the control thread."""

    def __init__(self, stage: int, rank: int, generations: Generations) -> None:
        self.ledger = Ledger(stage)
        self.finite = False
        self.checksum = True
        self._corrupted: _First | None = None
        """That of the checksums."""
        self._stage, self._rank, self._generations = stage, rank, generations
        self._lock = threading.Lock()
        self._non_finite: _First | None = None
        self._hold_ns = 0
        kinds = (Check.LEDGER, Check.FINITE, Check.NO_CHECKSUM)
        self._reported = dict.fromkeys(kinds, 0)
        self._reported_at = dict.fromkeys(kinds, 0.0)
        self._count = dict.fromkeys(kinds, 0)
        self._changes = self._corruptions = 0
        self._seeks_end = False
        """Whether a message has changed, and the end of the edge that did so is not known."""
        self._held_until_ns = 0
        self._pictured_at = 0.0

    def apply(self, checks: int) -> None:
        """Make exactly `checks` (see `Check`) on. The findings of a check go when it is switched."""
        self.ledger.switch(bool(checks & Check.LEDGER))
        self.ledger.strict = bool(checks & Check.STRICT)
        finite = bool(checks & Check.FINITE)
        with self._lock:
            if finite != self.finite:
                self._non_finite = None
                self._changes += 1
            self.finite = finite
            on = not checks & Check.NO_CHECKSUM
            if on != self.checksum and self._corrupted is not None:
                self._corrupted, self._seeks_end, self._held_until_ns = None, False, 0
                self._corruptions += 1
            self.checksum = on

    @property
    def compares_checksums(self) -> bool:
        """Whether checksums are on, and all were right in this generation, or the end that changes them is not known.

        All that follows the first wrong one is wrong, too.
        """
        first = self._corrupted is None or self._corrupted.generation != self._generations.current
        return self.checksum and (first or self._seeks_end)

    def compare(self, step: int, edge: Edge, hidden: Tensor) -> None:
        """Compare the hidden states of the newest message with its checksum. The first that differ are a finding.

        Messages that follow are summed at their arrival, too, until another one has shown which end changes them.
        """
        finding = difference(self._stage, edge, step, hidden)
        if finding is None:
            return
        if self._corrupted is None or self._corrupted.generation != self._generations.current:
            self._seeks_end, edge.sum_arrival = True, self._sum_arrival
            self._corrupt(step, finding, hold_s=SECOND_S)
            return
        side = end_at_fault(self._stage, edge)
        if side is None:
            return
        first = self._corrupted
        with self._lock:
            self._seeks_end, self._held_until_ns = False, 0
            self._corrupted = first._replace(finding=at_end(first.finding, self._stage, side))
            self._corruptions += 1

    def _sum_arrival(self, hidden: Tensor) -> int:
        return checksum(hidden) if self._seeks_end else 0

    def compare_sums(self, arrival: Arrival, sent: int, arrived: int) -> None:
        """Compare the checksums that devices made of one message, unless an earlier one explains a difference."""
        if sent != arrived and self.compares_checksums:
            self._corrupt(arrival.step, changed(self._stage, arrival, sent, arrived))

    def _corrupt(self, step: int, finding: Finding, hold_s: float = 0.0) -> None:
        with self._lock:
            self._held_until_ns = time.monotonic_ns() + int(hold_s * 1e9)
            self._corrupted = _First(finding, step, time.monotonic_ns(), self._generations.current)
            self._corruptions += 1

    @property
    def looks_for_non_finite(self) -> bool:
        """Whether the finite check is on and has found nothing yet: everything after the first is its consequence."""
        return self.finite and self._non_finite is None

    @property
    def looks_inside(self) -> bool:
        """Whether a look inside of a step is needed, for which a graph has no room."""
        return self.ledger.strict or self.looks_for_non_finite

    def non_finite(self, step: int, finding: Finding, hold_s: float = 0.0) -> None:
        """Keep the first finding of the finite check, and report it after `hold_s`."""
        with self._lock:
            if self.finite:
                self._non_finite = _First(finding, step, time.monotonic_ns(), self._generations.current)
                self._hold_ns = time.monotonic_ns() + int(hold_s * 1e9)
                self._changes += 1

    def news(self) -> list[StageFindings | LedgerPicture]:
        """Return the changes since the last call; a finding that only recurs is reported once a second."""
        now = time.monotonic()
        news: list[StageFindings | LedgerPicture] = []
        if self.ledger.on:
            self.ledger.check_stuck(STUCK_S)
            if now - self._pictured_at >= AGAIN_S:
                self._pictured_at = now
                shown = picture(self.ledger, stage=self._stage, rank=self._rank)
                news.append(LedgerPicture(generation=self._generations.current, ledger=shown))
        kinds = {
            Check.LEDGER: self.ledger.troubles.changes,
            Check.FINITE: self._changes,
            Check.NO_CHECKSUM: self._corruptions,
        }
        held_until_ns = {Check.FINITE: self._hold_ns, Check.NO_CHECKSUM: self._held_until_ns}
        for check, changes in kinds.items():
            if changes == self._reported[check] or time.monotonic_ns() < held_until_ns.get(check, 0):
                continue
            findings, steps = self._findings(check)
            if len(findings) == self._count[check] and now - self._reported_at[check] < AGAIN_S:
                continue
            self._reported[check], self._reported_at[check], self._count[check] = changes, now, len(findings)
            news.append(
                StageFindings(
                    generation=self._generations.current,
                    stage=self._stage,
                    rank=self._rank,
                    check=check,
                    findings=findings,
                    steps=steps,
                )
            )
        return news

    def _findings(self, check: Check) -> tuple[list[Finding], list[int]]:
        if check is Check.LEDGER:
            findings = self.ledger.findings()
            return findings, [0] * len(findings)
        kept = self._non_finite if check is Check.FINITE else self._corrupted
        if kept is None:
            return [], []
        since_s = (time.monotonic_ns() - kept.since_ns) / 1e9
        return [msgspec.structs.replace(kept.finding, since_s=since_s)], [kept.step]
