"""The first lines of a process of an engine."""

from __future__ import annotations

import argparse
from pathlib import Path

from ppengine.common import lifeline, logs
from ppengine.common.config import EngineConfig


def begin(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, EngineConfig]:
    """Read the command line, hold the lifeline, start the log, and return the arguments and the engine's config.

    `parser` has what this process takes beside `--engine` and its lifeline.
    """
    parser.add_argument("--engine", type=Path, required=True, help="engine.json of the run folder")
    lifeline.add_argument(parser)
    arguments = parser.parse_args()
    lifeline.adopt(arguments.lifeline)
    logs.start()
    return arguments, EngineConfig.load(arguments.engine)
