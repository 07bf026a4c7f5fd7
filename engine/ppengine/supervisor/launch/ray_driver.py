"""The Ray driver of one engine: `python -m MODULE --engine RUN_DIR/engine.json --lifeline FD`.

A placement group has a bundle a stage, with room for all ranks of it: on this host alone with STRICT_PACK, else on
nodes as the profile's placement says. Over the socket `--words` it takes orders to restart a place, one `StartStage`
per packet, and reports places, one `ProcessInfo` per packet, both JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from ppengine.common import lifeline
from ppengine.common.child_process import describe_exit, kill_all, session, until
from ppengine.common.config import EngineConfig
from ppengine.protocol.error_text import PREFIX, one_line
from ppengine.protocol.place import Place
from ppengine.protocol.reports import NODE_LOST, UNKNOWN_STATUS, ProcessInfo, StartStage
from ppengine.protocol.stage_lifecycle import FIRST_GENERATION
from ppengine.supervisor.launch.launcher import ExecutorError
from ppengine.supervisor.launch.ray_actor import PlaceActor
from ppengine.supervisor.launch.ray_head import HeadWatch
from ppengine.supervisor.launch.ray_nodes import Node, Nodes
from ppengine.supervisor.launch.ray_placement import bundles, strategy, unplaced
from ppengine.supervisor.launch.ray_session import RaySession, cause_of_death, flat, load_ray
from ppengine.supervisor.launch.ray_stage import StageActor

PLACE_S = 30.0
END_S = 2.0
"""Seconds a killed stage gets to be gone."""
WATCH_S = 0.05
CAUSE_S = 0.3
"""How long to wait for Ray's account of a death that is known already."""
LAST_LINES_S = 0.6
"""How long to wait for the last lines of a stage on another node."""
_ORDER_BYTES = 4096


class Driver:
    """Places the stages of `config` and watches them until it is stopped. `words`: the socket to the supervisor."""

    def __init__(self, config: EngineConfig, words: socket.socket) -> None:
        self._config = config
        self._words = words
        self.session = RaySession(config)
        self._stopping = False
        self._group: Any = None
        self._actors: dict[Place, PlaceActor] = {}
        self._nodes = Nodes(config)
        self._head: HeadWatch | None = None
        self._head_words = ""
        """Words about a silent head that the supervisor has."""
        self._later: dict[Place, int] = {}
        """Places whose node is lost, with the generation to start: they wait until none of it can run there."""

    def ask_to_stop(self) -> None:
        """End `run` soon."""
        self._stopping = True

    def run(self) -> None:
        """Start or join Ray, place the stages, watch them. Raises ExecutorError."""
        self.session.join()
        # Ray has taken SIGTERM for itself.
        signal.signal(signal.SIGTERM, lambda *_: self.ask_to_stop())
        self._head = HeadWatch(str(load_ray().get_runtime_context().gcs_address))
        try:
            if not self._stopping:
                self._place()
            while not self._stopping:
                self._watch()
        finally:
            self._leave()

    def abandon(self) -> None:
        """Leave nothing of a local Ray behind when the supervisor is gone; stages may be stopped, Ray may be stuck."""
        while left := [pid for pid in session(os.getpid()) if pid != os.getpid()]:
            kill_all(left)
            time.sleep(0.01)
        self._kill_stages()
        self.session.remove()
        # In a cluster Ray now ends the actors of this driver on all nodes.
        os._exit(1)

    def _place(self) -> None:
        ray = load_ray()
        self._group = ray.util.placement_group(bundles(self._config), strategy=strategy(self._config))
        deadline = time.monotonic() + PLACE_S
        while not ray.wait([self._group.ready()], timeout=0.2)[0]:
            if self._stopping:
                return
            if time.monotonic() > deadline:
                raise ExecutorError(unplaced(self._config, PLACE_S))
        for place in self._config.groups.places:
            self._create(place, FIRST_GENERATION)

    def _create(self, place: Place, generation: int) -> None:
        """Make the actor of a place, in its stage's bundle, without waiting for it."""
        ray = load_ray()
        bundle = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=place.stage
        )
        gpus = bundles(self._config)[place.stage].get("GPU", 0) / self._config.groups.tensor
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0}
        handle = ray.remote(StageActor).options(**options, scheduling_strategy=bundle).remote()
        log = self._log(place)
        words_from = log.stat().st_size if log.exists() else 0
        self._actors[place] = PlaceActor(place, generation, handle, words_from, handle.place.remote())

    def _watch(self) -> None:
        """Take orders; wait a moment for answers of actors, or for a process or a node that is gone."""
        ray = load_ray()
        self._look_at_head()
        if not self._head_words:  # Without its head Ray makes no actor, and the call would wait for it.
            self._take_orders()
            if self._later:
                self._create_late()
        open_calls = [actor.waited_for for actor in self._actors.values() if actor.waited_for is not None]
        open_calls += self._nodes.calls
        answered: list[Any] = []
        if open_calls:
            answered, _ = ray.wait(open_calls, num_returns=1, timeout=WATCH_S)
            # All that is there, and not the first of the list alone: one call must not hide the others.
            answered, _ = ray.wait(open_calls, num_returns=len(open_calls), timeout=0) if answered else ([], [])
        else:
            time.sleep(WATCH_S)
        for node in self._nodes.turn(answered, self._stages_of):
            self._lose(node)
        for node, (role, pid, code, detail) in self._nodes.take_news():
            self._send(ProcessInfo(
                role=role, stage=None, rank=None, pid=pid, exit_code=code, detail=detail, node=node.name,
            ))  # fmt: skip
        now = time.monotonic()
        for actor in self._actors.values():
            if actor.waits_for_node:
                self._begin(actor)
            elif actor.ends_at is not None:
                if now >= actor.ends_at[0] or (actor.node is not None and actor.node.looks >= actor.ends_at[1]):
                    self._end(actor)
            elif actor.waited_for is not None and (actor.waited_for in answered or (actor.pid and not actor.lives)):
                self._take_answer(actor)

    def _look_at_head(self) -> None:
        """Report a head that has become silent, or answers again."""
        silent = "" if self._head is None else self._head.silent
        if silent != self._head_words:
            self._head_words = silent
            self._send(ProcessInfo(role="ray", stage=None, rank=None, pid=os.getpid(), detail=silent))

    def _stages_of(self, node: Node) -> list[tuple[int, int]]:
        actors = (actor for actor in self._actors.values() if actor.node is node and actor.lives)
        return [(actor.pid, actor.start or 0) for actor in actors]

    def _take_orders(self) -> None:
        while not self._stopping:
            try:
                word = self._words.recv(_ORDER_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionError):
                return
            if not word:
                return
            order = msgspec.json.decode(word, type=StartStage)
            self._later.pop(order.place, None)
            self._replace(self._actors[order.place], order.generation)

    def _replace(self, actor: PlaceActor, generation: int) -> None:
        self._kill(actor)
        if actor.node is None or actor.node.here:
            # Its memory must be free before the next stage measures the room.
            until(lambda: not actor.lives, END_S)
        elif actor.node.lost:
            # Ray would place it on the lost node again.
            self._later[actor.place] = generation
            return
        self._create(actor.place, generation)

    def _create_late(self) -> None:
        """Make the actors of stages whose nodes are lost for good."""
        for place, generation in list(self._later.items()):
            node = self._actors[place].node
            if node is None or self._nodes.is_over(node):
                del self._later[place]
                self._create(place, generation)

    def _take_answer(self, actor: PlaceActor) -> None:
        """Take an answer: the place of an actor that is there now, which begins to run then, or the end of its run."""
        ray = load_ray()
        if actor.pid:
            here = actor.node is None or actor.node.here
            looks = 0 if actor.node is None else actor.node.looks
            actor.ends_at = time.monotonic() + (0.0 if here else LAST_LINES_S), looks + 1
            return
        try:
            actor.pid, actor.start, node_id, version = ray.get(actor.waited_for)
        except ray.exceptions.RayError as error:
            actor.waited_for = None
            self._report(actor, 1, cause_of_death(flat(error)))
            return
        actor.waited_for = None
        if version != (own := metadata.version("ppconsole")):
            actor.node = self._nodes.describe(node_id)
            text = f"node {actor.node.name} has ppconsole {version}, this host has {own}: install the same"
            self._report(actor, 1, text)
            return
        actor.node = self._nodes.get(node_id)
        if actor.node.lost:
            # Its actor came up while the node was lost, and nothing guards it.
            ray.kill(actor.handle)
            self._report_lost(actor, actor.node)
            return
        actor.waits_for_node = True
        self._begin(actor)

    def _begin(self, actor: PlaceActor) -> None:
        """Let an actor run its stage, once the actor of its node is there."""
        if actor.node is None or not (actor.node.here or actor.node.started):
            return
        actor.waits_for_node = False
        if self._config.store_roles:
            self._nodes.place_store(actor.place.store_role, actor.node)
        actor.waited_for = actor.handle.run.remote(self._nodes.config_of(actor.node), *actor.place, actor.generation)
        self._report(actor)

    def _end(self, actor: PlaceActor) -> None:
        actor.ends_at = None
        code, detail = self._cause(actor)
        actor.waited_for = None
        self._report(actor, code, detail)

    def _lose(self, node: Node) -> None:
        """Report the stages of a lost node as ended, long before Ray does; an order then places them elsewhere."""
        for actor in self._actors.values():
            if actor.node is node and (actor.waited_for is not None or actor.waits_for_node):
                self._report_lost(actor, node)

    def _report_lost(self, actor: PlaceActor, node: Node) -> None:
        actor.waited_for, actor.ends_at, actor.waits_for_node = None, None, False
        self._report(actor, NODE_LOST, node.loss)

    def _cause(self, actor: PlaceActor) -> tuple[int, str]:
        """Return exit code and detail of a stage that ended. Ray keeps no wait status of a death."""
        ray = load_ray()
        try:
            code = int(ray.get(actor.waited_for, timeout=CAUSE_S))
        except ray.exceptions.GetTimeoutError:
            return UNKNOWN_STATUS, "its process is gone; Ray does not say why"
        except ray.exceptions.RayError as error:
            return UNKNOWN_STATUS, cause_of_death(flat(error))
        return code, describe_exit(code, self._log(actor.place), actor.words_from)

    def _report(self, actor: PlaceActor, code: int | None = None, detail: str = "") -> None:
        info = ProcessInfo(
            role="stage", stage=actor.place.stage, rank=actor.place.rank, pid=actor.pid, exit_code=code, detail=detail,
            generation=actor.generation, node="" if actor.node is None or actor.node.here else actor.node.name,
        )  # fmt: skip
        self._send(info)

    def _send(self, info: ProcessInfo) -> None:
        with contextlib.suppress(OSError):  # The supervisor is gone: our lifeline ends us.
            self._words.send(msgspec.json.encode(info))

    def _kill_stages(self) -> None:
        """Kill all stages of this host that live; from any thread."""
        actors = list(self._actors.values())
        kill_all(actor.pid for actor in actors if actor.node is not None and actor.node.here and actor.lives)

    def _log(self, place: Place) -> Path:
        return Path(self._config.run_dir) / place.log_name

    def _kill(self, actor: PlaceActor) -> None:
        """End an actor: its process first, for Ray cannot end one that is stopped."""
        if actor.node is not None and actor.lives:
            if actor.node.here:
                kill_all([actor.pid])
            else:
                self._nodes.kill(actor.node, actor.pid, actor.start or 0)
        load_ray().kill(actor.handle)

    def _leave(self) -> None:
        ray = load_ray()
        if self._head is not None:
            self._head.stop()
        self._kill_stages()  # all of them before Ray is asked for anything, which may not answer
        for actor in self._actors.values():
            self._kill(actor)
        self._nodes.stop()
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
        self.session.leave()


def main() -> int:
    """Run the driver until it is stopped."""
    parser = argparse.ArgumentParser(prog="ppengine.supervisor.launch.ray_driver")
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--words", type=int, required=True, help="socket to the supervisor")
    lifeline.add_argument(parser)
    options = parser.parse_args()
    # Ray starts processes: none of them is to inherit it.
    os.set_inheritable(options.words, False)
    driver = Driver(EngineConfig.load(options.engine), socket.socket(fileno=options.words))
    signal.signal(signal.SIGTERM, lambda *_: driver.ask_to_stop())
    lifeline.adopt(options.lifeline, on_close=driver.abandon)
    try:
        driver.run()
    except ExecutorError as error:
        print(f"{PREFIX}{one_line(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
