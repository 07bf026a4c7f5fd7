"""Limits of descriptors: counted, named, and no reason to report a process as gone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from diagnosis_world import evidence, stage
from ppengine.common.open_files import OpenFiles, open_files
from ppengine.diagnosis import diagnose
from ppengine.diagnosis.evidence import Shortage

AT_THE_LIMIT = """
import os, resource, sys
from ppengine.common import procfs
from ppengine.common.open_files import open_files
used = len(os.listdir("/proc/self/fd")) - 1
resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, used + 2))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
known, parent = open_files(os.getpid()), procfs.read_stat(os.getppid())
assert procfs.read_stat(2**22 + 1) is None, "a process that is gone is gone"
assert procfs.read_stat(os.getppid()) is not None, "the spare descriptor is there once more"
print(known.used == known.limit == used + 2, parent is not None)
"""


def test_a_process_at_its_limit_still_sees_the_others() -> None:
    ran = subprocess.run([sys.executable, "-c", AT_THE_LIMIT], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("True True\n", "")


def test_descriptors_are_counted() -> None:
    before = open_files(os.getpid())
    assert before is not None
    read_end, write_end = os.pipe()
    after = open_files(os.getpid())
    assert after == (before.used + 2, before.limit)
    os.close(read_end)
    os.close(write_end)
    assert open_files(2**22 + 1) is None
    assert OpenFiles(1024, 1024).text == "1,024 of 1,024 descriptors, RLIMIT_NOFILE"


def test_a_process_without_descriptors_is_a_root_with_its_figure() -> None:
    figure = OpenFiles(1024, 1024).text
    found = diagnose(
        evidence([stage(0), stage(1)], shortages=(
            Shortage(kind="files", where="gateway", figure=figure, pid=7, since_s=2.0),
            Shortage(kind="files", where="stage 1", figure=figure, stage=1, pid=8, since_s=3.0),
        ))
    )  # fmt: skip
    assert [(one.stage, one.cause, one.root) for one in found] == [
        (None, "out_of_files", True), (1, "out_of_files", True),
    ]  # fmt: skip
    assert found[0].summary == f"the gateway has no descriptors left: {figure}"
    assert found[1].suggest.startswith("prlimit --pid 8 --nofile=")


def test_full_folders_are_one_verdict_with_each_of_them() -> None:
    disks = tuple(Shortage(kind="disk", where=f"/run/{name} (x)", figure="0 B free of 9 B") for name in "ab")
    (verdict,) = diagnose(evidence([stage(0), stage(1)], shortages=disks))
    assert (verdict.stage, verdict.cause) == (None, "disk_full")
    assert verdict.summary == "no room in the x, 0 B free of 9 B: /run/a"
    assert verdict.evidence[:2] == ["/run/a (x): 0 B free of 9 B", "/run/b (x): 0 B free of 9 B"]
    assert not any("steps go on" in line for line in verdict.evidence), "it cannot know"
    assert verdict.suggest.startswith("df /run/a;")


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("could not be started: [Errno 24] Too many open files", "out_of_files"),
        ("the fork server has no descriptor left for a stage: 9 of 9 descriptors, RLIMIT_NOFILE", "out_of_files"),
        ("OSError: [Errno 28] No space left on device: '/dev/shm/x'", "disk_full"),
        ("ValueError: 3 is odd", "crashed"),
    ],
)
def test_last_words_of_a_stage_make_the_cause(words: str, cause: str) -> None:
    dead = stage(1, dead_for_s=1.0, exit_code=1, exit_detail=words)
    (verdict,) = [one for one in diagnose(evidence([stage(0), dead])) if one.stage == 1]
    assert verdict.cause == cause
