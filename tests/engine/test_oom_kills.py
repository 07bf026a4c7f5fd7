"""A child that the out-of-memory killer has ended: known also if the newest look fell between the kill and its end."""

import pytest
from ppengine.common import oom_kills
from ppengine.common.oom_kills import OomWatch

MIB = 2**20


class Host:
    """One process and its cgroup, as the kernel shows them."""

    groups, kills, resident = "0::/a\n", 0, 200 * MIB


@pytest.fixture
def host(monkeypatch):
    found = Host()
    monkeypatch.setattr(oom_kills, "LOOK_S", 0.0)
    monkeypatch.setattr(oom_kills.procfs, "cgroups", lambda pid: found.groups)
    monkeypatch.setattr(oom_kills.procfs, "resident_bytes", lambda pid: found.resident)
    monkeypatch.setattr(oom_kills, "_kills", lambda groups: found.kills)
    monkeypatch.setattr(oom_kills.cgroup_limits, "memory_limits", lambda groups: [])
    return found


@pytest.mark.parametrize("left", [200 * MIB, 0])
def test_a_look_between_the_kill_and_the_end_hides_nothing(host, left):
    watch = OomWatch(1)
    watch.look()
    host.kills, host.resident = 1, left
    watch.look()
    assert watch.words() == "the out-of-memory killer of the host, 200.0 MiB resident"


def test_older_kills_of_others_in_the_cgroup_explain_no_end(host):
    watch = OomWatch(1)
    host.kills = 3
    for _ in range(2):
        watch.look()
        assert watch.words() == ""
    host.groups, host.kills = "0::/b\n", 5
    watch.look()
    assert watch.words() == "", "another cgroup counts its own"
