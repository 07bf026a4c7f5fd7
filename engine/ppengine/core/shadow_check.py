"""The core's side of the shadow check: chooses steps, hands requests to the reference, keeps what differs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ppengine.common.child_process import Child, spawn
from ppengine.core.operations import Operation
from ppengine.protocol.frames import encode
from ppengine.protocol.reports import Finding
from ppengine.protocol.steps import ShadowAnswer, ShadowReady, ShadowTask

if TYPE_CHECKING:
    from ppengine.core.engine import Engine
    from ppengine.core.scheduler.request import Request

IDENTITY = b"shadow"
MODULE = "ppengine.shadow"
COMPARED_MOST = 64
"""Newest outputs of a request that one task compares; they cost one pass together."""
FINDINGS_MOST = 16


class Shadow:
    """The reference process and its work. One task at a time: what is due meanwhile is counted and left out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.share = 0.0
        self.state = ""
        self.compared = 0
        self.skipped = 0
        self._child: Child | None = None
        self._operation: Operation | None = None
        self._due = 0.0
        self._nonce = 0
        self._busy = False
        self._found: list[tuple[float, Finding]] = []

    def switch(self, share: float, operation: Operation) -> None:
        """Start the reference (0: end it), or change the share; the operation ends when that is done."""
        engine = self._engine
        if self._operation is not None:
            engine.operations.end(self._operation, "superseded", f"shadow share {share:g} by {operation.command.by}")
            self._operation = None
        self.share = share
        if not share:
            self.stop()
            engine.operations.end(operation, "applied", "the reference has ended")
        elif self.state == "ready":
            engine.operations.end(operation, "applied", self._ready_text())
        else:
            self._operation = operation
            if self._child is None:
                self._start()
            engine.operations.defer(operation, "the reference loads")

    def _start(self) -> None:
        folder = Path(self._engine.config.run_dir)
        args = ["--engine", str(folder / "engine.json")]
        if self._engine.board.on_gpus:
            args.append("--gpus")
        self._child = spawn(MODULE, args, log=folder / "shadow.log")
        self.state = "loading"

    def stop(self) -> None:
        """End the reference and forget what it found."""
        if self._child is not None:
            self._child.kill()
            self._child.wait(1.0)
            self._child.close()
        self._child, self._busy, self.state, self.share = None, False, "", 0.0
        self.compared = self.skipped = 0
        self._found.clear()

    def watch(self) -> None:
        """Note the end of a reference that was not told to end."""
        if self._child is None or self._child.poll() is None:
            return
        why = self._child.info("shadow").detail or "exit code 0"
        self.stop()
        self.state = f"ended: {why}"
        self._engine.event("check.shadow_ended", f"the reference of the shadow check has ended: {why}")
        if self._operation is not None:
            self._engine.operations.end(self._operation, "failed", f"the reference has ended: {why}")
            self._operation = None

    def retired(self, step: int, rows: list[Request]) -> None:
        """Look at a retired step: when one is due, have one of its greedy requests repeated."""
        if self.state != "ready":
            return
        greedy = [request for request in rows if request.sampling.temperature == 0.0 and request.output_ids]
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
        self._engine.send_shadow(encode(task))

    def take(self, message: ShadowReady | ShadowAnswer) -> None:
        """Take what the reference says."""
        if self._child is None:
            return
        if isinstance(message, ShadowReady):
            self.state = "ready"
            if self._operation is not None:
                self._engine.operations.end(self._operation, "applied", self._ready_text())
                self._operation = None
            return
        self._busy = False
        self.compared += message.compared
        finding = message.difference
        if finding is not None and len(self._found) < FINDINGS_MOST and not self._is_known(finding):
            self._found.append((time.monotonic(), finding))
            self._engine.event("check.mismatch", finding.summary)

    def _is_known(self, finding: Finding) -> bool:
        return any(known.summary == finding.summary for _, known in self._found)

    @property
    def findings(self) -> list[Finding]:
        """What differed from the reference, since it was switched on."""
        now = time.monotonic()
        return [msgspec.structs.replace(finding, since_s=now - at) for at, finding in self._found]

    def _ready_text(self) -> str:
        return f"the reference is ready and repeats {self.share:.2%} of the steps"
