"""`python -m ppengine.shadow --engine RUN_DIR/engine.json`: takes tasks from the core until its lifeline closes."""

from __future__ import annotations

import argparse
import logging
import os
import sys

import torch
import zmq

from ppengine.common.begin_process import begin
from ppengine.protocol.check_messages import ShadowReady, ShadowTask
from ppengine.protocol.frames import Codec, encode
from ppengine.shadow.reference import Reference

log = logging.getLogger("ppengine.shadow")
_NICE = 10
"""It looks on: the stages come first."""
_FIRST = ShadowTask(
    nonce=0, step=0, request="", prompt_ids=[0, 0], output_ids=[0], first=0, min_tokens=0, stop_token_ids=[]
)
"""Judged before it is ready, so that its kernels are compiled by then."""


def main() -> int:
    """Load, say so, and answer tasks. Exit code 1: could not load."""
    parser = argparse.ArgumentParser(prog="python -m ppengine.shadow")
    parser.add_argument("--gpus", action="store_true", help="the stages are on GPUs")
    arguments, config = begin(parser)
    os.nice(_NICE)
    torch.set_num_threads(1)
    try:
        reference = Reference(config, arguments.gpus)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    reference.judge(_FIRST)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, b"shadow")
    socket.connect(config.endpoint("steps"))
    socket.send(encode(ShadowReady(weights_bytes=reference.weights_bytes)))
    log.info("the reference is ready: %s", config.model_path)
    tasks = Codec(ShadowTask)
    while True:
        task = tasks.decode(socket.recv())
        assert isinstance(task, ShadowTask)
        socket.send(encode(reference.judge(task)))


if __name__ == "__main__":
    sys.exit(main())
