"""A process finds its siblings by the modules that they run."""

from __future__ import annotations

import subprocess
import sys

FIND = "from ppengine.common.procfs import sibling; print(sibling('ppengine.core'))"
TITLED = """
import sys
from setproctitle import setproctitle
setproctitle("python -m ppengine.core --engine x")
print("titled", flush=True)
sys.stdin.read()
"""


def test_a_sibling_with_a_title_is_found_by_it() -> None:
    """A title has spaces where a command line has NUL bytes."""
    command = [sys.executable, "-c", TITLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as titled:
        assert titled.stdout is not None and titled.stdout.readline() == "titled\n"
        found = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, check=True)
        titled.communicate()
    assert found.stdout == f"{titled.pid}\n"
