"""Stand-in of a stage: leaves a ring behind, ends when the core's stand-in says so, fails where a test asks for it."""

import argparse
import os
import sys
import time
from pathlib import Path

from ppengine.common import lifeline
from ppengine.common.config import EngineConfig


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", type=Path)
    for name in ("--stage", "--rank", "--generation"):
        parser.add_argument(name, type=int)
    lifeline.add_argument(parser)
    options = parser.parse_args()
    lifeline.adopt(options.lifeline)
    config = EngineConfig.load(options.engine)
    (Path(config.ring_dir) / f"s{options.stage}.0.main.ring").touch()
    failing, _, code = os.environ.get("STANDIN_FAILS", "").partition(":")
    if failing == str(options.stage):
        print("loading", file=sys.stderr)
        print("error: this stage has no weights", file=sys.stderr)
        sys.exit(int(code))
    while not (Path(config.run_dir) / "shutdown").exists():
        time.sleep(0.01)
