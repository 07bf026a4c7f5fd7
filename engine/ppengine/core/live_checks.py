"""Live checks: switched in all stages at one step, told apart by name, their findings kept for the reports.

The stages look at streams and numbers; the reference behind `shadow` is a process that this one starts and ends.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ppengine.core.operations import Operation
from ppengine.core.plans import CommandError, Plan
from ppengine.core.shadow_check import Shadow
from ppengine.protocol.control import Command
from ppengine.protocol.inspection import LedgerDetail
from ppengine.protocol.reports import Finding, StageLedger
from ppengine.protocol.snapshot import ChecksInfo
from ppengine.protocol.steps import Check, LedgerPicture, ShadowAnswer, ShadowReady, StageFindings
from ppengine.protocol.verbs import SetCheck

if TYPE_CHECKING:
    from ppengine.core.engine import Engine

FLAGS = {"ledger": Check.LEDGER, "strict": Check.STRICT, "finite": Check.FINITE}
DEFAULT_SHARE = 0.01
_PLANS = {
    "ledger": "from the next step on every stage declares its hand-offs between streams and threads: tens of "
    "microseconds a step; findings name both call sites",
    "strict": "from the next step on every stage waits for each operation before it goes on: stages overlap less, "
    "tokens stay the same",
    "finite": "from the next step on every stage looks once over what it hands on; at the first value that is not "
    "finite it runs the step's layers once more to name the part",
}
_ON_GPUS = {
    "ledger": "of stages on GPUs it follows the device's streams, events and words too, in 0.1 to 0.2 ms of the host "
    "a step; a graph is one launch",
    "strict": "stages on GPUs run without graphs meanwhile, which may round otherwise, and wait for each attention and "
    "MLP, each copy and each message",
    "finite": "stages on GPUs run without graphs meanwhile, and look when a step is done",
    "shadow": "of stages on GPUs it takes what half precision may round for no difference, and computes in float32 "
    "itself, in twice that memory then",
}
"""What is different of stages on GPUs."""
_WITHOUT_GRAPHS = "; stages on GPUs run without graphs meanwhile"
"""Said at the end of a switch to what needs a look inside of a step."""
_WHEN_BACK = sys.maxsize
"""In place of the step of a switch that stages have not been told: `restate` will."""
_OFF = {
    "strict": "stages work side by side again",
    "shadow": "the reference process ends, and its findings go",
}


class _Told(NamedTuple):
    """The findings of one check of one stage, and when they came."""

    at: float
    findings: list[Finding]
    steps: list[int]


class _Switch(NamedTuple):
    """A switch that was accepted, and the step with which the stages do it."""

    step: int
    operation: Operation
    verb: SetCheck


class Checks:
    """Which checks are on, and what they have found."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._flags = 0
        self._step = 0
        self._switching: list[_Switch] = []
        """Those that not all stages have retired, by rising step."""
        self._told: dict[tuple[int, int], _Told] = {}
        self._ledgers: dict[int, tuple[float, StageLedger]] = {}
        """What each stage told last, and when."""
        self.shadow = Shadow(engine)

    # --- the verb -------------------------------------------------------------------------------------------

    def plan_set_check(self, verb: SetCheck, command: Command) -> Plan:
        """Plan a switch. Raises ValueError for a share that can never be right, CommandError if it is impossible."""
        engine, on = self._engine, verb.mode == "on"
        if verb.share is not None and (verb.check != "shadow" or not on):
            raise ValueError(f"check {verb.check} {verb.mode} has no share; only `shadow on` does")
        share = DEFAULT_SHARE if verb.share is None else verb.share
        if not 0.0 < share <= 1.0:
            raise ValueError(f"the share is {share:g}; it must be above 0 and at most 1")
        if on and verb.check == "shadow" and engine.recovery.holds:
            text = f"the engine is {engine.state}: {engine.message}; the reference asks all stages what they are"
            raise CommandError("BUSY", text)
        gpus = engine.board.on_gpus
        if on and gpus and verb.check == "shadow" and engine.config.profile.model.load_format == "dummy":
            stages = " ".join(map(str, gpus))
            text = f"the weights are dummies, and stages {stages} on GPUs have drawn others than a CPU would"
            raise CommandError("UNSUPPORTED", text)
        return Plan(
            [self._plan(verb, share)], lambda operation: self._begin(operation, verb, share),
            target=f"{verb.check} {verb.mode}",
        )  # fmt: skip

    def _begin(self, operation: Operation, verb: SetCheck, share: float) -> None:
        engine, on = self._engine, verb.mode == "on"
        if verb.check == "shadow":
            self.shadow.switch(share if on else 0.0, operation)
            return
        flag = FLAGS[verb.check]
        self._flags = self._flags | flag if on else self._flags & ~flag
        if verb.check == "ledger":
            self._ledgers.clear()
        if engine.recovery.holds:
            engine.operations.defer(operation, "the stages are told when all are back")
            for older in [other for other in self._switching if other.verb.check == verb.check]:
                engine.operations.end(
                    older.operation, "superseded", f"{verb.check} {verb.mode} by {operation.command.by}"
                )
                self._switching.remove(older)
            self._switching.append(_Switch(_WHEN_BACK, operation, verb))
            return
        step = engine.scheduler.steps.emit([], checks=self._flags)
        engine.send(step)
        self._switching.append(_Switch(step.number, operation, verb))

    def _plan(self, verb: SetCheck, share: float) -> str:
        on = verb.mode == "on"
        known = self.shadow.share if verb.check == "shadow" else float(bool(self._flags & FLAGS[verb.check]))
        if on == bool(known) and (not on or verb.check != "shadow" or known == share):
            return f"{verb.check} is {verb.mode} already"
        if not on:
            return _OFF.get(verb.check, f"the stages stop looking from the next step on, and {verb.check} findings go")
        more = f"; {_ON_GPUS[verb.check]}" if self._engine.board.on_gpus else ""
        if verb.check != "shadow":
            return _PLANS[verb.check] + more
        weights = sum(ready.weights_bytes for ready in self._engine.board.ready.values())
        return (
            f"a reference process loads the checkpoint into host memory ({weights / 2**20:.1f} MiB of weights) and "
            f"repeats {share:.2%} of the steps, for greedy requests; steps that come while it is busy are left out"
            + more
        )

    def retired(self, number: int) -> None:
        """Note that every stage has retired step `number`."""
        while self._switching and self._switching[0].step <= number:
            step, operation, verb = self._switching.pop(0)
            self._step = step
            eager = verb.mode == "on" and verb.check in ("strict", "finite") and self._engine.board.on_gpus
            text = f"in all stages from step {step} on{_WITHOUT_GRAPHS if eager else ''}"
            self._engine.operations.end(operation, "applied", text, step=step)

    def restate(self) -> None:
        """Tell stages that have begun anew which checks are on."""
        self._told.clear()
        self._ledgers.clear()
        if self._flags or self._switching:
            step = self._engine.scheduler.steps.emit([], checks=self._flags)
            self._engine.send(step)
            self._switching = [switch._replace(step=step.number) for switch in self._switching]

    # --- what they find -------------------------------------------------------------------------------------

    def take(self, message: StageFindings | LedgerPicture | ShadowReady | ShadowAnswer) -> None:
        """Take what a stage or the reference says."""
        if isinstance(message, LedgerPicture):
            self._ledgers[message.ledger.stage] = time.monotonic(), message.ledger
            return
        if not isinstance(message, StageFindings):
            self.shadow.take(message)
            return
        key = message.stage, message.check
        known = self._told.get(key)
        for finding in message.findings[len(known.findings) if known else 0 :]:
            self._engine.event(f"check.{finding.cause}", finding.summary, stage=finding.stage)
        self._told[key] = _Told(time.monotonic(), message.findings, message.steps)
        if not message.findings:
            del self._told[key]

    def findings(self) -> list[Finding]:
        """Return what is known now, oldest first; what an earlier stage explains is left out."""
        now, found = time.monotonic(), list(self.shadow.findings)
        for (stage, check), told in self._told.items():
            for finding, step in zip(told.findings, told.steps, strict=True):
                if check == Check.FINITE and self._is_consequence(stage, step):
                    continue
                found.append(msgspec.structs.replace(finding, since_s=finding.since_s + now - told.at))
        return sorted(found, key=lambda finding: -finding.since_s)

    def _is_consequence(self, stage: int, step: int) -> bool:
        """Return whether an earlier stage has had values that are not finite in this step or before."""
        return any(
            check == Check.FINITE and earlier < stage and min(told.steps) <= step
            for (earlier, check), told in self._told.items()
        )

    def ledger(self, stage: int | None) -> LedgerDetail:
        """Return the newest pictures of the ledger, of one stage or of all."""
        on, now = bool(self._flags & Check.LEDGER), time.monotonic()
        wanted = [
            msgspec.structs.replace(ledger, age_s=now - at)
            for index, (at, ledger) in sorted(self._ledgers.items())
            if stage in (None, index)
        ]
        return LedgerDetail(on=on, stages=wanted if on else [])

    def info(self) -> ChecksInfo:
        """Return what a snapshot says of them."""
        shadow = self.shadow
        return ChecksInfo(
            ledger=bool(self._flags & Check.LEDGER),
            strict=bool(self._flags & Check.STRICT),
            finite=bool(self._flags & Check.FINITE),
            shadow=shadow.share,
            step=self._step,
            shadow_state=shadow.state,
            shadow_compared=shadow.compared,
            shadow_skipped=shadow.skipped,
            findings=len(self.findings()),
        )
