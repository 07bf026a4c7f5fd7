"""Stand-in of the agent: waits."""

import argparse
import signal
from pathlib import Path

from ppengine.common import lifeline

parser = argparse.ArgumentParser()
parser.add_argument("--engine", type=Path)
lifeline.add_argument(parser)
lifeline.adopt(parser.parse_args().lifeline)
while True:
    signal.pause()
