"""Stages that make no progress while their process lives."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import re
import socket
import subprocess
import threading
from typing import Any

from ppengine.drills.fault_points import Fault, Go, StageParts
from ppengine.drills.registry import FaultError, Undo, arm, strike

_MUTEX_BYTES = 64
"""At least the size of a pthread_mutex_t."""


@strike("send", "hang", "self_stuck", clears=True)
def sleep_before_send(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop sleeps before it hands its hidden states to the next stage.

    Verdict: stage K is stuck in itself, in Python; the stages after it starve.
    """
    fault.hold()
    return go(*args)


@strike("receive", "hang", "self_stuck", clears=True)
def sleep_before_receive(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop sleeps before it takes the hidden states of a step (at the first stage: before it begins a step).

    Verdict: stage K is stuck in itself; the stages before it are blocked on K, those after it starve.
    """
    fault.hold()
    return go(*args)


@strike("forward", "hang", "self_stuck", clears=True)
def sleep_in_forward(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop sleeps in the middle of its layers.

    Verdict: stage K is stuck in itself, in a forward, in Python; stages before it wait for K, stages after it starve.
    """
    fault.hold()
    return go(*args)


@strike("forward", "hang", "self_stuck", clears=True)
def python_loop(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop spins in Python without end, inside a forward.

    Verdict: stage K is stuck in itself: it computes without progress, in this frame; the GIL changes hands as usual.
    """
    while not fault.over.is_set():
        pass
    return go(*args)


@strike("forward", "hang", "gil_held")
def gil_regex(fault: Fault, go: Go, *args: Any) -> Any:
    """A regular expression that backtracks for years runs inside a forward. It is C code that keeps the GIL.

    Verdict: stage K's main thread holds the GIL in C code; its ticks are frozen.
    """
    re.match(r"(a+)+$", "a" * 64 + "b")
    return go(*args)


@strike("forward", "hang", "gil_held", held_out=True)
def gil_sleep(fault: Fault, go: Go, *args: Any) -> Any:
    """C code sleeps without end and keeps the GIL: the process uses no processor time at all.

    Verdict: stage K's main thread holds the GIL in C code; its ticks are frozen.
    """
    libc = ctypes.PyDLL(None)
    while True:
        libc.pause()


@strike("forward", "hang", "self_stuck", held_out=True)
def c_loop(fault: Fault, go: Go, *args: Any) -> Any:
    """C code without the GIL computes for an hour inside a forward.

    Verdict: stage K is stuck in itself: its main thread computes in C; its other threads tick.
    """
    hashlib.pbkdf2_hmac("sha256", b"ppconsole", b"salt", 2**31 - 1)
    return go(*args)


@strike("forward", "hang", "self_stuck", clears=True, held_out=True)
def pipe_read(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop reads from a pipe without a writer.

    Verdict: stage K is stuck in itself, in a read that never returns.
    """
    read_end, write_end = os.pipe()

    def wake() -> None:
        fault.over.wait()
        os.write(write_end, b"x")

    threading.Thread(target=wake, daemon=True).start()
    os.read(read_end, 1)
    os.close(read_end)
    os.close(write_end)
    return go(*args)


@strike("send", "hang", "self_stuck", "deadlock", clears=True)
def internal_deadlock(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop takes a lock before it sends, and another thread of its own process has it and never releases it.

    Verdict: stage K is stuck in itself: its step loop waits for a lock in a send that its peer does not block.
    """
    lock, taken = threading.Lock(), threading.Event()

    def keep() -> None:
        with lock:
            taken.set()
            fault.over.wait()

    threading.Thread(target=keep, name="keeper", daemon=True).start()
    taken.wait()
    with lock:
        return go(*args)


@strike("forward", "hang", "self_stuck", "deadlock", clears=True, held_out=True)
def native_lock(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop takes a mutex of C code, without the GIL, and another thread of its process has it.

    Verdict: stage K is stuck in itself: its main thread waits in C for a lock; its other threads tick.
    """
    libc, taken = ctypes.CDLL(None), threading.Event()
    mutex = ctypes.create_string_buffer(_MUTEX_BYTES)  # zeros are PTHREAD_MUTEX_INITIALIZER

    def keep() -> None:
        libc.pthread_mutex_lock(mutex)
        taken.set()
        fault.over.wait()
        libc.pthread_mutex_unlock(mutex)

    threading.Thread(target=keep, name="keeper", daemon=True).start()
    taken.wait()
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_unlock(mutex)
    return go(*args)


@strike("forward", "hang", "self_stuck", clears=True, held_out=True)
def file_lock(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop waits for the lock of a file, which another description of the file has.

    Verdict: stage K is stuck in itself, in a lock of a file.
    """
    holder = os.memfd_create("locked")
    waiter = os.open(f"/proc/self/fd/{holder}", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(holder, fcntl.LOCK_EX)

    def release() -> None:
        fault.over.wait()
        os.close(holder)

    threading.Thread(target=release, daemon=True).start()
    fcntl.flock(waiter, fcntl.LOCK_EX)
    os.close(waiter)
    return go(*args)


@strike("forward", "hang", "self_stuck", clears=True, held_out=True)
def child_wait(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop waits for a child process that does not end.

    Verdict: stage K is stuck in itself, in a wait for a process.
    """
    # It reads from a pipe of the stage, so it ends with the stage at the latest.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        assert child.stdin is not None  # it is a pipe
        pipe = child.stdin

        def end() -> None:
            fault.over.wait()
            pipe.close()

        threading.Thread(target=end, daemon=True).start()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    return go(*args)


@strike("forward", "hang", "self_stuck", clears=True, held_out=True)
def metrics_wait(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop waits for the answer of a metrics server, which accepts its connection and says nothing.

    Verdict: stage K is stuck in itself, in a read from a socket that is no edge.
    """
    server = socket.create_server(("127.0.0.1", 0))

    def close() -> None:
        fault.over.wait()
        server.close()

    with socket.create_connection(server.getsockname()) as client:
        threading.Thread(target=close, daemon=True).start()
        with contextlib.suppress(ConnectionResetError):
            client.recv(1)
    return go(*args)


@arm("hang", "self_stuck", clears=True)
def send_thread_stuck(parts: StageParts) -> Undo:
    """Messages wait for the send thread, as big ones do, and it sends none; they pile up.

    Verdict: stage K is stuck in itself, in its send thread; the next stage waits for data that K has and does not send.
    """
    sender, over = crowded(parts, "send-thread-stuck"), threading.Event()
    deliver = sender._deliver

    def held(parcel: Any) -> None:
        over.wait()
        deliver(parcel)

    sender._deliver = held

    def undo() -> None:
        del sender._deliver
        over.set()
        sender._count(-1)

    return undo


@arm("hang", "self_stuck", clears=True, held_out=True)
def send_thread_gone(parts: StageParts) -> Undo:
    """Messages wait for the send thread, as big ones do, and it has ended without a log line.

    Verdict: stage K is stuck in itself: it has data to send and no thread that sends.
    """
    sender = crowded(parts, "send-thread-gone")
    if sender._thread is None:
        sender._begin()
    sender.finish()

    def again() -> None:
        sender._count(-1)
        sender._begin()

    return again


@strike("copy", "hang", "self_stuck", clears=True, needs="swap")
def swap_hang(fault: Fault, go: Go, *args: Any) -> Any:
    """A copy between device and host blocks never ends. It shows when a request is swapped.

    Verdict: stage K is stuck in itself, in a swap.
    """
    fault.hold()
    return go(*args)


@strike("map", "hang", "self_stuck", clears=True, needs="resize")
def map_hang(fault: Fault, go: Go, *args: Any) -> Any:
    """Mapping memory never ends. It shows when memory utilization is changed.

    Verdict: stage K is stuck in itself, in a map; the resize waits for it, and on a CPU so do the steps.
    """
    fault.hold()
    return go(*args)


@strike("poll", "hang", "link", "self_stuck", clears=True)
def socket_unread(fault: Fault, go: Go, *args: Any) -> Any:
    """The step loop turns, but does not read its steps socket: the core's messages stay in it.

    Verdict: the core has sent steps to stage K that it has not read; its loop turns and receives none.
    """
    fault.over.wait(args[0] / 1e3)
    return 0


def crowded(parts: StageParts, name: str) -> Any:
    """Return the sending end of a stage as if a message were under way on its thread: the next ones queue behind it."""
    if parts.sender is None:
        raise FaultError(f"{name} strikes a send, and stage {parts.stage} sends to no other stage")
    from ppengine.stage.transport import WireSender

    if not isinstance(parts.sender, WireSender):
        raise FaultError(f"{name} strikes a thread, and messages of stage {parts.stage} go from card to card")
    parts.sender._count(1)
    return parts.sender
