"""The supervisor of one engine: starts its processes, watches them, and ends with none of them left."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from ppengine.common.child_process import Child, is_unclean, spawn, tail
from ppengine.common.config import EngineConfig
from ppengine.common.http_address import parse_http, takes_connections
from ppengine.protocol import discovery, kept_files
from ppengine.protocol.kept_files import EngineEnd
from ppengine.protocol.offline import StateAnswer
from ppengine.protocol.place import Place
from ppengine.protocol.reports import ProcessInfo, StartStage
from ppengine.supervisor import process_deaths
from ppengine.supervisor.announcements import tell
from ppengine.supervisor.claims import ClaimError, claim
from ppengine.supervisor.launch.launcher import Executor, ExecutorError
from ppengine.supervisor.messaging import Link
from ppengine.supervisor.presence import Presence
from ppengine.supervisor.restart_plan import RestartPlan
from ppengine.supervisor.service_manager import ServiceManager
from ppengine.supervisor.wakeup import Wakeup

TURN_S = 0.05
REPORT_S = 1.0
GATEWAY_START_S = 30.0
HTTP_START_S = 30.0
"""Seconds that an engine waits for its HTTP processes before it says that it serves."""
GRACE_S = 2.0
"""Seconds for core and stages to leave in order, and for HTTP processes and stores; after that they are killed."""
SERVED = ("serving", "paused", "draining", "resizing")
VITAL = ("core", "ray")
"""Processes without which an engine cannot go on; a core that ended uncleanly is restarted."""
TIMED_OUT, FITS_NOT = 5, 8


class Modules(NamedTuple):
    """Entry points of the processes that are one of each."""

    gateway: str = "ppengine.gateway"
    core: str = "ppengine.core"
    agent: str = "ppengine.agent"
    http: str = "ppengine.http"
    store: str = "ppengine.store"
    texts: str = "ppengine.texts"


class End(NamedTuple):
    """End of an engine: exit code, one line, and the process whose log has more."""

    code: int
    reason: str
    log: Path | None = None


class Supervisor:
    """Owns the processes of one boot. `run` is everything. `within_s`: seconds that it gets until it serves.

    `follows`: the supervisor that was killed and whose engine this one resumes.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        wakeup: Wakeup,
        modules: Modules | None = None,
        within_s: float | None = None,
        follows: ProcessInfo | None = None,
    ) -> None:
        self._config = config
        self._helpers = {
            **dict.fromkeys(config.text_roles, (modules or Modules()).texts),
            **dict.fromkeys(config.http_roles, (modules or Modules()).http),
            **dict.fromkeys(config.store_roles, (modules or Modules()).store),
        }
        """Modules of HTTP processes, stores and the process of texts, by role: without them an engine goes on."""
        self._executor = executor
        self._wakeup = wakeup
        self._modules = modules or Modules()
        self._within_s = within_s
        self._follows = follows
        self._folder = Path(config.run_dir)
        self._children: dict[str, Child] = {}
        self._restarts = RestartPlan()
        self._link: Link | None = None
        self._known: list[ProcessInfo] = []
        self._reported_at = 0.0
        self._presence = Presence(config)
        self._served = False
        self._serves_at: float | None = None
        """Time at which the core first served, if there is a port; None: it has not."""
        self._degraded = False
        self._end: End | None = None
        self._started_at = time.monotonic()
        self._manager = ServiceManager.adopt()

    def run(self) -> End:
        """Boot the engine, watch it to its end, and clean up. Returns how it ended."""
        try:
            try:
                self._boot()
            except (ClaimError, ExecutorError, OSError) as error:
                self._end = End(1, str(error))
            while self._end is None:
                self._turn()
        finally:
            end = self._end or End(1, "the supervisor failed")
            self._manager.stopping(end.reason)
            note = EngineEnd(wall=time.time(), reason=end.reason, clean=end.code == 0, code=end.code)
            kept_files.write_end(self._config.id, note)
            try:
                # A stage that loads hears nothing, and one of a failed engine may wait for a peer that is gone.
                self._shut_down(GRACE_S if end.code == 0 and self._served else GRACE_S / 4)
                _last_lines(end)
            finally:
                discovery.remove_engine(self._config.id)
                self._manager.close()
        return end

    def _boot(self) -> None:
        if self._follows is None:
            claim(self._config)
        self._presence.keep_record()
        self._link = Link(self._config)
        # Where stages may be on other nodes, each store waits for its stage.
        late = () if self._config.cluster is None else self._config.store_roles
        for role in ("gateway", "core", "agent", *(role for role in self._helpers if role not in late)):
            self._spawn(role)
        if self._follows is None:
            self._executor.start(self._config)
        else:
            self._manager.resume()
            self._link.note_end(self._follows)
            self._executor.resume(self._config)

    def _spawn(self, role: str) -> None:
        args = ["--engine", str(self._folder / "engine.json")]
        if role in self._helpers:
            module, args = self._helpers[role], [*args, "--role", role]
        else:
            module = getattr(self._modules, role)
        child = spawn(module, args, log=self._folder / f"{role}.log")
        if role in self._children:
            self._children[role].close()
        self._children[role] = child

    def _turn(self) -> None:
        """Sleep until something happens, then see what it was."""
        assert self._link is not None, "the link is made before the first turn"
        self._manager.alive()
        self._wakeup.wait(TURN_S, self._link.front)
        if self._wakeup.asked:
            self._end = End(0, self._wakeup.asked)
            return
        answer, orders = self._link.read()
        self._follow(self._link, answer)
        for order in orders:
            self._restart_stage(self._link, order)
        for info in self._observe():
            self._judge(info)
        self._follow_stages()
        self._start_due(self._link)
        if self._end is not None:
            return
        if not self._presence.publish() and time.monotonic() - self._started_at > GATEWAY_START_S:
            reason = f"the gateway opened no sockets in {GATEWAY_START_S:g} s"
            self._end = End(1, reason, self._folder / "gateway.log")
            return
        self._presence.keep_folders()
        limit = self._within_s
        if limit is not None and not self._served and time.monotonic() - self._started_at > limit:
            self._end = End(TIMED_OUT, f"it does not serve within {limit:g} s")

    def _restart_stage(self, link: Link, order: StartStage) -> None:
        """Replace the process of one stage; report its end first if it ended by itself."""
        for info in self._observe():
            self._judge(info)
        if self._end is not None:
            return
        named = [
            msgspec.structs.replace(info, replaced=info.exit_code is None)
            if (info.role, info.stage, info.rank) == ("stage", *order.place)
            else info
            for info in self._known
        ]
        link.report(named)
        tell(f"{self._config.name} ({self._config.id}): {self._config.groups.text(order.place)} is restarted")
        self._executor.restart(order.place, order.generation)

    def _follow(self, link: Link, answer: StateAnswer | None) -> None:
        """Follow the engine's state until it has served once: from then on, losing a stage does not end it."""
        if answer is not None and answer.state in SERVED and not self._served and not self._http_begins():
            self._served = True
            listen = self._config.profile.http.listen
            where = "" if listen is None else f", {parse_http(listen).base_url}"
            tell(f"{self._config.name} ({self._config.id}): serving{where}")
            self._manager.ready(f"serving {self._config.name} ({self._config.id})")
        elif answer is not None and answer.code == "DOES_NOT_FIT":
            self._end = End(FITS_NOT, answer.message)
        elif answer is not None and answer.state == "degraded" and self._boots:
            # A stage that failed while loading is about to end, and says better than the core what was wrong.
            self._degraded = True
        if not self._served and not self._degraded:
            link.ask_state()

    def _http_begins(self) -> bool:
        """Return whether the engine serves and its port not yet: clients connect once they read that it serves."""
        listen = self._config.profile.http.listen
        if listen is None:
            return False
        if self._serves_at is None:
            self._serves_at = time.monotonic()
        late = time.monotonic() - self._serves_at > HTTP_START_S
        return not late and not takes_connections(parse_http(listen))

    def _observe(self) -> list[ProcessInfo]:
        """Look at every process, report what changed (and all of it each second), return what has newly ended."""
        me = ProcessInfo(role="supervisor", stage=None, rank=None, pid=os.getpid())
        infos = [me, *(child.info(role) for role, child in self._children.items()), *self._executor.poll()]
        before = {_identity(info) for info in self._known if info.exit_code is not None}
        ended = [info for info in infos if info.exit_code is not None and _identity(info) not in before]
        if self._link is not None and self._end is None:
            # Once the engine ends, processes end because this one ends them.
            for info in ended:
                if not info.replaced:
                    self._link.note_end(info)
        now = time.monotonic()
        if self._link is not None and (infos != self._known or now - self._reported_at >= REPORT_S):
            self._link.report(infos)
            self._reported_at = now
        self._known = infos
        return ended

    def _judge(self, info: ProcessInfo) -> None:
        """Decide what the end of one process means; the first one that ends the engine gives the reason."""
        if self._end is not None:
            return
        code = FITS_NOT if info.exit_code == FITS_NOT else 1
        who = self._who(info)
        complete = code == FITS_NOT or info.detail.startswith(who)
        text = info.detail if complete else f"{who} ended: {info.detail or 'exit code 0'}"
        log = self._folder / (f"{info.role}.log" if info.stage is None else Place(info.stage, info.rank or 0).log_name)
        if info.role == "core" and info.exit_code == 0:
            self._end = End(0, "stopped by command")
        elif self._can_restart(info):
            self._end = self._lose(info.role, text, log)
        elif info.role in (*VITAL, "gateway") or (self._boots and info.exit_code != 0 and self._boots_with(info.role)):
            self._end = End(code, text, log)
        elif info.role in self._helpers:
            if not info.node:
                # Otherwise its node restarts it. Its requests or jobs end with it; the engine goes on.
                self._restarts.helper_ended(info.role)
            tell(f"{self._config.name} ({self._config.id}): {text}; it is restarted")
        else:
            again = info.role == "agent" and self._restarts.agent_ended()
            tell(f"{self._config.name} ({self._config.id}): {text}{'; it is restarted' if again else ''}")

    def _boots_with(self, role: str) -> bool:
        """Return whether an engine that loads ends with a process of this role."""
        return role == "stage" or role in (*self._config.http_roles, *self._config.text_roles)

    def _follow_stages(self) -> None:
        """Plan the start of stores whose stages have been placed on this host."""
        for info in self._known:
            if info.role == "stage" and info.pid and not info.node and info.exit_code is None:
                role = Place(info.stage or 0, info.rank or 0).store_role
                if role in self._helpers and role not in self._children:
                    self._restarts.first_start(role)

    def _can_restart(self, info: ProcessInfo) -> bool:
        """Return whether another gateway or core can go on where this one ended."""
        if info.role == "core":
            return not self._boots and is_unclean(info.exit_code)
        return info.role == "gateway" and self._presence.published

    @property
    def _boots(self) -> bool:
        """Whether the engine has never served, so that the loss of any part ends it."""
        return not self._served and self._follows is None

    def _lose(self, role: str, text: str, log: Path) -> End | None:
        """Plan the restart of gateway or core; return the end of the engine if there is none."""
        if not self._restarts.vital_ended(role):
            minutes = process_deaths.WITHIN_S / 60
            return End(1, f"{text}, and it is the end number {process_deaths.MOST} in {minutes:g} minutes", log)
        tell(f"{self._config.name} ({self._config.id}): {text}; it is restarted")
        return None

    def _start_due(self, link: Link) -> None:
        """Start the processes whose time has come: a gateway gets again the facts that it cannot know."""
        if self._end is not None:
            return
        for role in self._restarts.take_due():
            try:
                self._spawn(role)
            except OSError as error:
                tell(
                    f"{self._config.name} ({self._config.id}): the {role} cannot be started: {error}; it is tried again"
                )
                self._restarts.try_again(role)
                continue
            if role == "gateway":
                link.repeat_facts()

    def _shut_down(self, grace: float) -> None:
        """End every process: core and stages in order if possible, then the others, the gateway last."""
        core = self._children.get("core")
        if core is not None and core.poll() is None:
            core.terminate()
            self._leave_in(grace, ("core", "stage"))
        elif self._end is not None and self._end.code == 0:
            # The core has told the stages to leave, and left.
            self._leave_in(grace, ("stage",))
        if core is not None:
            core.kill()
        self._executor.stop(0.0)
        for roles, within_s in ((list(self._helpers), GRACE_S), (["agent"], GRACE_S / 2), (["gateway"], GRACE_S / 2)):
            if present := [role for role in roles if role in self._children]:
                self._observe()
                for role in present:
                    self._children[role].terminate()
                self._leave_in(within_s, tuple(present))
        for child in self._children.values():
            child.kill()
            child.wait(1.0)
            child.close()
        if self._link is not None:
            self._link.close()

    def _who(self, info: ProcessInfo) -> str:
        return info.role if info.stage is None else self._config.groups.text(Place(info.stage, info.rank or 0))

    def _leave_in(self, timeout: float, roles: tuple[str, ...]) -> None:
        """Watch until all processes of `roles` have ended, for up to `timeout` seconds; name those that have not."""
        deadline = time.monotonic() + timeout
        while True:
            self._observe()
            left = [self._who(info) for info in self._known if info.role in roles and info.exit_code is None]
            if not left:
                return
            if time.monotonic() >= deadline:
                tell(f"{self._config.name} ({self._config.id}): killed after {timeout:g} s: {', '.join(left)}")
                return
            self._wakeup.wait(0.02, None)


def _identity(info: ProcessInfo) -> tuple[str, int | None, int | None, int, int]:
    """Return the key of a process; one that was never started has no pid."""
    return info.role, info.stage, info.rank, info.generation, info.pid


def _last_lines(end: End) -> None:
    """Print the end of the failed process's log, unless its error is one line already."""
    if end.log is not None and end.code != FITS_NOT:
        lines = tail(end.log, 20)
        if not any(line.startswith("error:") for line in lines):
            for line in lines:
                tell(f"{end.log.stem}| {line}")
