"""`python -m ppengine.gateway --engine RUN_DIR/engine.json --lifeline FD`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from ppengine.common import lifeline, logs
from ppengine.common.config import EngineConfig
from ppengine.common.open_files import raise_limit
from ppengine.gateway.access import HandlerHung
from ppengine.gateway.audit import AuditError
from ppengine.gateway.gateway import Gateway
from ppengine.protocol.keys import KeyFileError

log = logging.getLogger("ppengine.gateway")

HUNG_EXIT = 3
"""Exit code of a gateway whose ZAP handler hangs."""


def main() -> int:
    """Serve until SIGTERM (exit 0) or until the parent is gone (clears away, exit 0). Exit 1: cannot start."""
    parser = argparse.ArgumentParser(prog="ppengine.gateway", description="Serve the consoles of one engine.")
    parser.add_argument("--engine", type=Path, required=True, help="engine.json in the engine's run folder")
    lifeline.add_argument(parser)
    args = parser.parse_args()
    stop, orphaned = threading.Event(), threading.Event()

    def on_parent_gone() -> None:
        orphaned.set()
        stop.set()

    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # Ctrl-C in a terminal is for the supervisor, which ends this process in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lifeline.adopt(args.lifeline, on_parent_gone)
    logs.start()
    raise_limit()  # Each console has three.
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        config = EngineConfig.load(args.engine)
        gateway = Gateway(config, context)
    except (OSError, zmq.ZMQError, AuditError, KeyFileError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    log.info("gateway of %s (%s) started, epoch %s", config.name, config.id, config.epoch)
    try:
        gateway.run(stop)
    except HandlerHung as error:
        log.error("%s; another gateway follows", error)
        # Its thread may hold any lock, so nothing is cleared away: the supervisor starts a successor.
        os._exit(HUNG_EXIT)
    log.info("leaving: %s", "the supervisor is gone" if orphaned.is_set() else "on SIGTERM")
    gateway.leave(orphaned.is_set())
    context.term()
    return 0


if __name__ == "__main__":
    sys.exit(main())
