"""The nodes of an engine, as the driver sees them: an actor on each, and how long ago it answered.

Ray takes seconds to notice that a node is lost. So the driver keeps one question open to every node. While one gives
no answer, it calls the port of Ray's process there: the kernel of a live host answers a call however busy it is.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ppengine.common.child_process import open_log
from ppengine.common.cluster import read_node_keys
from ppengine.common.config import EngineConfig
from ppengine.protocol.reports import NODE_LOST, UNKNOWN_STATUS
from ppengine.supervisor.launch.node_stores import StoreNews
from ppengine.supervisor.launch.ray_node import LEASE_S, LOOK_S, NodeActor
from ppengine.supervisor.launch.ray_session import cause_of_death, flat, load_ray

SILENT_S = LOOK_S + 0.45
"""Seconds without an answer after which the port of a node is called."""
CALLS, CALL_S, CALL_GAP_S = 3, 0.6, 0.1
"""Calls of a port, seconds for each and between two: one lost packet makes no lost node."""
LEASE_MARGIN_S = 1.0
"""Seconds that the end of a lease may be late, or its look under way."""
MOST_ACTORS, CREATE_S = 5, 0.5
"""Actors on a node at most, and seconds until the next one, as many times as there were some."""
LIST_S = 0.2
"""Seconds between two questions to Ray about its nodes."""
STOP_S = 2.0


@dataclass(eq=False)
class Node:
    """A node of the cluster. `port` is that of Ray's process there."""

    id: str
    name: str
    address: str
    port: int
    here: bool
    actor: Any = None
    actors: int = 0
    """Actors so far on this node."""
    create_at: float = 0.0
    """Time at which another actor is created; 0: none is wanted."""
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of each log that have come."""
    call: Any = None
    """The open call to its actor, an ObjectRef: first its start, then one look after the other."""
    asked: float = 0.0
    started: bool = False
    called: threading.Event | None = None
    """Set when the calls of its port have ended; None: none was made."""
    reached: bool = False
    """Whether one of those calls was answered."""
    lost: str = ""
    """Why it counts as lost; empty: it does not."""
    left: bool = False
    """Whether its actor was asked to end all that it has, because the node was lost and is back."""
    gone: set[int] = field(default_factory=set)
    """Pids of stages that have ended."""
    looks: int = 0
    """Answers so far."""
    roles: set[str] = field(default_factory=set)
    """Stores that it must have."""
    stores: dict[str, int] = field(default_factory=dict)
    """Pids of stores that run, by role."""
    news: list[StoreNews] = field(default_factory=list)
    """Starts and ends of stores that the driver has not taken."""

    @property
    def loss(self) -> str:
        """How it was lost, in one line."""
        return f"node {self.name} ({self.address}) {self.lost}"

    def note(self, news: StoreNews) -> None:
        """Note the start or the end of a store."""
        role, pid, code, _ = news
        if code is None:
            self.stores[role] = pid
        else:
            self.stores.pop(role, None)
        self.news.append(news)

    def end_stores(self, code: int, detail: str) -> None:
        """Note the end of all stores that run."""
        for role, pid in list(self.stores.items()):
            self.note((role, pid, code, detail))


class Nodes:
    """All nodes on which stages are. Used from the driver's main thread alone."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._known: dict[str, Node] = {}
        self._alive: set[str] = set()
        self._listed_at = -LIST_S
        self._keys = b"" if config.cluster is None else msgspec.json.encode(read_node_keys(Path(config.run_dir)))

    def get(self, node_id: str) -> Node:
        """Return the node with this id; begin to watch another one than the engine's own."""
        if node_id not in self._known:
            self._known[node_id] = node = self.describe(node_id)
            if not node.here and not node.lost:
                self._create_actor(node)
        return self._known[node_id]

    def config_of(self, node: Node) -> bytes:
        """Return the configuration for processes of a node."""
        if node.here:
            return msgspec.json.encode(self._config)
        return msgspec.json.encode(msgspec.structs.replace(self._config, node=node.name, address=node.address))

    @property
    def calls(self) -> list[Any]:
        """The open calls to nodes that are not lost: that of a lost one stays answered, and would end each wait."""
        return [node.call for node in self._known.values() if node.call is not None and not node.lost]

    def turn(self, answered: list[Any], stages: Callable[[Node], list[tuple[int, int]]]) -> list[Node]:
        """Take answers and ask again; return the nodes that are lost since the last call.

        `stages` returns pid and start time of the stages of a node.
        """
        now = time.monotonic()
        lost: list[Node] = []
        for node in self._known.values():
            if node.here or node.lost:
                continue
            if node.call is not None and node.call in answered:
                self._take(node)
            if node.create_at and now >= node.create_at:
                self._create_actor(node)
            if node.call is None and not node.lost and not node.create_at:
                node.call, node.asked = node.actor.look.remote(stages(node), sorted(node.roles)), now
            elif node.started and now - node.asked > SILENT_S:
                self._suspect(node)
            if node.lost:
                lost.append(node)
                node.end_stores(NODE_LOST, node.loss)
        return lost

    def place_store(self, role: str, node: Node) -> None:
        """Have a store run on a node, and on no other one. That of the engine's host is the supervisor's."""
        for one in self._known.values():
            one.roles.discard(role)
        if not node.here:
            node.roles.add(role)

    def take_news(self) -> list[tuple[Node, StoreNews]]:
        """Return starts and ends of stores since the last call, in order on each node."""
        found = [(node, news) for node in self._known.values() for news in node.news]
        for node in self._known.values():
            node.news.clear()
        return found

    def is_over(self, node: Node) -> bool:
        """Return whether a lost node's lease is over and Ray has taken its bundles away."""
        if time.monotonic() < node.asked + LEASE_S + LEASE_MARGIN_S:
            return False
        if self._is_back(node):
            if self._known.get(node.id) is node:
                del self._known[node.id]
            return True
        return not self._lists(node.id)

    def kill(self, node: Node, pid: int, start: int) -> None:
        """Have a stage of a node killed; does not wait."""
        if not node.lost:
            node.actor.kill.remote(pid, start)

    def stop(self) -> None:
        """End what this engine has on all nodes that answer."""
        ray = load_ray()
        ends = [node.actor.stop.remote() for node in self._known.values() if node.actor is not None and not node.lost]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=STOP_S)
        for node in self._known.values():
            if node.actor is not None:
                ray.kill(node.actor)

    def _is_back(self, node: Node) -> bool:
        """Return whether a lost node lives for Ray, and its actor has ended or cleared it: it can be used again."""
        ray = load_ray()
        if not self._lists(node.id):
            return False
        if node.call is None:
            return True
        if not ray.wait([node.call], timeout=0)[0]:
            return False
        try:
            ray.get(node.call)
        except ray.exceptions.RayError:
            return True
        if not node.left:
            # A look that was under way has come back late: the actor lives, and must clear the node.
            node.call, node.left = node.actor.leave.remote(), True
            return False
        return True

    def _lists(self, node_id: str) -> bool:
        """Return whether Ray counts a node as alive; it is asked five times a second at most."""
        now = time.monotonic()
        if now >= self._listed_at + LIST_S:
            self._listed_at = now
            self._alive = {str(one["NodeID"]) for one in load_ray().nodes() if one["Alive"]}
        return node_id in self._alive

    def describe(self, node_id: str) -> Node:
        """Return a node by its id; one that Ray has given up is lost."""
        ray = load_ray()
        here = str(ray.get_runtime_context().get_node_id())
        listed = {str(one["NodeID"]): one for one in ray.nodes()}
        known = {name: one for name, one in listed.items() if one["Alive"]}
        if node_id not in known:
            one = listed.get(node_id, {})
            name, address = (str(one.get(key, "unknown")) for key in ("NodeManagerHostname", "NodeManagerAddress"))
            return Node(node_id, _plain(name), address, 0, here=False, lost="has been given up by Ray")
        one = known[node_id]
        names = [_plain(each["NodeManagerHostname"]) for each in known.values()]
        name, address = _plain(one["NodeManagerHostname"]), str(one["NodeManagerAddress"])
        # Two nodes of one host name, or on one host, differ by address or id.
        if names.count(name) > 1 or (name == socket.gethostname() and node_id != here):
            addresses = [each["NodeManagerAddress"] for each in known.values()]
            name = f"{name}-{_plain(address) if addresses.count(address) == 1 else node_id[:8]}"
        return Node(node_id, name, address, int(one["NodeManagerPort"]), node_id == here)

    def _create_actor(self, node: Node) -> None:
        ray = load_ray()
        place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node.id, soft=False)
        if node.actor is not None:
            ray.kill(node.actor)
        node.actor = ray.remote(NodeActor).options(num_cpus=0, max_restarts=0, scheduling_strategy=place).remote()
        node.call = node.actor.start.remote(self.config_of(node), self._keys, dict(node.sent))
        node.asked, node.started, node.create_at = time.monotonic(), False, 0.0
        node.actors += 1

    def _take(self, node: Node) -> None:
        """Take the answer of a node's actor."""
        ray = load_ray()
        call, node.call, node.called = node.call, None, None
        try:
            answer = ray.get(call)
        except ray.exceptions.RayError as error:
            # The actor has ended: the node may go on, and another actor finds its folder.
            if not reachable(node.address, node.port):
                node.lost = f"has no process of Ray at port {node.port}"
            elif not self._lists(node.id):
                node.lost = "has been given up by Ray"
            elif node.actors >= MOST_ACTORS:
                node.lost = f"lets no actor of the engine run: {cause_of_death(flat(error))}"
            else:
                node.create_at = time.monotonic() + CREATE_S * node.actors
            return
        node.looks += 1
        if not node.started:
            node.started = True
            # Those of the actor before this one; it has killed them.
            node.end_stores(UNKNOWN_STATUS, "the engine's actor on its node has ended")
            return
        gone, logs, news = answer
        for role, pid, code, detail in news:
            if role in self._config.store_roles:
                node.note((str(role), int(pid), code, str(detail)))
        node.gone.update(gone)
        for name, lines in logs.items():
            self._append(node, str(name), bytes(lines))

    def _append(self, node: Node, name: str, lines: bytes) -> None:
        """Add lines of a log to the file of that name here; those of the agent have the node in it."""
        if not re.fullmatch(r"((stage|store)\d+(\.\d+)?|agent)\.log", name):
            return
        path = Path(self._config.run_dir) / (f"agent-{node.name}.log" if name == "agent.log" else name)
        node.sent[name] = node.sent.get(name, 0) + len(lines)
        with contextlib.suppress(OSError):
            descriptor = open_log(path)
            try:
                os.write(descriptor, lines)
            finally:
                os.close(descriptor)

    def _suspect(self, node: Node) -> None:
        """Call the port of a silent node, in threads; it is lost if none of the calls was answered."""
        if node.called is None:
            node.called = done = threading.Event()
            answers: list[bool] = []

            def call() -> None:
                with ThreadPoolExecutor(CALLS) as pool:
                    answers.extend(pool.map(lambda turn: _called(node, turn), range(CALLS)))
                node.reached = any(answers)
                done.set()

            threading.Thread(target=call, name=f"call {node.name}", daemon=True).start()
        elif node.called.is_set():
            if node.reached:
                node.called = None  # It lives, and Ray says what has become of its actor.
            else:
                node.lost = f"gives no answer, nor does its port {node.port}"


def _called(node: Node, turn: int) -> bool:
    time.sleep(turn * CALL_GAP_S)
    return reachable(node.address, node.port)


def reachable(address: str, port: int) -> bool:
    """Return whether a process listens at the port of a live host."""
    try:
        with socket.create_connection((address, port), timeout=CALL_S):
            return True
    except OSError:
        return False


def _plain(text: object) -> str:
    return re.sub(r"[^A-Za-z0-9.-]", "-", str(text))
