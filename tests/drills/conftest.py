"""The drills use what the end-to-end tests use."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "end_to_end"), str(HERE.parent / "engine")]
