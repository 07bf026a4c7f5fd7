"""The gateway's requests to the engine: to core and agent over their sockets, and to the fault desk."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import zmq

from ppengine.common.config import EngineConfig
from ppengine.gateway.agent_desk import AgentDesk
from ppengine.gateway.bulk import NO_FAULTS
from ppengine.gateway.collector import Collector
from ppengine.gateway.gateway_sockets import Sockets, send
from ppengine.protocol import frames
from ppengine.protocol.control import Accepted, Command, Fetch, Inspect, Outcome, Refused
from ppengine.protocol.inspection import FaultsDetail
from ppengine.protocol.kept_files import EngineEnd, write_end
from ppengine.protocol.metrics import RingFigures, StageFigures
from ppengine.protocol.offline import AbortMany
from ppengine.protocol.reports import Recall
from ppengine.protocol.stage_info import StageInfo
from ppengine.protocol.verbs import SetMemory

if TYPE_CHECKING:
    from ppengine.drills.fault_desk import FaultDesk


class EngineLink:
    """Sends and never waits: a request that cannot be sent is answered with the obstacle (see `EngineAccess`)."""

    def __init__(
        self, config: EngineConfig, context: zmq.Context[zmq.Socket[bytes]], sockets: Sockets, collector: Collector
    ) -> None:
        self._config, self._sockets, self._collector = config, sockets, collector
        self._aborts: list[AbortMany] = []
        """Messages that wait for a core."""
        self.agents = AgentDesk(sockets.agent, collector.node, collector.node_of, collector.nodes, collector.clocks)
        self.faults: FaultDesk | None = None
        """The desk for faults on demand; without `--allow-faults` it is not even imported."""
        if config.allow_faults:
            from ppengine.drills.fault_desk import FaultDesk

            self.faults = FaultDesk(config, context, collector.processes.pid_of)

    def core_away(self) -> str:
        """Return how the core ended that is being restarted; empty if none is."""
        return self._collector.processes.core_away

    def core_awaited(self) -> bool:
        """Return whether a core will take questions: one is restarted, or has not reported to this gateway yet."""
        processes = self._collector.processes
        return bool(processes.core_away) or (self._collector.core is None and not processes.core_end())

    def core_missing(self) -> str:
        """Return the reason why the core cannot take a command; empty if it can."""
        return self._collector.core_missing()

    def forward(self, command: Command) -> bool:
        """Send to the core; return whether it was taken. A change of memory goes behind the room that there is."""
        if isinstance(command.verb, SetMemory) and (rooms := self._collector.rooms()).rooms:
            self._send_core(rooms)
        return self._send_core(command)

    def report_stages(self, stages: Sequence[StageInfo]) -> None:
        """Give the core the figures of the stages' rings that an HTTP port exports, if there is a port."""
        if self._config.profile.http.listen is not None and not self.core_away():
            self._send_core(StageFigures(ranks=[_figures(stage) for stage in stages]))

    def abort(self, requests: list[str]) -> None:
        """Have the core abort requests of any session; one that is restarted gets it later."""
        message = AbortMany(session="", requests=requests)
        if self.core_away() or not self._send_core(message):
            self._aborts.append(message)

    def core_back(self) -> None:
        """Send what has waited for a core."""
        aborts, self._aborts = self._aborts, []
        for message in aborts:
            self._send_core(message)

    def recall(self, question: Recall) -> bool:
        """Have the core push again what this gateway lacks; return whether it was sent."""
        return self._send_core(question)

    def ask_core(self, question: Fetch | Inspect) -> tuple[bool, str]:
        """Send a question to the core; return whether it was sent, and why it never will be, empty if it may be.

        A core that is restarted gets it later: `BulkDesk.core_back` asks again.
        """
        if self.core_away():
            return False, ""
        missing = self._collector.core_missing()
        return (False, missing) if missing else (self._send_core(question), "")

    def ask_texts(self, question: Fetch | Inspect) -> tuple[bool, str]:
        """Send a question to the process of texts, which asks the core; see `ask_core`."""
        missing = "" if self.core_away() else self._collector.core_missing()
        return (False, missing) if missing else (not self.texts_away() and self.send_texts(question), "")

    def send_texts(self, message: msgspec.Struct) -> bool:
        """Send to the process of texts; return whether it was taken."""
        return send(self._sockets.texts, [b"texts", frames.encode(message)])

    def texts_away(self) -> str:
        """Return how the process of texts ended that is being restarted; empty if it runs or is not known."""
        return self._collector.processes.texts_away()

    def ask_agent(self, question: Inspect) -> str:
        """Send a question to the agent; return the obstacle, empty without one."""
        on_node = question.stage is not None and self._collector.node_of(question.stage) != self._collector.node
        if not on_node and (missing := self._collector.agent_missing()):
            return missing
        return self.agents.ask(question)

    def fault(self, command: Command) -> list[Accepted | Outcome | Refused]:
        """Begin a fault on demand, or refuse it."""
        if self.faults is None:
            return [Refused(id=command.id, code="DENIED", text=NO_FAULTS)]
        return self.faults.begin(command)

    def list_faults(self) -> FaultsDetail | None:
        """Return the faults on demand; None without the option."""
        return None if self.faults is None else self.faults.listing()

    def stage_processes(self, stage: int) -> dict[str, tuple[int, int]]:
        """Return (pid, start time) of the ranks of a stage, by their names."""
        text = self._config.groups.text
        return {text(place): process for place, process in self._collector.processes.ranks(stage).items()}

    def supervisor_pid(self) -> int | None:
        """Return the pid of the supervisor; None if it is not this process's parent."""
        return self._collector.processes.supervisor_pid()

    def note_stop(self, by: str, reason: str) -> None:
        """Note in the engine's kept files who stops it."""
        why = f": {reason}" if reason else ""
        end = EngineEnd(wall=time.time(), reason=f"stopped by {by}{why}", clean=True, code=0, by=by)
        write_end(self._config.id, end)

    def _send_core(self, message: msgspec.Struct) -> bool:
        return send(self._sockets.front, [frames.encode(message)])


def _figures(stage: StageInfo) -> RingFigures:
    p50, p99 = (None if ms is None else ms / 1e3 for ms in (stage.step_ms.p50, stage.step_ms.p99))
    age_s = None if stage.sample_age_ms is None else stage.sample_age_ms / 1e3
    return RingFigures(
        stage.index, stage.tensor_rank, p50, p99, stage.idle_fraction, stage.rank_wait, stage.inbox, stage.outbox, age_s
    )
