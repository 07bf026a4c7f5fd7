"""Nodes of an engine: the lease of one that is cut off, its news, the driver's view of it, and verdicts on it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from diagnosis_world import healthy, pipeline_held_at, stuck, with_stage
from engines import wait_until
from ppengine.common.cluster import NodeKeys
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.curve import make_keypair
from ppengine.common.profile_sections import ModelConfig
from ppengine.common.tier_config import BackendConfig, TierConfig
from ppengine.diagnosis import diagnose
from ppengine.protocol.discovery import process_start
from ppengine.protocol.place import Place
from ppengine.protocol.reports import NODE_LOST, UNKNOWN_STATUS, ProcessInfo
from ppengine.supervisor import claims
from ppengine.supervisor.launch import ray_node, ray_nodes
from ppengine.supervisor.launch.ray_launcher import RayExecutor
from ppengine.supervisor.launch.ray_node import NodeActor
from ppengine.supervisor.launch.ray_nodes import Node, Nodes, reachable

KEYS = msgspec.json.encode(NodeKeys("ab" * 32, make_keypair()))
LEASED = """
import sys, time
from ppengine.supervisor.launch import ray_node
ray_node.LEASE_S = 0.5
actor = ray_node.NodeActor()
actor._watch_agent = lambda: None
actor.start(sys.argv[1].encode(), sys.argv[2].encode(), {})
print(actor._config.run_dir, flush=True)
sys.stdin.readline()
for _ in range(4):
    actor.look([], [])
print("looked", flush=True)
time.sleep(60)
"""


def config(node: str = "b") -> EngineConfig:
    return EngineConfig(
        id="abcdef", name="x", epoch="e", profile=Profile(name="x", model=ModelConfig(path="/m")), model_path="/m",
        model_type="llama", layers=[(0, 1)], max_model_len=8, run_dir="/elsewhere", ring_dir="/elsewhere",
        started_wall=0.0, node=node,
    )  # fmt: skip


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("ppengine.protocol.discovery.ring_dir", lambda name: tmp_path / f"ppconsole-0-{name}")
    return tmp_path


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


def noted(folder: Path, stage: int, process: subprocess.Popen[bytes]) -> None:
    (folder / f"stage{stage}.pid").write_text(f"{process.pid} {process_start(process.pid)}\n")


def test_a_node_without_looks_kills_its_stages(runtime: Path) -> None:
    arguments = [msgspec.json.encode(config()).decode(), KEYS.decode()]
    with (
        subprocess.Popen(
            [sys.executable, "-c", LEASED, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime)},
        ) as actor,
        sleeper() as stage, sleeper() as other,
    ):  # fmt: skip
        assert actor.stdin is not None and actor.stdout is not None
        folder = Path(actor.stdout.readline().strip())
        noted(folder, 0, stage)
        (folder / "stage1.pid").write_text(f"{other.pid} 1\n")  # Another process has that pid now.
        os.kill(stage.pid, signal.SIGSTOP)
        actor.stdin.write("\n")
        actor.stdin.flush()
        assert actor.stdout.readline() == "looked\n", "four looks take longer than the lease, which they renew"
        assert stage.poll() is None
        assert stage.wait(10) == -signal.SIGKILL
        assert actor.wait(10) == 1
        assert not folder.exists()
        assert other.poll() is None
        other.kill()


def test_the_next_actor_ends_a_stopped_agent_of_the_one_before(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It outlives its lifeline, and once it goes on it would report the same stages beside the next one."""
    agents = [sleeper(), sleeper()]
    waiting = iter(agents)
    monkeypatch.setattr(ray_node, "spawn", lambda *words, **more: next(waiting))
    monkeypatch.setattr(NodeActor, "_guard", lambda self: None)
    try:
        for _ in agents:
            NodeActor().start(msgspec.json.encode(config()), KEYS, {})
            os.kill(agents[0].pid, signal.SIGSTOP)
        assert agents[0].wait(30) == -signal.SIGKILL and agents[1].poll() is None
    finally:
        for one in agents:
            one.kill()
            one.wait()


def test_a_look_brings_ends_and_lines(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeActor, "_watch_agent", lambda self: None)
    monkeypatch.setattr(NodeActor, "_guard", lambda self: None)
    actor = NodeActor()
    actor.start(msgspec.json.encode(config()), KEYS, {})
    folder, rings = claims.node_folders("abcdef", "b")
    assert folder.stat().st_mode & 0o777 == rings.stat().st_mode & 0o777 == 0o700
    with sleeper() as stage:
        known = [(stage.pid, process_start(stage.pid) or 0)]
        assert actor.look(known, []) == ([], {}, [])
        (folder / "stage0.log").write_text("one\n")
        assert actor.look(known, []) == ([], {"stage0.log": b"one\n"}, [])
        with (folder / "stage0.log").open("a") as log:
            log.write("two\n")
        assert actor.look(known, []) == ([], {"stage0.log": b"two\n"}, [])
        actor.kill(stage.pid, 1)
        assert stage.poll() is None, "another process has that pid now"
        actor.kill(*known[0])
        wait_until(lambda: actor.look(known, []) == ([stage.pid], {}, []), "the stage is gone")
    actor.stop()
    assert not folder.exists() and not rings.exists()


def test_folders_of_ended_nodes_are_swept_and_those_of_living_ones_stay(runtime: Path) -> None:
    mine = ray_node.local_config(config())
    claims.make_node(mine)
    dead, busy = Path(mine.run_dir).with_name("123456@c"), Path(mine.run_dir).with_name("654321@c")
    for folder in (dead, busy):
        folder.mkdir(mode=0o700)
        (folder / ".owner").write_text("1 1\n")
    claims.note_stage(busy, Place(0, 0))
    stranger = dead.with_name("notes@home")
    stranger.mkdir()
    claims.make_node(ray_node.local_config(config("d")))
    assert Path(mine.run_dir).is_dir() and not dead.exists() and stranger.is_dir()
    assert busy.is_dir(), "a stage of it runs, until another actor takes it over"


def test_a_folder_that_another_user_could_reach_is_no_folder_of_a_node(runtime: Path) -> None:
    mine = ray_node.local_config(config())
    elsewhere = runtime / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    Path(mine.ring_dir).symlink_to(elsewhere)
    with pytest.raises(OSError, match="and no link"):
        claims.make_node(mine)
    Path(mine.ring_dir).unlink()
    Path(mine.ring_dir).mkdir(mode=0o755)
    with pytest.raises(OSError, match="mode 0700"):
        claims.make_node(mine)


class Calls:
    """The driver's Ray: calls that are answered when the test says so."""

    def __init__(self) -> None:
        self.alive = ["n1"]
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.hired: list[dict[str, int]] = []
        self.looks: list[object] = []
        self.stores: list[str] = []
        """Roles that the newest look has named."""
        self.answers: dict[object, Any] = {}
        self.leaves: list[object] = []
        leave = SimpleNamespace(remote=lambda: self.leaves.append(call := object()) or call)
        self.actor = SimpleNamespace(look=SimpleNamespace(remote=self._look), leave=leave)

    def _look(self, stages: list[tuple[int, int]], stores: list[str]) -> object:
        self.stores = stores
        self.looks.append(call := object())
        return call

    def get(self, call: object) -> Any:
        answer = self.answers[call]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, waited: list[object], timeout: float) -> tuple[list[object], list[object]]:
        return [call for call in waited if call in self.answers], []

    def nodes(self) -> list[dict[str, object]]:
        return [{"NodeID": name, "Alive": True} for name in self.alive]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr(ray_nodes, "load_ray", lambda: calls)
    monkeypatch.setattr(ray_nodes, "SILENT_S", 0.05)
    monkeypatch.setattr(ray_nodes, "CALL_S", 0.2)
    return calls


def watched(calls: Calls, tmp_path: Path, port: int) -> tuple[Nodes, Node]:
    nodes = Nodes(msgspec.structs.replace(config(""), run_dir=str(tmp_path)))
    node = Node("n1", "b", "127.0.0.1", port, here=False, actor=calls.actor, started=True)
    nodes._known["n1"] = node
    return nodes, node


def turns(nodes: Nodes, until: Callable[[list[Node]], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not until(nodes.turn([], lambda _: [])):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_a_silent_node_whose_port_answers_is_not_lost(calls: Calls, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nodes, node = watched(calls, tmp_path, server.getsockname()[1])
        until = time.monotonic() + 1.5
        turns(nodes, lambda lost: bool(lost) or time.monotonic() > until)
    assert node.lost == "" and node.reached


def test_a_silent_node_without_a_port_is_lost_once(calls: Calls, tmp_path: Path) -> None:
    nodes, node = watched(calls, tmp_path, port := free_port())
    found: list[Node] = []
    turns(nodes, lambda lost: bool(found.extend(lost) or found))
    assert found == [node] and node.lost == f"gives no answer, nor does its port {port}"
    assert nodes.turn([], lambda _: []) == []
    calls.answers[node.call] = RuntimeError("the node has died")
    assert nodes.calls == [], "its answered call would have the driver's loop spin"


def test_a_lost_node_is_over_when_its_lease_is_and_ray_knows(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "LIST_S", 0.0)
    nodes, node = watched(calls, tmp_path, free_port())
    node.asked, node.lost = time.monotonic(), "gives no answer"
    calls.alive = []
    assert not nodes.is_over(node), "the lease is not over"
    node.asked -= ray_node.LEASE_S + ray_nodes.LEASE_MARGIN_S
    assert nodes.is_over(node)
    calls.alive = ["n1"]
    node.call = object()
    assert not nodes.is_over(node), "Ray would place the stage there again, beside the old actor"
    calls.answers[node.call] = ([], {}, [])
    assert not nodes.is_over(node), "a late look: the actor lives, and is to clear the node"
    assert calls.leaves == [node.call]
    assert not nodes.is_over(node), "it has not done so yet"
    calls.answers[node.call] = RuntimeError("the actor has ended")
    assert nodes.is_over(node), "it is back, and its lease has ended what ran there"
    assert nodes.is_over(node), "so it is for each of its stages"
    assert "n1" not in nodes._known, "it is described and hired again"


def test_lines_of_a_node_join_the_logs_of_the_engine(calls: Calls, tmp_path: Path) -> None:
    nodes, node = watched(calls, tmp_path, 1)
    nodes.turn([], lambda _: [])
    (call,) = calls.looks
    lines = {
        "stage1.log": b"loaded\n", "store1.log": b"open\n", "agent.log": b"started\n", "../escape.log": b"no",
        "engine.json": b"no",
    }  # fmt: skip
    calls.answers[call] = ([7], lines, [])
    nodes.turn([call], lambda _: [])
    assert (tmp_path / "stage1.log").read_text() == "loaded\n"
    assert (tmp_path / "agent-b.log").read_text() == "started\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent-b.log", "stage1.log", "store1.log"]
    assert node.gone == {7} and len(calls.looks) == 2, "it is asked again at once"


@pytest.fixture
def stored(calls: Calls, tmp_path: Path) -> tuple[Nodes, Node]:
    """A node whose engine has a backend, with the store of its one place."""
    nodes, node = watched(calls, tmp_path, free_port())
    tiers = TierConfig(host=True, backends={"m": BackendConfig(kind="memory")})
    profile = msgspec.structs.replace(nodes._config.profile, tiers=tiers)
    nodes._config = msgspec.structs.replace(nodes._config, profile=profile)
    nodes.place_store("store0", node)
    return nodes, node


def say(nodes: Nodes, node: Node, calls: Calls, *news: object) -> list[tuple[Node, Any]]:
    """Answer the open look with news of stores; return what the driver hears."""
    nodes.turn([], lambda _: [])
    calls.answers[node.call] = ([], {}, list(news))
    nodes.turn([node.call], lambda _: [])
    return nodes.take_news()


def test_starts_and_ends_of_stores_come_in_order_and_once(calls: Calls, stored: tuple[Nodes, Node]) -> None:
    nodes, node = stored
    first, end, second = ("store0", 7, None, ""), ("store0", 7, -9, "killed by SIGKILL"), ("store0", 8, None, "")
    assert say(nodes, node, calls, first, end, second) == [(node, first), (node, end), (node, second)]
    assert calls.stores == ["store0"]
    assert node.stores == {"store0": 8} and nodes.take_news() == []
    assert say(nodes, node, calls, ("store9", 1, None, ""), ("core", 1, 0, "")) == [], "this engine has none of them"


def test_the_stores_of_a_lost_node_end_with_it(calls: Calls, stored: tuple[Nodes, Node]) -> None:
    nodes, node = stored
    say(nodes, node, calls, ("store0", 7, None, ""))
    calls.answers[node.call] = RuntimeError("the actor is unavailable")
    assert nodes.turn([node.call], lambda _: []) == [node]
    text = f"node b (127.0.0.1) has no process of Ray at port {node.port}"
    assert nodes.take_news() == [(node, ("store0", 7, NODE_LOST, text))]
    nodes.turn([], lambda _: [])
    assert nodes.take_news() == []


def test_the_stores_of_an_actor_have_ended_when_another_one_has_started(
    calls: Calls, stored: tuple[Nodes, Node]
) -> None:
    nodes, node = stored
    say(nodes, node, calls, ("store0", 7, None, ""))
    node.started, node.call = False, (start := object())
    assert nodes.take_news() == [], "the next actor may still have to kill it"
    calls.answers[start] = None
    nodes.turn([start], lambda _: [])
    end = ("store0", 7, UNKNOWN_STATUS, "the engine's actor on its node has ended")
    assert nodes.take_news() == [(node, end)]


def test_a_store_goes_with_its_stage_to_another_node(calls: Calls, stored: tuple[Nodes, Node]) -> None:
    nodes, node = stored
    other = nodes._known["n2"] = Node("n2", "c", "127.0.0.2", 1, here=False)
    nodes.place_store("store0", other)
    assert (node.roles, other.roles) == (set(), {"store0"})
    nodes.place_store("store0", Node("n0", "a", "127.0.0.1", 1, here=True))
    assert (node.roles, other.roles) == (set(), set()), "the supervisor starts that one"


def test_the_supervisor_sees_each_end_of_a_store_though_another_one_has_started() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    executor = RayExecutor()
    driver = ProcessInfo(role="ray", stage=None, rank=None, pid=1)
    executor._words, executor._driver = ours, SimpleNamespace(info=lambda role: driver)  # type: ignore[assignment]
    with ours, theirs:
        said = [
            ProcessInfo(role=role, stage=None, rank=None, pid=pid, exit_code=code, node="b")
            for role, pid, code in (("store0", 7, None), ("store0", 7, -9), ("store1", 8, None), ("store0", 9, None))
        ]
        for info in said:
            theirs.send(msgspec.json.encode(info))
        seen = [executor.poll()[1:] for _ in range(4)]
    assert seen == [[said[0], said[2]], [said[1], said[2]], [said[3], said[2]], [said[3], said[2]]]


def test_an_actor_that_ended_on_a_node_without_ray_means_a_lost_node(calls: Calls, tmp_path: Path) -> None:
    nodes, node = watched(calls, tmp_path, port := free_port())
    nodes.turn([], lambda _: [])
    calls.answers[calls.looks[0]] = RuntimeError("the actor is unavailable")
    assert nodes.turn(calls.looks, lambda _: []) == [node]
    assert node.lost == f"has no process of Ray at port {port}"


def test_a_node_that_ends_each_actor_is_given_up_and_each_one_knows_the_lines_that_have_come(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_nodes, "CREATE_S", 0.001)
    monkeypatch.setattr(ray_nodes, "SILENT_S", 60.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nodes, node = watched(calls, tmp_path, server.getsockname()[1])

        def create(node: Node) -> None:
            calls.hired.append(dict(node.sent))
            node.actors, node.create_at, node.started = node.actors + 1, 0.0, True

        monkeypatch.setattr(nodes, "_create_actor", create)
        nodes.turn([], lambda _: [])
        calls.answers[calls.looks[-1]] = ([], {"stage1.log": b"one\n"}, [])
        nodes.turn(calls.looks, lambda _: [])
        lost: list[Node] = []
        deadline = time.monotonic() + 10
        while not lost:
            assert time.monotonic() < deadline
            calls.answers.update((call, RuntimeError("no space left")) for call in calls.looks[1:])
            lost = nodes.turn([node.call], lambda _: [])
            time.sleep(0.002)
    assert calls.hired == [{"stage1.log": 4}] * ray_nodes.MOST_ACTORS
    assert node.lost == "lets no actor of the engine run: Ray: no space left"


def test_a_node_that_ray_has_given_up_meanwhile_is_lost(calls: Calls, tmp_path: Path) -> None:
    """An actor said where it is, and its node was gone before the driver looked."""
    nodes, _ = watched(calls, tmp_path, 1)
    monkeypatched = SimpleNamespace(get_node_id=lambda: "n0")
    calls.get_runtime_context = lambda: monkeypatched  # type: ignore[attr-defined]
    assert nodes.get("n9").lost == "has been given up by Ray"


def test_only_a_listening_port_is_reachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert reachable("127.0.0.1", server.getsockname()[1])
    assert not reachable("127.0.0.1", free_port())


def test_a_verdict_names_the_node() -> None:
    stages = with_stage(pipeline_held_at(3, 1, 4.0), 1, node="b")
    root = diagnose(stuck(stages, 4.0))[0]
    assert root.summary.startswith("stage 1 on b is stuck") and root.evidence[0] == "node: b"


def test_a_stage_that_goes_with_its_node_is_dead_and_the_node_named_once() -> None:
    detail = "node b (10.0.0.2) gives no answer, nor does its port 6380"
    end = {"process_state": None, "dead_for_s": 0.5, "exit_code": NODE_LOST, "exit_detail": detail, "node": "b"}
    root = diagnose(stuck(with_stage(pipeline_held_at(3, 1, 0.6), 1, **end), 0.6))[0]
    assert (root.stage, root.cause) == (1, "dead")
    assert root.summary == f"stage 1 is lost with its node: {detail}"
    assert root.suggest.startswith("ray status")


def test_a_meeting_begins_when_its_last_member_arrives() -> None:
    """Two stages wait for a third, which loads on another node and then meets them."""
    meets = {"phase": "meet", "op": "collective", "op_age_s": 11.0, "phase_age_s": 11.0}
    stages = healthy(3)
    for k in (0, 2):
        stages = with_stage(stages, k, **meets)
    late = with_stage(stages, 1, phase="serving", phase_age_s=0.1)
    assert [one for one in diagnose(stuck(late, 0.1)) if one.root] == []
    stays = with_stage(stages, 1, **meets)
    assert {one.stage for one in diagnose(stuck(stays, 11.0)) if "in phase meet" in one.summary} == {0, 1, 2}
