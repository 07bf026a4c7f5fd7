"""Faults of core, agent, texts, gateway and console: the processes beside the stages."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from pathlib import Path
from typing import Any

import zmq

from ppengine.common import curve
from ppengine.drills.fault_points import Fault, Go, StageParts
from ppengine.drills.registry import Undo, arm, outside, strike
from ppengine.drills.target import Target, pause
from ppengine.protocol.keys import own_keypair, public_key


@outside("hang", "core", clears=True, on="core")
def core_stop(target: Target) -> Undo:
    """The engine core gets SIGSTOP.

    Verdict: the engine core is stopped by a signal; the stages wait for it and are not at fault.
    """
    return pause(target.role("core"))


@outside("death", "core", on="core")
def core_kill(target: Target) -> None:
    """The engine core gets SIGKILL. Another one meets the stages and goes on with the requests.

    Verdict: the engine core was killed by SIGKILL.
    """
    os.kill(target.role("core"), signal.SIGKILL)


@outside("blind", "process", clears=True, on="agent")
def agent_stop(target: Target) -> Undo:
    """The agent gets SIGSTOP: the stages are not sampled, and continue.

    Verdict: the agent is stopped by a signal; samples are old, and are shown as old.
    """
    return pause(target.role("agent"))


@outside("blind", "undetermined", on="agent", held_out=True)
def agent_kill(target: Target) -> None:
    """The agent gets SIGKILL: the stages are not sampled, and continue.

    Verdict: no fault; samples are old, and are shown as old.
    """
    os.kill(target.role("agent"), signal.SIGKILL)


@outside("none", "process", clears=True, on="texts", held_out=True)
def texts_stop(target: Target) -> Undo:
    """The process of texts gets SIGSTOP: texts of consoles wait or are refused, and token ids go on.

    Verdict: the process of texts is stopped by a signal.
    """
    return pause(target.role("texts"))


@outside("none", on="texts", held_out=True)
def texts_kill(target: Target) -> None:
    """The process of texts gets SIGKILL. Another one makes the same text from the core's tokens.

    Verdict: no fault; the event `texts.ended` has the signal.
    """
    os.kill(target.role("texts"), signal.SIGKILL)


@strike("forward", "hang", "self_stuck", "undetermined", clears=True, before=agent_stop)
def blind_hang(fault: Fault, go: Go, *args: Any) -> Any:
    """The agent is stopped, and then the stage's step loop sleeps: the work stops without a fresh sample.

    Verdict: stage K is stuck in its own code with step n, which the stage before has retired; the agent is silent.
    """
    fault.hold()
    return go(*args)


@outside("hang", "stopped", clears=True, held_out=True)
def blind_stop(target: Target) -> Undo:
    """The agent is stopped, and then the stage, too, by SIGSTOP.

    Verdict: stage K is stopped by a signal; the agent is silent.
    """
    undo = contextlib.ExitStack()
    undo.callback(agent_stop(target))
    undo.callback(pause(target.pid))
    return undo.close


@arm("blind", "undetermined", "self_stuck")
def control_dead(parts: StageParts) -> None:
    """The stage's control thread ends; its tick stops, while the step loop continues.

    Verdict: no hang, and above all no held GIL: steps still retire.
    """
    parts.control.close()  # type: ignore[attr-defined]


@outside("blind", "undetermined", clears=True, held_out=True)
def rings_gone(target: Target) -> Undo:
    """The ring files of the stage disappear from their folder; the stage keeps writing to its mappings.

    Verdict: no fault; the stage is no longer sampled, and is shown so.
    """
    folder = Path(target.config.ring_dir)
    aside = folder / "aside"
    aside.mkdir(exist_ok=True)
    moved = [path.rename(aside / path.name) for path in folder.glob(f"s{target.stage}.{target.rank}.*.ring")]

    def undo() -> None:
        for path in moved:
            with contextlib.suppress(OSError):
                path.rename(folder / path.name)

    return undo


@outside("none", clears=True, on="gateway")
def slow_subscriber(target: Target) -> Undo:
    """A console subscribes to everything and reads nothing.

    Verdict: nothing; the engine is unaffected, and the missed messages are dropped.
    """
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.setsockopt(zmq.LINGER, 0)
    client = own_keypair("client", curve.make_keypair)
    curve.be_client(socket, client, public_key(Path(target.config.run_dir)))
    socket.connect(target.config.endpoint("state"))
    socket.subscribe(b"")

    def undo() -> None:
        socket.close()
        context.term()

    return undo


@outside("none", clears=True, held_out=True)
def no_space(target: Target) -> Undo:
    """The stage can make no file longer, as on a disk that is full: its log lines are lost.

    Verdict: nothing; a stage needs no file to serve.
    """
    pid = target.pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))

    def undo() -> None:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    return undo
