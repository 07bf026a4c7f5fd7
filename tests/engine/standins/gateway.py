"""Stand-in of the gateway: socket files that nobody answers, reports written down, the janitor's duty."""

import argparse
import os
import signal
from pathlib import Path

import zmq
from ppengine.common import lifeline
from ppengine.common.config import EngineConfig
from ppengine.protocol import discovery
from ppengine.protocol.facts import Exited
from ppengine.protocol.frames import Codec
from ppengine.protocol.reports import ToCollector

parser = argparse.ArgumentParser()
parser.add_argument("--engine", type=Path)
lifeline.add_argument(parser)
options = parser.parse_args()
config = EngineConfig.load(options.engine)


def clean_up() -> None:
    discovery.remove_engine(config.id)
    os._exit(1)


lifeline.adopt(options.lifeline, clean_up)
context = zmq.Context()
sockets = [context.socket(zmq.ROUTER) for _ in range(3)]
for socket, name in zip(sockets, ("state", "control", "bulk"), strict=True):
    socket.bind(config.endpoint(name))
collect = context.socket(zmq.PULL)
collect.bind(config.endpoint("collect"))
codec = Codec(ToCollector)
stop: list[int] = []
signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
with Path(os.environ["STANDIN_REPORTS"]).open("a") as file:
    while collect.poll(0 if stop else 20) or not stop:  # As the real one, it reads what is there before it leaves.
        if not collect.poll(0):
            continue
        report = codec.decode(collect.recv())
        if isinstance(report, Exited):
            where = None if report.place is None else report.place.stage
            print("exited", report.role, where, report.pid, report.exit_code, sep="|", file=file, flush=True)
            continue
        for info in report.processes:
            print(info.role, info.stage, info.pid, info.exit_code, info.detail, sep="|", file=file, flush=True)
