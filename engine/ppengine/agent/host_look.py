"""`python -m ppengine.agent.host_look --engine RUN_DIR/engine.json`: one look at the stages of this host, as JSON.

For an operator whose gateway does not answer: it reads rings and /proc, and needs no process of the engine.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec

from ppengine.agent.agent import Sampler
from ppengine.common.config import EngineConfig

_BETWEEN_S = 0.4
"""Seconds between two looks: shares of time need a first one."""


def main() -> int:
    """Print an `AgentReport`. Exit 1: there is no such engine."""
    parser = argparse.ArgumentParser(prog="ppengine.agent.host_look", description="Look at an engine's stages once.")
    parser.add_argument("--engine", type=Path, required=True, help="engine.json in the engine's run folder")
    try:
        sampler = Sampler(EngineConfig.load(parser.parse_args().engine))
    except (OSError, msgspec.MsgspecError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    sampler.look()
    time.sleep(_BETWEEN_S)
    sys.stdout.buffer.write(msgspec.json.encode(sampler.look()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
