"""The begin of a supervisor that follows one which was killed: its parent, `serve --restart`, has started both.

All processes of an engine end with their supervisor. Its folder stays, with the journals of core and gateway. The next
processes go on from them; stages load again, and requests are recomputed.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from ppengine.common.child_process import describe_exit, kill_all, until
from ppengine.common.config import EngineConfig
from ppengine.protocol import discovery
from ppengine.protocol.reports import ProcessInfo
from ppengine.supervisor.claims import ENGINE_ID, ClaimError, identity

LEAVE_S = 5.0
"""Seconds for the gateway before this one, which ends what does not leave by itself."""
_KILLED_S = 2.0
_SOCKETS = ("state", "control", "bulk")


def resume(engine_id: str, code: int, killed: str = "") -> tuple[EngineConfig, ProcessInfo]:
    """Return the engine's configuration, and the supervisor that ended with `code`, when none of its processes is left.

    `killed`: the words of its parent about its end; empty: there are none. Raises ClaimError if this process may not
    go on with it.
    """
    if not ENGINE_ID.fullmatch(engine_id):
        raise ClaimError(f"--resume {engine_id!r}: an engine id is six lowercase hex digits")
    folder = discovery.runtime_dir() / engine_id
    try:
        config = EngineConfig.load(folder / "engine.json")
    except (OSError, msgspec.MsgspecError) as error:
        raise ClaimError(f"engine {engine_id} cannot be resumed: {folder}/engine.json: {error}") from None
    if config.keeper != identity(os.getppid()):
        raise ClaimError(f"engine {engine_id} cannot be resumed: this process's parent did not start it")
    _await_end(str(folder))
    for name in _SOCKETS:  # Files of the gateway that ended: consoles must not find them before there is another one.
        (folder / name).unlink(missing_ok=True)
    for ring in Path(config.ring_dir).glob("*.ring"):  # They show processes that have ended.
        ring.unlink(missing_ok=True)
    before = ProcessInfo(
        role="supervisor", stage=None, rank=None, pid=_pid_before(engine_id), exit_code=code,
        detail=killed or describe_exit(code, None),
    )  # fmt: skip
    return config, before


def _await_end(folder: str) -> None:
    """Wait until the processes that were started for `folder` have ended; kill those that stay."""
    if not until(lambda: not _processes(folder), LEAVE_S, 0.02):
        kill_all(_processes(folder))
        until(lambda: not _processes(folder), _KILLED_S)


def _processes(folder: str) -> list[int]:
    """Return the processes of the engine: they run a module of ours and have its folder in their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue
        if "-m ppengine." in words and folder in words:
            found.append(int(path.name))
    return found


def _pid_before(engine_id: str) -> int:
    """Return the pid of the supervisor in the record of the engine; 0 if it has none."""
    return next((one.pid for one in discovery.list_engines() if one.id == engine_id), 0)
