"""The core's side of the shadow check: chooses steps, sends requests to the reference, keeps differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ppengine.common.child_process import Child, spawn
from ppengine.core.events import Events
from ppengine.core.operations import Operation, Operations
from ppengine.core.scheduler.request import Request
from ppengine.core.stage_records import Stages
from ppengine.protocol.check_messages import ShadowAnswer, ShadowReady, ShadowTask
from ppengine.protocol.frames import encode
from ppengine.protocol.reports import Finding

IDENTITY = b"shadow"
MODULE = "ppengine.shadow"
COMPARED_MOST = 64
"""Most outputs of a request in one task, the newest ones; they cost one pass together."""
FINDINGS_MOST = 16


@dataclass(eq=False)
class Shadow:
    """The reference process and its work, one task at a time; steps due meanwhile are counted and skipped."""

    _run_dir: Path
    _stages: Stages
    _operations: Operations
    _event: Events
    _send: Callable[[bytes], None]
    _clock: Callable[[], float]
    share: float = field(init=False, default=0.0)
    state: str = field(init=False, default="")
    compared: int = field(init=False, default=0)
    skipped: int = field(init=False, default=0)
    _child: Child | None = field(init=False, default=None)
    _operation: Operation | None = field(init=False, default=None)
    _due: float = field(init=False, default=0.0)
    _nonce: int = field(init=False, default=0)
    _busy: bool = field(init=False, default=False)
    _found: list[tuple[float, Finding]] = field(init=False, default_factory=list)

    def switch(self, share: float, operation: Operation) -> None:
        """Start the reference, end it (share 0) or change its share; the operation ends with that."""
        if self._operation is not None:
            self._operations.end(self._operation, "superseded", f"shadow share {share:g} by {operation.command.by}")
            self._operation = None
        self.share = share
        if not share:
            self.stop()
            self._operations.end(operation, "applied", "the reference has ended")
        elif self.state == "ready":
            self._operations.end(operation, "applied", self._ready_text())
        else:
            self._operation = operation
            if self._child is not None or self._start():
                self._operations.defer(operation, "the reference loads")

    def resume(self, share: float) -> None:
        """Start the reference again, which ended with the core before this one."""
        if share:
            self.share = share
            self._start()

    def _start(self) -> bool:
        """Start the reference; return whether it is there."""
        folder = self._run_dir
        args = ["--engine", str(folder / "engine.json")]
        if self._stages.on_gpus:
            args.append("--gpus")
        try:
            self._child = spawn(MODULE, args, log=folder / "shadow.log")
        except OSError as error:  # No process or descriptor is left, or no room for its log.
            self._give_up(f"cannot be started: {error}")
            return False
        self.state = "loading"
        return True

    def stop(self) -> None:
        """End the reference and drop its findings."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(1.0)
            self._child.close()
        self._child, self._busy, self.state, self.share = None, False, "", 0.0
        self.compared = self.skipped = 0
        self._found.clear()

    def watch(self) -> None:
        """Note that the reference has ended by itself."""
        if self._child is None or self._child.poll() is None:
            return
        self._give_up(f"has ended: {self._child.info('shadow').detail or 'exit code 0'}")

    def _give_up(self, what: str) -> None:
        """Switch the check off: there is no reference. `what` goes on behind its name."""
        self.stop()
        self.state = what.removeprefix("has ")
        self._event("check.shadow_ended", f"the reference of the shadow check {what}")
        if self._operation is not None:
            self._operations.end(self._operation, "failed", f"the reference {what}")
            self._operation = None

    def retired(self, step: int, rows: list[Request]) -> None:
        """Send one greedy request of a retired step to the reference, if a step is due."""
        if self.state != "ready":
            return
        # The reference compares tokens of the model's own logits.
        greedy = [request for request in rows if _is_plain(request) and request.output_ids]
        if not greedy:
            return
        self._due += self.share
        if self._due < 1.0:
            return
        self._due -= 1.0
        if self._busy:
            self.skipped += 1
            return
        self._nonce += 1
        self._busy = True
        request = greedy[self._nonce % len(greedy)]
        outputs = list(request.output_ids)
        task = ShadowTask(
            nonce=self._nonce,
            step=step,
            request=request.id,
            prompt_ids=list(request.prompt_ids),
            output_ids=outputs,
            first=max(0, len(outputs) - COMPARED_MOST),
            min_tokens=request.sampling.min_tokens,
            stop_token_ids=sorted(request.stops),
        )
        self._send(encode(task))

    def take(self, message: ShadowReady | ShadowAnswer) -> None:
        """Keep the answer of the reference."""
        if self._child is None:
            return
        if isinstance(message, ShadowReady):
            self.state, self._busy = "ready", False  # a task that went before has reached no process
            if self._operation is not None:
                self._operations.end(self._operation, "applied", self._ready_text())
                self._operation = None
            return
        self._busy = False
        self.compared += message.compared
        finding = message.difference
        if finding is not None and len(self._found) < FINDINGS_MOST and not self._is_known(finding):
            self._found.append((self._clock(), finding))
            self._event("check.mismatch", finding.summary)

    def _is_known(self, finding: Finding) -> bool:
        return any(known.summary == finding.summary for _, known in self._found)

    @property
    def findings(self) -> list[Finding]:
        """Differences from the reference since the check was switched on."""
        now = self._clock()
        return [msgspec.structs.replace(finding, since_s=now - at) for at, finding in self._found]

    def _ready_text(self) -> str:
        return f"the reference is ready and repeats {self.share:.2%} of the steps"


def _is_plain(request: Request) -> bool:
    """Return whether the tokens of a request are the best ones of the model's own logits."""
    return request.sampling.greedy and not request.sampling.adjusts and not request.constrained
