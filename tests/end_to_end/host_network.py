"""The network of `hosts.Hosts`: `python -I host_network.py PARENT CONTROL_FD HOSTS SHIFT_S FOLDER...`.

This process makes the hosts and passes frames between them. Each host is an init process in namespaces of its own.
Its network card is a tap device, whose other end this process holds. Cuts, delays and losses are made here: kernels
come without netem, machines without iproute2. The hosts end with this process, which ends with its parent.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

SUBNET = "10.77.0."
MTU = 9000
"""Bytes of a packet: of jumbo frames, for this process takes as long over a short one."""
PRIORITY = -15
"""Nice value of the cables: no real one waits for a processor of its hosts."""
QUEUED_FRAMES = 1000
"""Frames that wait for a slow cable; further ones are lost."""
CLONE_NEWTIME, CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x80, 0x20000, 0x4000000, 0x8000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
OWN = CLONE_NEWTIME | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWNET
"""Namespaces of a host; that of process ids is entered by a fork, apart from these."""
_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
_SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU, _SIOCSIFHWADDR = 0x8914, 0x8916, 0x891C, 0x8922, 0x8924
_IFF_UP, _ARPHRD_ETHER = 1, 1
_libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: int | bytes | ctypes.c_ulong | None) -> None:
    """Call a function of libc. Raises OSError with its name."""
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    """Mount in this process's mount namespace."""
    call("mount", source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), None)


def die_with(parent: int) -> None:
    """Have this process killed when its parent ends, also when it has ended already."""
    call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Cable:
    """One host's end of the network, and what is wrong with it."""

    def __init__(self, init: int, card: int) -> None:
        self.pidfd = os.pidfd_open(init)
        self.card = card
        self.up = True
        self.shape(0.0, 0.0, 0.0)

    def shape(self, delay_s: float, loss: float, bytes_s: float) -> None:
        """Set what befalls frames that the host sends. `bytes_s` 0: as fast as can be."""
        self.delay_s, self.loss, self.bytes_s = delay_s, loss, bytes_s
        self.free_at = 0.0
        """When its last frame has left: the next one begins then."""

    def departure(self, size: int, now: float) -> float | None:
        """Return when a frame that the host sends now arrives; None: it is lost."""
        if not self.up or (self.loss and random.random() < self.loss):
            return None
        if not self.bytes_s:
            return now + self.delay_s
        if (self.free_at - now) * self.bytes_s > QUEUED_FRAMES * MTU:
            return None
        self.free_at = max(self.free_at, now) + size / self.bytes_s
        return self.free_at + self.delay_s


class Network:
    """Passes frames between hosts; takes orders from `control`, each answered when it is in force."""

    def __init__(self, cables: list[Cable], control: socket.socket) -> None:
        self._cables = dict(enumerate(cables))
        self._control = control
        self._due: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Pass frames until the control socket is closed."""
        control = self._control.fileno()
        while True:
            files: dict[int, int] = {}
            for index, cable in self._cables.items():
                files[cable.card] = files[cable.pidfd] = index
            wait = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            ready = select.select([*files, control], [], [], wait)[0]
            self._deliver()
            if control in ready and not self._obey():
                return
            for file in ready:
                if file != control and files[file] in self._cables:
                    self._attend(file, files[file])

    def _attend(self, file: int, index: int) -> None:
        cable = self._cables[index]
        self._pass_on(index, cable)
        if file == cable.pidfd:
            # All processes of the host are gone, and their last frames are passed on: FINs and RSTs.
            os.close(cable.card)
            os.close(cable.pidfd)
            del self._cables[index]

    def _pass_on(self, sender: int, cable: Cable) -> None:
        """Read what a host has sent: deliver it, or keep it until it is due."""
        with suppress(BlockingIOError, OSError):
            while frame := os.read(cable.card, MTU + 64):
                now = time.monotonic()
                due = cable.departure(len(frame), now)
                if due is None:
                    continue
                # Addresses end in the host's number; that of a broadcast in none of them.
                known = frame[5] in self._cables and not frame[0] & 1
                for receiver in [frame[5]] if known else self._cables:
                    if receiver == sender:
                        continue
                    if due <= now and not self._due:
                        self._hand_over(receiver, frame)
                    else:
                        self._count += 1
                        heapq.heappush(self._due, (due, self._count, receiver, frame))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, receiver, frame = heapq.heappop(self._due)
            self._hand_over(receiver, frame)

    def _hand_over(self, receiver: int, frame: bytes) -> None:
        cable = self._cables.get(receiver)
        if cable is not None and cable.up:
            with suppress(OSError):  # Its queue is full: the frame is lost.
                os.write(cable.card, frame)

    def _obey(self) -> bool:
        order = self._control.recv(4096)
        if not order:
            return False
        index, up, *shape = json.loads(order)
        if cable := self._cables.get(index):
            cable.up = up
            cable.shape(*shape)
        self._control.send(b"done")
        return True


def make_host(index: int, hosts: int, shift_s: int, folders: list[str]) -> tuple[int, int]:
    """Make a host. Returns its init and the end of its cable."""
    ours, theirs = socket.socketpair()
    with Path("/proc/self/ns/pid").open() as own:
        call("unshare", CLONE_NEWPID)
        init = os.fork()
        if init == 0:
            _be_init(index, hosts, shift_s, folders, theirs)
        call("setns", own.fileno(), CLONE_NEWPID)
    theirs.close()
    said, files, _, _ = socket.recv_fds(ours, 1000, 1)
    if not files:
        raise OSError(said.decode() or f"host{index} has ended while it was made")
    return init, files[0]


def _be_init(index: int, hosts: int, shift_s: int, folders: list[str], parent: socket.socket) -> NoReturn:
    try:
        call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
        # The cables of hosts that were made before are not ours to keep.
        os.closerange(3, parent.fileno())
        os.closerange(parent.fileno() + 1, 1024)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel reaps orphans for us.
        call("unshare", OWN)
        Path("/proc/self/timens_offsets").write_text(f"monotonic {index * shift_s} 0\nboottime {index * shift_s} 0\n")
        with Path("/proc/self/ns/time_for_children").open() as clock:
            call("setns", clock.fileno(), CLONE_NEWTIME)
        socket.sethostname(f"host{index}")
        _mount_own(hosts, folders)
        card = _card(index)
        socket.send_fds(parent, [b"made"], [card])
        os.close(card)
        parent.close()
    except BaseException as error:  # noqa: BLE001  # The parent reports all errors.
        parent.send(f"host{index}: {error}".encode())
        os._exit(1)
    while True:
        signal.pause()


def _mount_own(hosts: int, folders: list[str]) -> None:
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    mount("proc", "/proc", "proc")
    for folder in folders:
        mount("tmpfs", folder, "tmpfs")
    names = Path(folders[0]) / "hosts"
    lines = [f"{SUBNET}{other + 1} host{other}" for other in range(hosts)]
    names.write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *lines, ""]))
    mount(str(names), "/etc/hosts", None, _MS_BIND)


def _card(index: int) -> int:
    """Make the network card of a host, in whose namespace we are, and return the end of its cable."""
    card = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(card, _TUNSETIFF, struct.pack("16sH22x", b"eth0", _IFF_TAP | _IFF_NO_PI))

    def address(text: str) -> bytes:
        return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for name, request, value in (
            (b"lo", _SIOCSIFFLAGS, struct.pack("H", _IFF_UP)),
            (b"eth0", _SIOCSIFHWADDR, struct.pack("H6s", _ARPHRD_ETHER, bytes([2, 0, 0, 0, 0, index]))),
            (b"eth0", _SIOCSIFMTU, struct.pack("i", MTU)),
            (b"eth0", _SIOCSIFADDR, address(f"{SUBNET}{index + 1}")),
            (b"eth0", _SIOCSIFNETMASK, address("255.255.255.0")),
            (b"eth0", _SIOCSIFFLAGS, struct.pack("H", _IFF_UP)),
        ):
            fcntl.ioctl(any_socket, request, struct.pack("16s24s", name, value))
    return card


def main() -> None:
    """Make the hosts, report their inits on the control socket, and pass frames until it is closed."""
    parent, control_fd, hosts, shift_s, *folders = sys.argv[1:]
    die_with(int(parent))
    control = socket.socket(fileno=int(control_fd))
    try:
        made = [make_host(index, int(hosts), int(shift_s), folders) for index in range(int(hosts))]
    except OSError as error:
        sys.exit(str(error))
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    control.send(json.dumps([init for init, _ in made]).encode())
    Network([Cable(*host) for host in made], control).run()


if __name__ == "__main__":
    main()
