"""Run pytest, and run the tests that failed once more, each by itself.

    python tests/again.py CACHE ARGUMENTS...

Thousands of tests with real processes share few slow cores, and one of them may lose a race. Such a test passes by
itself, and the last lines name it, since a race in a test or in the product made it fail. More than three failures,
an error while collecting, and a test that fails twice fail the run.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

MOST = 3
"""Failed tests that are run once more; more of them have a common cause."""
GROUP = re.compile(r"@[\w.]+\.py(:.*)?$")
"""End of the name of an end-to-end test: the engine or module that it shares."""


def pytest(cache: Path, *words: str) -> int:
    """Run pytest with a cache of its own, since several run side by side; return its exit code."""
    return subprocess.call([sys.executable, "-m", "pytest", "-o", f"cache_dir={cache}", *words])


def main(cache: Path, words: list[str]) -> int:
    """Return the exit code of the run: 0 if each test has passed, at the second try at the latest."""
    shutil.rmtree(cache, ignore_errors=True)
    code = pytest(cache, *words)
    record = cache / "v" / "cache" / "lastfailed"
    if code != 1 or not record.is_file():
        return code
    failed = [GROUP.sub("", name) for name in json.loads(record.read_text())]
    if not 0 < len(failed) <= MOST:
        return code
    print(f"Once more, each by itself: {', '.join(failed)}", flush=True)
    if any(pytest(cache.with_name(f"{cache.name}-again"), name) for name in failed):
        return code
    print(f"FAILED BESIDE OTHERS, PASSED ALONE (a race: find it): {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
