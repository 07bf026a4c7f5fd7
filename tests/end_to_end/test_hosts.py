"""The tests' own hosts: apart in all but their disk, joined by a network that can fail, and gone after a test.

Ray on them, and a host that it loses, are in `test_nodes`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import wait_until
from hosts import SHIFT_S, Host, Hosts, running, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
CONNECT = """
import json, socket, sys, time
began = time.perf_counter()
try:
    socket.create_connection((sys.argv[1], 9), timeout=1)
except OSError as error:
    print(json.dumps([type(error).__name__, time.perf_counter() - began]))
"""
LEFT = """
import sys, time
from hosts import Hosts
with Hosts(2) as hosts:
    hosts[1].popen(["sleep", "600"])
    print(*[host.init for host in hosts], *hosts[1].processes(), flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


def connect(client: Host, server: Host) -> tuple[str, float]:
    """Connect to a closed port: one packet, to which the other host's kernel answers with one."""
    error, seconds = json.loads(client.run([sys.executable, "-S", "-c", CONNECT, server.name]).stdout)
    return error, seconds


def fastest(client: Host, server: Host) -> float:
    return min(connect(client, server)[1] for _ in range(5))


def test_hosts_are_apart(two: Hosts) -> None:
    machine = float(Path("/proc/uptime").read_text().split()[0])
    for host in two:
        assert host.run(["hostname"]).stdout == f"{host.name}\n"
        script = "import os, time; print(os.getpid(), time.monotonic())"
        pid, clock = host.run([sys.executable, "-S", "-c", script]).stdout.split()
        assert int(pid) < 100, "process ids of its own"
        assert float(clock) - time.monotonic() == pytest.approx(SHIFT_S * host.index, abs=5)
        uptime = float(host.run(["cat", "/proc/uptime"]).stdout.split()[0])
        assert uptime - machine == pytest.approx(SHIFT_S * host.index, abs=5)
        host.run(["sh", "-c", 'hostname > /dev/shm/own; hostname > "$XDG_RUNTIME_DIR/own"'])
    for host in two:
        assert host.path("/dev/shm/own").read_text() == f"{host.name}\n"
        assert host.path("/run/runtime/own").read_text() == f"{host.name}\n"
        assert "127.0.0.1" in host.run(["cat", "/proc/net/fib_trie"]).stdout
        interfaces = host.run(["cat", "/proc/net/dev"]).stdout.splitlines()[2:]
        assert sorted(line.split(":")[0].strip() for line in interfaces) == ["eth0", "lo"]
    assert not Path("/dev/shm/own").exists()
    with pytest.raises(subprocess.CalledProcessError) as failed:
        two[0].run(["sh", "-c", "echo why >&2; exit 3"])
    assert (failed.value.returncode, failed.value.stderr) == (3, "why\n")


def test_network_fails_as_ordered(two: Hosts) -> None:
    first, second = two
    assert connect(first, second)[0] == "ConnectionRefusedError"
    assert fastest(first, second) < 0.02
    second.shape(delay_ms=100)
    assert 0.1 <= fastest(first, second) < 0.2
    first.shape(delay_ms=50)
    assert 0.15 <= fastest(second, first) < 0.25
    first.shape()
    second.shape(loss_percent=100)
    assert connect(first, second)[0] == "TimeoutError"
    second.shape()
    second.cut()
    assert connect(first, second)[0] == "TimeoutError"
    assert connect(second, first)[0] == "TimeoutError"
    second.join()
    assert connect(first, second)[0] == "ConnectionRefusedError"


def test_rate_is_kept(two: Hosts) -> None:
    first, second = two
    receive = "import socket; s = socket.create_server(('', 99)); c = s.accept()[0]\nwhile c.recv(1 << 16): pass"
    send = f"import socket; c = socket.create_connection(('{second.name}', 99)); c.sendall(bytes(2_000_000))\n"
    send += "c.shutdown(socket.SHUT_WR); c.recv(1)"
    first.shape(rate_mbit=16)
    receiver = second.popen([sys.executable, "-S", "-c", receive])
    wait_until(lambda: second.listens(99), "the receiver listens")
    began = time.monotonic()
    first.run([sys.executable, "-S", "-c", send])
    assert 0.9 < time.monotonic() - began < 10, "2 MB at 2 MB/s"
    assert receiver.wait(20) == 0
    first.shape()


def test_killed_host_is_silent_and_others_go_on() -> None:
    with Hosts(3) as hosts:
        sleepers = [host.popen(["sleep", "600"]) for host in hosts]
        hosts[1].kill()
        assert [host.lives for host in hosts] == [True, False, True]
        assert sleepers[1].poll() == -9
        assert hosts[1].processes() == []
        assert connect(hosts[0], hosts[1])[0] == "TimeoutError"
        assert connect(hosts[0], hosts[2])[0] == "ConnectionRefusedError"
        assert [sleeper.poll() for sleeper in sleepers] == [None, -9, None]
    assert [sleeper.poll() for sleeper in sleepers] == [-9, -9, -9]


def test_nothing_is_left_of_a_killed_test() -> None:
    here = str(Path(__file__).parent)
    test = subprocess.Popen(
        [sys.executable, "-c", LEFT], env={**os.environ, "PYTHONPATH": here}, stdout=subprocess.PIPE, text=True
    )
    assert test.stdout is not None
    pids = list(map(int, test.stdout.readline().split()))
    assert len(pids) == 3
    network = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids[:2]}
    test.kill()
    test.communicate()
    wait_until(lambda: not any(running(pid) for pid in {*pids, *network}), "all ends with the test")
