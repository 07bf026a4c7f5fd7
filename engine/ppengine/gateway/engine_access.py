"""What the gateway asks of the engine: core and agent over their sockets, the fault desk, pids of processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import msgspec
import zmq

from ppengine.common.config import EngineConfig
from ppengine.gateway.bulk import NO_FAULTS
from ppengine.gateway.collector import Collector
from ppengine.gateway.gateway_sockets import Sockets, send
from ppengine.protocol import frames
from ppengine.protocol.control import Accepted, Command, Fetch, Inspect, Outcome, Refused
from ppengine.protocol.inspection import FaultsDetail
from ppengine.protocol.offline import AbortMany

if TYPE_CHECKING:
    from ppengine.drills.fault_desk import FaultDesk


class Access:
    """Sends and never waits: a question that cannot be asked is answered with why (`EngineAccess` of the desks)."""

    def __init__(
        self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], sockets: Sockets, collector: Collector
    ) -> None:
        self._sockets, self._collector = sockets, collector
        self.faults: FaultDesk | None = None
        """Who breaks things on demand; without `--allow-faults`, nothing of it is so much as imported."""
        if config.allow_faults:
            from ppengine.drills.fault_desk import FaultDesk

            self.faults = FaultDesk(config, context, collector.pid_of)

    def core_missing(self) -> str:
        """Return why the core cannot take a command; empty: it can."""
        return self._collector.core_missing()

    def forward(self, command: Command) -> bool:
        """Send to the core; return whether it was taken."""
        return self._tell_core(command)

    def abort(self, requests: list[str]) -> None:
        """Have the core end requests, whoever asked for them."""
        self._tell_core(AbortMany(session="", requests=requests))

    def ask_core(self, question: Fetch | Inspect) -> str:
        """Send a question; return why that is not possible, empty when it is."""
        missing = self._collector.core_missing()
        return missing or ("" if self._tell_core(question) else "the engine core takes no more questions now")

    def ask_agent(self, question: Inspect) -> str:
        """Send a question; return why that is not possible, empty when it is."""
        if missing := self._collector.agent_missing():
            return missing
        taken = send(self._sockets.agent, [frames.encode(question)])
        return "" if taken else "the agent takes no more questions now"

    def fault(self, command: Command) -> list[Accepted | Outcome | Refused]:
        """Break something on demand, or refuse to."""
        if self.faults is None:
            return [Refused(id=command.id, code="DENIED", text=NO_FAULTS)]
        return self.faults.begin(command)

    def list_faults(self) -> FaultsDetail | None:
        """Return what can be broken on demand; None where nothing can."""
        return None if self.faults is None else self.faults.listing()

    def stage_process(self, stage: int) -> tuple[int, int] | None:
        """Return (pid, start time) of a stage."""
        return self._collector.stage_process(stage)

    def supervisor_pid(self) -> int | None:
        """Return the pid of the supervisor, which is this process's parent; None if that is not so."""
        listed = self._collector.supervisor_pid()
        return listed if listed == os.getppid() else None

    def _tell_core(self, message: msgspec.Struct) -> bool:
        return send(self._sockets.front, [frames.encode(message)])
