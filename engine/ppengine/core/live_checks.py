"""Live checks: switched in all stages at one step, and their findings kept for the reports.

The stages check streams and numbers; the core starts and ends the reference process behind `shadow`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ppengine.common.config import EngineConfig
from ppengine.core.events import Events
from ppengine.core.health import Health
from ppengine.core.operations import Operation, Operations
from ppengine.core.plans import CommandError, Plan
from ppengine.core.scheduler import Scheduler
from ppengine.core.shadow_check import Shadow
from ppengine.core.stage_records import Stages
from ppengine.protocol.check_messages import LedgerPicture, ShadowAnswer, ShadowReady, StageFindings
from ppengine.protocol.control import Command
from ppengine.protocol.inspection import LedgerDetail
from ppengine.protocol.place import Place
from ppengine.protocol.reports import Finding, StageLedger
from ppengine.protocol.snapshot import ChecksInfo
from ppengine.protocol.steps import Check, Step
from ppengine.protocol.verbs import SetCheck

FLAGS = {"ledger": Check.LEDGER, "strict": Check.STRICT, "finite": Check.FINITE, "checksum": Check.NO_CHECKSUM}
"""Flag of each check; that of `checksum` is set while it is off."""
DEFAULT_SHARE = 0.01
_PLANS = {
    "ledger": "from the next step on every stage declares its hand-offs between streams and threads: tens of "
    "microseconds a step; findings name both call sites",
    "strict": "from the next step on every stage waits for each operation before it goes on: stages overlap less, "
    "tokens stay the same",
    "finite": "from the next step on every stage checks its outputs; at the first value that is not finite it "
    "runs the step's layers once more to name the part",
    "checksum": "from the next step on hidden states carry a checksum, which the next stage compares; the first "
    "difference names the edge and the step",
}
_ON_GPUS = {
    "ledger": "of stages on GPUs it follows the device's streams, events and flags too, for 0.1 to 0.2 ms of the "
    "host per step; a graph is one launch",
    "strict": "stages on GPUs run without graphs meanwhile, which may round otherwise, and wait for each attention and "
    "MLP, each copy and each message",
    "finite": "stages on GPUs run without graphs meanwhile, and look when a step is done",
    "checksum": "devices of stages on GPUs make it, and their hosts compare when a step is done",
    "shadow": "of stages on GPUs it takes what half precision may round for no difference, and computes in float32 "
    "itself, in twice that memory then",
}
"""Differences for stages on GPUs."""
_WITHOUT_GRAPHS = "; stages on GPUs run without graphs meanwhile"
"""End of the text of a switch to a check that looks inside a step."""
_WHEN_BACK = sys.maxsize
"""Placeholder for the step of a switch that `restate` will send."""
_OFF = {
    "strict": "stages work side by side again",
    "shadow": "the reference process ends, and its findings go",
}


class _Reported(NamedTuple):
    """The findings of one check of one stage, and the time of the report."""

    at: float
    findings: list[Finding]
    steps: list[int]


class _Switch(NamedTuple):
    """An accepted switch, and the step with which the stages execute it."""

    step: int
    operation: Operation
    verb: SetCheck


@dataclass(eq=False)
class Checks:
    """Keeps the checks that are on, and their findings."""

    _config: EngineConfig
    _stages: Stages
    _health: Health
    shadow: Shadow
    _operations: Operations
    _event: Events
    _send: Callable[[Step], None]
    _clock: Callable[[], float]
    _flags: int = field(init=False, default=0)
    _step: int = field(init=False, default=0)
    _switching: list[_Switch] = field(init=False, default_factory=list)
    """Switches that not all stages have retired, by rising step."""
    _reported: dict[tuple[Place, int], _Reported] = field(init=False, default_factory=dict)
    """By place and check."""
    _ledgers: dict[Place, tuple[float, StageLedger]] = field(init=False, default_factory=dict)
    """Newest picture of each place, and its time."""
    _difference: tuple[float, Finding] | None = field(init=False, default=None)
    """Time and finding of the first step in which ranks of the last stage sampled different tokens."""

    # --- the verb -------------------------------------------------------------------------------------------

    def plan_set_check(self, verb: SetCheck, command: Command) -> Plan:
        """Plan a switch. Raises ValueError for a share that can never be right, CommandError if it is impossible."""
        on = verb.mode == "on"
        if verb.share is not None and (verb.check != "shadow" or not on):
            raise ValueError(f"check {verb.check} {verb.mode} has no share; only `shadow on` does")
        share = DEFAULT_SHARE if verb.share is None else verb.share
        if not 0.0 < share <= 1.0:
            raise ValueError(f"the share is {share:g}; it must be above 0 and at most 1")
        if on and verb.check == "shadow" and self._health.blocked:
            raise CommandError("BUSY", f"{self._health.text}; the reference needs all stages")
        gpus = self._stages.on_gpus
        if on and gpus and verb.check == "shadow" and self._config.profile.model.load_format == "dummy":
            stages = " ".join(map(str, gpus))
            text = f"the weights are dummies, and stages {stages} on GPUs have drawn others than a CPU would"
            raise CommandError("UNSUPPORTED", text)
        return Plan(
            [self._plan(verb, share)], lambda operation: self._begin(operation, verb, share),
            target=f"{verb.check} {verb.mode}",
        )  # fmt: skip

    def _begin(self, operation: Operation, verb: SetCheck, share: float) -> None:
        on = verb.mode == "on"
        if verb.check == "shadow":
            self.shadow.switch(share if on else 0.0, operation)
            return
        flag = FLAGS[verb.check]
        self._flags = self._flags | flag if on == (verb.check != "checksum") else self._flags & ~flag
        if verb.check == "ledger":
            self._ledgers.clear()
        if self._health.blocked:
            self._operations.defer(operation, "the stages switch when all are back")
            for older in [other for other in self._switching if other.verb.check == verb.check]:
                text = f"{verb.check} {verb.mode} by {operation.command.by}"
                self._operations.end(older.operation, "superseded", text)
                self._switching.remove(older)
            self._switching.append(_Switch(_WHEN_BACK, operation, verb))
            return
        step = self._health.require().scheduler.steps.emit([], checks=self._flags)
        self._send(step)
        self._switching.append(_Switch(step.number, operation, verb))

    def _plan(self, verb: SetCheck, share: float) -> str:
        on = verb.mode == "on"
        known = self.shadow.share if verb.check == "shadow" else float(self._is_on(verb.check))
        if on == bool(known) and (not on or verb.check != "shadow" or known == share):
            return f"{verb.check} is {verb.mode} already"
        if not on:
            return _OFF.get(verb.check, f"the stages stop looking from the next step on, and {verb.check} findings go")
        more = f"; {_ON_GPUS[verb.check]}" if self._stages.on_gpus else ""
        if verb.check != "shadow":
            return _PLANS[verb.check] + more
        weights = sum(ready.weights_bytes for ready in self._stages.ready)
        return (
            f"a reference process loads the checkpoint into host memory ({weights / 2**20:.1f} MiB of weights) and "
            f"repeats {share:.2%} of the steps, for greedy requests; it skips steps that come while it is busy" + more
        )

    def _is_on(self, check: str) -> bool:
        if check == "checksum":
            return not self._flags & Check.NO_CHECKSUM
        return bool(self._flags & FLAGS[check])

    def retired(self, number: int) -> None:
        """Note that every stage has retired step `number`."""
        while self._switching and self._switching[0].step <= number:
            step, operation, verb = self._switching.pop(0)
            self._step = step
            eager = verb.mode == "on" and verb.check in ("strict", "finite") and self._stages.on_gpus
            text = f"in all stages from step {step} on{_WITHOUT_GRAPHS if eager else ''}"
            self._operations.end(operation, "applied", text, step=step)

    @property
    def flags(self) -> int:
        """The checks of the stages that are on, as in `Step.checks`."""
        return self._flags

    def resume(self, flags: int, share: float) -> None:
        """Switch on the checks of the core before this one; stages follow with `restate`."""
        self._flags = flags
        self.shadow.resume(share)

    def restate(self, scheduler: Scheduler) -> None:
        """Switch the checks in stages that have restarted."""
        self._reported.clear()
        self._ledgers.clear()
        self._difference = None
        if self._flags or self._switching:
            step = scheduler.steps.emit([], checks=self._flags)
            self._send(step)
            self._switching = [switch._replace(step=step.number) for switch in self._switching]

    # --- findings -------------------------------------------------------------------------------------------

    def take(self, message: StageFindings | LedgerPicture | ShadowReady | ShadowAnswer) -> None:
        """Keep the findings of a stage or of the reference."""
        if isinstance(message, LedgerPicture):
            ledger = message.ledger
            self._ledgers[Place(ledger.stage, ledger.rank)] = self._clock(), ledger
            return
        if not isinstance(message, StageFindings):
            self.shadow.take(message)
            return
        key = Place(message.stage, message.rank), message.check
        known = self._reported.get(key)
        for finding in message.findings[len(known.findings) if known else 0 :]:
            self._event(f"check.{finding.cause}", finding.summary, stage=finding.stage)
        self._reported[key] = _Reported(self._clock(), message.findings, message.steps)
        if not message.findings:
            del self._reported[key]

    def ranks_differ(self, number: int, ranks: list[int]) -> None:
        """Note that `ranks` of the last stage sampled other tokens than rank 0 in step `number`; the first counts."""
        if self._difference is not None:
            return
        stage = self._stages.places[-1].stage
        named = " and ".join(map(str, ranks))
        finding = Finding(
            stage=stage,
            cause="mismatch",
            summary=f"stage {stage}: rank {named} sampled other tokens than rank 0 in m{number}",
            since_s=0.0,
            evidence=[
                "all ranks sample from the same gathered values: memory of a rank was overwritten, or its weights are",
                "tokens of this step and later ones may be wrong: restart the stage, requests are recomputed",
            ],
        )
        self._difference = self._clock(), finding
        self._event("check.mismatch", finding.summary, stage=stage)

    def findings(self) -> list[Finding]:
        """Return the present findings, oldest first, without those that an earlier stage explains."""
        now, found = self._clock(), list(self.shadow.findings)
        if self._difference is not None:
            at, finding = self._difference
            found.append(msgspec.structs.replace(finding, since_s=now - at))
        ranks = self._config.groups.tensor > 1
        for (place, check), reported in self._reported.items():
            # All ranks of a stage add the same parts: values that are not finite are not of one rank.
            rank = place.rank if ranks and check != Check.FINITE else None
            for finding, step in zip(reported.findings, reported.steps, strict=True):
                if check == Check.FINITE and self._is_consequence(place.stage, step):
                    continue
                since_s = finding.since_s + now - reported.at
                found.append(msgspec.structs.replace(finding, since_s=since_s, rank=rank))
        return sorted(found, key=lambda finding: -finding.since_s)

    def _is_consequence(self, stage: int, step: int) -> bool:
        """Return whether an earlier stage had values that are not finite in this step or before."""
        return any(
            check == Check.FINITE and earlier.stage < stage and min(reported.steps) <= step
            for (earlier, check), reported in self._reported.items()
        )

    def ledger(self, stage: int | None) -> LedgerDetail:
        """Return the newest pictures of the ledger, of one stage or of all."""
        on, now = bool(self._flags & Check.LEDGER), self._clock()
        wanted = [
            msgspec.structs.replace(ledger, age_s=now - at)
            for place, (at, ledger) in sorted(self._ledgers.items())
            if stage in (None, place.stage)
        ]
        return LedgerDetail(on=on, stages=wanted if on else [])

    def info(self) -> ChecksInfo:
        """Return the part of a snapshot about checks."""
        shadow = self.shadow
        return ChecksInfo(
            ledger=self._is_on("ledger"),
            strict=self._is_on("strict"),
            finite=self._is_on("finite"),
            checksum=self._is_on("checksum"),
            shadow=shadow.share,
            step=self._step,
            shadow_state=shadow.state,
            shadow_compared=shadow.compared,
            shadow_skipped=shadow.skipped,
            findings=len(self.findings()),
        )
