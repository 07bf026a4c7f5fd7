"""Stages that a signal ended: its name, and who can have sent it."""

import os
import signal
import subprocess
import sys

import pytest
from diagnosis_world import evidence, healthy, with_stage
from ppengine.common.procfs import cpu_limits_s
from ppengine.diagnosis import diagnose


def ended(code, **changes):
    fields = {"exit_code": code, "dead_for_s": 0.3, "oom_kills": 0, "process_state": None}
    (verdict,) = diagnose(evidence(with_stage(healthy(2), 1, **fields | changes)))
    assert (verdict.stage, verdict.cause, verdict.root) == (1, "dead", True)
    return verdict


def test_limit_of_cpu_time_is_the_kernels_signal():
    verdict = ended(-signal.SIGXCPU, cpu_limits_s=(60, None), cpu_s=59.4)
    assert verdict.summary == (
        "stage 1 was killed by SIGXCPU: the kernel, at its limit of CPU time of 60 s (ulimit -t)"
    )
    assert "sent by: the kernel, at its limit of CPU time of 60 s (ulimit -t), used 59.4 s at the newest sample" in (
        verdict.evidence
    )
    assert verdict.suggest == "start the engine after: ulimit -t unlimited"
    assert ended(-signal.SIGXCPU, successor=77).suggest.startswith("prlimit --pid 77 --cpu=unlimited ")


def test_hard_limit_is_a_kill_by_the_kernel():
    verdict = ended(-signal.SIGKILL, cpu_limits_s=(60, 60), cpu_s=59.1)
    assert "the kernel, at its limit of CPU time of 60 s" in verdict.summary
    assert "limit" not in ended(-signal.SIGKILL, cpu_limits_s=(60, 60), cpu_s=31.0).summary, "not near it"


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM"])
def test_signal_of_another_process_is_named_with_who_can_send_it(name):
    verdict = ended(-getattr(signal, name))
    assert verdict.summary == f"stage 1 was killed by {name}: any process of its user or of root can send {name}"


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_usual_signals_have_their_sender_in_the_evidence(name):
    verdict = ended(-getattr(signal, name))
    assert verdict.summary == f"stage 1 was killed by {name}"
    assert f"sent by: any process of its user or of root can send {name}" in verdict.evidence


@pytest.mark.parametrize("code", [0, 3])
def test_exit_has_no_sender(code):
    assert not any(line.startswith("sent by") for line in ended(code).evidence)


def test_out_of_memory_kill_is_no_limit_of_cpu_time():
    fields = {"exit_code": -9, "dead_for_s": 0.3, "oom_kills": 1, "cpu_limits_s": (60, 60), "cpu_s": 60.0}
    (verdict,) = diagnose(evidence(with_stage(healthy(2), 1, **fields)))
    assert verdict.cause == "killed_oom"


def test_limits_are_read_from_the_process():
    code = "import resource as r, time; r.setrlimit(r.RLIMIT_CPU, (7, 9)); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert cpu_limits_s(process.pid) == (7, 9)
        process.kill()
    assert cpu_limits_s(os.getpid()) == (None, None)
    assert cpu_limits_s(2**22) == (None, None), "there is no such process"
