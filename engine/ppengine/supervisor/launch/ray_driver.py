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
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from ppengine.common import lifeline
from ppengine.common.child_process import describe_exit, kill_all, session, until
from ppengine.common.config import EngineConfig
from ppengine.protocol.discovery import process_start
from ppengine.protocol.error_text import PREFIX, one_line
from ppengine.protocol.place import Place
from ppengine.protocol.reports import NODE_LOST, UNKNOWN_STATUS, ProcessInfo, StartStage
from ppengine.protocol.stage_lifecycle import FIRST_GENERATION
from ppengine.supervisor.launch.launcher import ExecutorError
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


@dataclass(eq=False)
class Hand:
    """The actor of a place, running or starting."""

    place: Place
    generation: int
    actor: Any
    words_from: int
    """Offset of its own lines in the stage's log."""
    waited_for: Any = None
    """The call that we wait for, an ObjectRef: first its place, then its run. None: it has ended."""
    pid: int = 0
    """0: not known yet."""
    start: int | None = None
    node: Node | None = None
    waits_for_node: bool = False
    """It runs as soon as the actor of its node guards it."""
    ends_at: tuple[float, int] | None = None
    """It has ended: the time to report it, and the number of its node's next look, which may bring last lines."""

    @property
    def lives(self) -> bool:
        """Whether its process is there."""
        if self.node is None or not self.pid:
            return False
        if self.node.here:
            return process_start(self.pid) == self.start is not None
        return not self.node.lost and self.pid not in self.node.gone


class Driver:
    """Places the stages of `config` and watches them until it is stopped. `words`: the socket to the supervisor."""

    def __init__(self, config: EngineConfig, words: socket.socket) -> None:
        self._config = config
        self._words = words
        self.session = RaySession(config)
        self._stopping = False
        self._group: Any = None
        self._hands: dict[Place, Hand] = {}
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
            self._hire(place, FIRST_GENERATION)

    def _hire(self, place: Place, generation: int) -> None:
        """Make the actor of a place, in its stage's bundle, without waiting for it."""
        ray = load_ray()
        bundle = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=place.stage
        )
        gpus = bundles(self._config)[place.stage].get("GPU", 0) / self._config.groups.tensor
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0}
        actor = ray.remote(StageActor).options(**options, scheduling_strategy=bundle).remote()
        log = self._log(place)
        words_from = log.stat().st_size if log.exists() else 0
        self._hands[place] = Hand(place, generation, actor, words_from, actor.place.remote())

    def _watch(self) -> None:
        """Take orders; wait a moment for answers of actors, or for a process or a node that is gone."""
        ray = load_ray()
        self._look_at_head()
        if not self._head_words:  # Without its head Ray makes no actor, and the call would wait for it.
            self._take_orders()
            if self._later:
                self._hire_late()
        open_calls = [hand.waited_for for hand in self._hands.values() if hand.waited_for is not None]
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
        for hand in self._hands.values():
            if hand.waits_for_node:
                self._begin(hand)
            elif hand.ends_at is not None:
                if now >= hand.ends_at[0] or (hand.node is not None and hand.node.looks >= hand.ends_at[1]):
                    self._end(hand)
            elif hand.waited_for is not None and (hand.waited_for in answered or (hand.pid and not hand.lives)):
                self._hear(hand)

    def _look_at_head(self) -> None:
        """Report a head that has become silent, or answers again."""
        silent = "" if self._head is None else self._head.silent
        if silent != self._head_words:
            self._head_words = silent
            self._send(ProcessInfo(role="ray", stage=None, rank=None, pid=os.getpid(), detail=silent))

    def _stages_of(self, node: Node) -> list[tuple[int, int]]:
        hands = (hand for hand in self._hands.values() if hand.node is node and hand.lives)
        return [(hand.pid, hand.start or 0) for hand in hands]

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
            self._replace(self._hands[order.place], order.generation)

    def _replace(self, hand: Hand, generation: int) -> None:
        self._dismiss(hand)
        if hand.node is None or hand.node.here:
            # Its memory must be free before the next stage measures the room.
            until(lambda: not hand.lives, END_S)
        elif hand.node.lost:
            # Ray would place it on the lost node again.
            self._later[hand.place] = generation
            return
        self._hire(hand.place, generation)

    def _hire_late(self) -> None:
        """Make the actors of stages whose nodes are lost for good."""
        for place, generation in list(self._later.items()):
            node = self._hands[place].node
            if node is None or self._nodes.is_over(node):
                del self._later[place]
                self._hire(place, generation)

    def _hear(self, hand: Hand) -> None:
        """Take an answer: the place of an actor that is there now, which begins to run then, or the end of its run."""
        ray = load_ray()
        if hand.pid:
            here = hand.node is None or hand.node.here
            looks = 0 if hand.node is None else hand.node.looks
            hand.ends_at = time.monotonic() + (0.0 if here else LAST_LINES_S), looks + 1
            return
        try:
            hand.pid, hand.start, node_id, version = ray.get(hand.waited_for)
        except ray.exceptions.RayError as error:
            hand.waited_for = None
            self._say(hand, 1, cause_of_death(flat(error)))
            return
        hand.waited_for = None
        if version != (own := metadata.version("ppconsole")):
            hand.node = self._nodes.describe(node_id)
            self._say(hand, 1, f"node {hand.node.name} has ppconsole {version}, this host has {own}: install the same")
            return
        hand.node = self._nodes.get(node_id)
        if hand.node.lost:
            # Its actor came up while the node was lost, and nothing guards it.
            ray.kill(hand.actor)
            self._report_lost(hand, hand.node)
            return
        hand.waits_for_node = True
        self._begin(hand)

    def _begin(self, hand: Hand) -> None:
        """Let an actor run its stage, once the actor of its node is there."""
        if hand.node is None or not (hand.node.here or hand.node.started):
            return
        hand.waits_for_node = False
        if self._config.store_roles:
            self._nodes.place_store(hand.place.store_role, hand.node)
        hand.waited_for = hand.actor.run.remote(self._nodes.config_of(hand.node), *hand.place, hand.generation)
        self._say(hand)

    def _end(self, hand: Hand) -> None:
        hand.ends_at = None
        code, detail = self._cause(hand)
        hand.waited_for = None
        self._say(hand, code, detail)

    def _lose(self, node: Node) -> None:
        """Report the stages of a lost node as ended, long before Ray does; an order then places them elsewhere."""
        for hand in self._hands.values():
            if hand.node is node and (hand.waited_for is not None or hand.waits_for_node):
                self._report_lost(hand, node)

    def _report_lost(self, hand: Hand, node: Node) -> None:
        hand.waited_for, hand.ends_at, hand.waits_for_node = None, None, False
        self._say(hand, NODE_LOST, node.loss)

    def _cause(self, hand: Hand) -> tuple[int, str]:
        """Return exit code and detail of a stage that ended. Ray keeps no wait status of a death."""
        ray = load_ray()
        try:
            code = int(ray.get(hand.waited_for, timeout=CAUSE_S))
        except ray.exceptions.GetTimeoutError:
            return UNKNOWN_STATUS, "its process is gone; Ray does not say why"
        except ray.exceptions.RayError as error:
            return UNKNOWN_STATUS, cause_of_death(flat(error))
        return code, describe_exit(code, self._log(hand.place), hand.words_from)

    def _say(self, hand: Hand, code: int | None = None, detail: str = "") -> None:
        info = ProcessInfo(
            role="stage", stage=hand.place.stage, rank=hand.place.rank, pid=hand.pid, exit_code=code, detail=detail,
            generation=hand.generation, node="" if hand.node is None or hand.node.here else hand.node.name,
        )  # fmt: skip
        self._send(info)

    def _send(self, info: ProcessInfo) -> None:
        with contextlib.suppress(OSError):  # The supervisor is gone: our lifeline ends us.
            self._words.send(msgspec.json.encode(info))

    def _kill_stages(self) -> None:
        """Kill all stages of this host that live; from any thread."""
        hands = list(self._hands.values())
        kill_all(hand.pid for hand in hands if hand.node is not None and hand.node.here and hand.lives)

    def _log(self, place: Place) -> Path:
        return Path(self._config.run_dir) / place.log_name

    def _dismiss(self, hand: Hand) -> None:
        """End an actor: its process first, for Ray cannot end one that is stopped."""
        if hand.node is not None and hand.lives:
            if hand.node.here:
                kill_all([hand.pid])
            else:
                self._nodes.kill(hand.node, hand.pid, hand.start or 0)
        load_ray().kill(hand.actor)

    def _leave(self) -> None:
        ray = load_ray()
        if self._head is not None:
            self._head.stop()
        self._kill_stages()  # all of them before Ray is asked for anything, which may not answer
        for hand in self._hands.values():
            self._dismiss(hand)
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
