"""A client of Ray that `test_nodes` runs: an actor on each node. Prints where they are, then how Ray reports a loss."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import time
from typing import Any

import ray
import ray.util
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

LIMIT_S = 60.0


class Actor:
    """An actor with a call that does not end."""

    def where(self) -> tuple[str, int]:
        """Return its host, and its process id there."""
        return socket.gethostname(), os.getpid()

    def hold(self) -> None:
        """Run until the process is killed."""
        while True:
            time.sleep(LIMIT_S)


def main() -> None:
    """Place an actor on each of as many nodes as the command line says."""
    count = int(sys.argv[1])
    # Ray prints warnings on stdout, and no option stops it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    group = ray.util.placement_group([{"CPU": 1}] * count, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=LIMIT_S)
    actors: list[Any] = [
        ray.remote(Actor)
        .options(num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(group, index))
        .remote()
        for index in range(count)
    ]
    places = ray.get([actor.where.remote() for actor in actors], timeout=LIMIT_S)
    calls = {actor.hold.remote(): name for actor, (name, _) in zip(actors, places, strict=True)}
    print(json.dumps(places), file=answers, flush=True)
    [ended], _ = ray.wait(list(calls), timeout=LIMIT_S)
    try:
        ray.get(ended)
    except ray.exceptions.RayError as error:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        living = sorted(node["NodeManagerHostname"] for node in nodes if node["Alive"])
        print(json.dumps([calls[ended], type(error).__name__, living]), file=answers, flush=True)


if __name__ == "__main__":
    main()
