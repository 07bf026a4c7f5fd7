"""Stand-in of the core: says that it serves, tells the stages to leave by a file, SIGUSR1 is its Stop command,
SIGUSR2 an error with which it cannot go on.

With STANDIN_RESTARTS it orders a stage that ends to be started anew, once.
"""

import argparse
import os
import signal
import sys
from pathlib import Path

import zmq
from ppengine.common import lifeline
from ppengine.common.config import EngineConfig
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import StateAnswer, StateQuery, ToFront
from ppengine.protocol.reports import ProcessReport, StartStage

parser = argparse.ArgumentParser()
parser.add_argument("--engine", type=Path)
lifeline.add_argument(parser)
options = parser.parse_args()
lifeline.adopt(options.lifeline)
config = EngineConfig.load(options.engine)


def leave(*_: object) -> None:
    (Path(config.run_dir) / "shutdown").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, leave)
signal.signal(signal.SIGUSR1, leave)
signal.signal(signal.SIGUSR2, lambda *_: sys.exit("error: the core cannot go on"))
front = zmq.Context().socket(zmq.ROUTER)
front.linger = 0
front.bind(config.endpoint("front"))
codec = Codec(ToFront)
state = os.environ.get("STANDIN_STATE", "serving")
restarts = "STANDIN_RESTARTS" in os.environ
while True:
    client, body = front.recv_multipart()
    message = codec.decode(body)
    if isinstance(message, ProcessReport) and restarts:
        for info in message.processes:
            if info.stage is not None and info.exit_code is not None and info.generation == 1:
                front.send_multipart([client, encode(StartStage(stage=info.stage, generation=2))])
                restarts = False
    if isinstance(message, StateQuery) and state != "loading":
        answer = StateAnswer(
            nonce=message.nonce,
            state=state,
            message="room for 3",
            max_model_len=8,
            num_blocks=8,
            code="DOES_NOT_FIT" if state == "degraded" else "",
        )
        front.send_multipart([client, encode(answer)])
