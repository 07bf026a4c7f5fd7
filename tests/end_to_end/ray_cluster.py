"""A Ray cluster on `hosts.Hosts`: a node on each, the head on the first. It ends with its hosts."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engines import wait_until
from hosts import Host, Hosts

PORT = 6379
TOKEN, LOG = "/run/ray.token", "/run/ray.log"
STARTS_S = 120.0
OBJECT_STORE_BYTES = 80_000_000
"""About Ray's least."""
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": TOKEN,
    # A lost node is found within (period + timeout) * threshold: 7.5 s instead of 65 s. The first check is 5 s after
    # its start. With a timeout of 0.5 s nodes that live were taken for dead on two cores at a load of 24.
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    # Without it the first client has a worker started for each CPU of its node, a second of CPU time each.
    "RAY_prestart_worker_first_driver": "0",
    # Ray gives workers the lowest priority but four; the stages of a test are to keep up on a busy machine.
    "RAY_worker_niceness": "0",
}


class RayCluster:
    """Nodes of one cluster. `settings` are added to `SETTINGS`, in the environment of all of its processes."""

    def __init__(
        self, hosts: Hosts, *, cpus: int = 4, words: Sequence[str] = (), settings: Mapping[str, str] | None = None
    ) -> None:
        """Start a node on each host. `words`: further options of `ray start`."""
        self.hosts = hosts
        self._settings = {**SETTINGS, **(settings or {})}
        self._words = [f"--num-cpus={cpus}", *words]
        self._token = secrets.token_hex(32)
        head, *others = hosts
        self._await(head, self._start(head))
        # Beside each other, but not beside the head: on a busy machine it answers them too late.
        nodes = {host: self._start(host) for host in others}
        for host, node in nodes.items():
            self._await(host, node)

    @property
    def address(self) -> str:
        """Address for clients, on any of the hosts."""
        return f"{self.hosts[0].address}:{PORT}"

    def environment(self) -> dict[str, str]:
        """Return the environment of a client."""
        return {**self._settings, "RAY_ADDRESS": self.address}

    def restart(self, host: Host) -> None:
        """Start another node on a host whose node has ended."""
        self._await(host, self._start(host))

    def _start(self, host: Host) -> subprocess.Popen[Any]:
        token = host.path(TOKEN)
        token.touch(mode=0o600)
        token.write_text(self._token)
        if host is self.hosts[0]:
            words = ["--head", f"--port={PORT}", "--include-dashboard=false", "--no-monitor"]
        else:
            words = [f"--address={self.address}"]
        words += ["--block", "--include-log-monitor=false", f"--object-store-memory={OBJECT_STORE_BYTES}"]
        words += ["--temp-dir=/run/ray", f"--node-ip-address={host.address}", *self._words]
        with host.path(LOG).open("w") as log:
            return host.popen(
                [str(Path(sys.executable).with_name("ray")), "start", *words],
                env=self._settings,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _await(self, host: Host, node: subprocess.Popen[Any]) -> None:
        log = host.path(LOG)

        def started() -> bool:
            assert node.poll() is None, f"Ray's node on {host.name} has ended: {log.read_text()[-2000:]}"
            return "Ray runtime started" in log.read_text()

        wait_until(started, f"Ray's node on {host.name} starts", STARTS_S)
