"""Folders of one engine, and whose they are: names are claimed, and what dead engines left is swept.

A claimed folder holds `.owner`, "pid start-time" of its supervisor, or of the keeper that restarts it. Claiming and
sweeping take turns under a lock on the runtime folder, so that two supervisors that start at once neither share a name
nor sweep each other. The folder of rings is shared by all runtime folders of a user, so it appears by a rename, its
owner already inside.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from ppengine.common import cluster
from ppengine.common.child_process import kill_all, until
from ppengine.common.config import EngineConfig
from ppengine.protocol import discovery, kept_files
from ppengine.protocol.keys import KeyFileError
from ppengine.protocol.place import Place

LONGEST_SOCKET = "control"
CLEAR_S = 5.0
"""Seconds for a killed process to be gone."""
_OWNER = ".owner"
ENGINE_ID = re.compile(r"[0-9a-f]{6}")
NODE_FOLDER = re.compile(r"[0-9a-f]{6}@[A-Za-z0-9.-]+")


class ClaimError(Exception):
    """The engine cannot have its name or its folders. One line: why, and what to do."""


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """Hold this user's runtime folder, so that no other supervisor claims or sweeps; yields the folder."""
    folder = discovery.runtime_dir()
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(descriptor)


def new_id() -> str:
    """Return an engine id: six lowercase hex digits that no engine of this user has."""
    while True:
        engine_id = secrets.token_hex(3)
        if not (discovery.runtime_dir() / engine_id).exists() and not discovery.ring_dir(engine_id).exists():
            return engine_id


def claim(config: EngineConfig) -> None:
    """Sweep, make the folders of `config` (0700) and write its engine.json. Raises ClaimError."""
    check_socket_path(Path(config.run_dir))
    with locked():
        sweep()
        taken = names()
        if config.name in taken:
            raise ClaimError(
                f"an engine named {config.name!r} runs already (id {taken[config.name]}); give --name NAME"
            )
        try:
            make(config)
            if config.cluster is not None:
                cluster.make_keys(Path(config.run_dir))
        except OSError as error:
            discovery.remove_engine(config.id)
            raise ClaimError(f"{error.filename}: {error.strerror}; the engine needs a folder there") from None
        except KeyFileError as error:
            discovery.remove_engine(config.id)
            raise ClaimError(str(error)) from None


def make(config: EngineConfig) -> bool:
    """Make the folders of an engine and its engine.json, those that are missing; return whether one was.

    Raises OSError.
    """
    missing = [path for path in (Path(config.run_dir), Path(config.ring_dir)) if not path.is_dir()]
    for path in missing:
        _make(path, config.keeper or identity(os.getpid()))
    file = Path(config.run_dir) / "engine.json"
    if missing or not file.exists():
        kept_files.write_file(file, msgspec.json.encode(config))
        return True
    return False


def node_folders(engine_id: str, node: str) -> tuple[Path, Path]:
    """Return run folder and ring folder of an engine on another node than its own; two nodes may be on one host."""
    name = f"{engine_id}@{node}"
    return discovery.runtime_dir() / name, discovery.ring_dir(name)


def make_node(config: EngineConfig) -> None:
    """Sweep, and make the folders of `config` on this node, which belong to this process. Raises OSError.

    Folders that are there are taken over: an actor before this one made them, and stages may use them.
    """
    folders, prefix = (Path(config.run_dir), Path(config.ring_dir)), discovery.ring_dir("").name
    with locked() as runtime:
        for run_dir in (path for path in runtime.glob("*@*") if NODE_FOLDER.fullmatch(path.name)):
            if run_dir not in folders and not _owned(run_dir) and not stages_in(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)
        for rings in (path for path in discovery.ring_dir("").parent.glob(f"{prefix}*@*") if _is_private(path)):
            name = rings.name.removeprefix(prefix)
            if NODE_FOLDER.fullmatch(name) and not (runtime / name).is_dir() and not _owned(rings):
                shutil.rmtree(rings, ignore_errors=True)
        for path in folders:
            if not os.path.lexists(path):
                _make(path, identity(os.getpid()))
            elif not _is_private(path):
                raise OSError(
                    errno.EPERM, f"it must be a folder of uid {os.getuid()} with mode 0700, and no link", str(path)
                )
            else:
                _own(path, identity(os.getpid()))
        kept_files.write_file(folders[0] / "engine.json", msgspec.json.encode(config))


def note_stage(run_dir: Path, place: Place) -> None:
    """Note this process as that of a place on the node. Raises OSError."""
    note(run_dir, place.log_name.removesuffix(".log"), os.getpid())


def note(run_dir: Path, name: str, pid: int) -> None:
    """Note a process on the node under `name`. Raises OSError."""
    kept_files.write_file(run_dir / f"{name}.pid", "{} {}\n".format(*identity(pid)).encode())


def stages_in(run_dir: Path) -> list[int]:
    """Return the pids of the stages of a node that run."""
    return noted_in(run_dir, "stage")


def noted_in(run_dir: Path, kind: str) -> list[int]:
    """Return the pids of noted processes that run, whose names begin with `kind`."""
    found = []
    for path in run_dir.glob(f"{kind}*.pid"):
        with contextlib.suppress(OSError, ValueError):
            pid, start = map(int, path.read_text().split())
            if discovery.process_start(pid) == start:
                found.append(pid)
    return found


def end_noted(run_dir: Path, kind: str) -> None:
    """Kill noted processes whose names begin with `kind`: a stopped one outlives its lifeline. Raises TimeoutError."""
    known = {pid: discovery.process_start(pid) for pid in noted_in(run_dir, kind)}
    kill_all(known)
    if not until(lambda: all(discovery.process_start(pid) != start for pid, start in known.items()), CLEAR_S):
        raise TimeoutError(f"{kind}s of an actor before this one do not end: {', '.join(map(str, known))}")


def _is_private(path: Path) -> bool:
    """Return whether `path` is a folder of this user that no other user may enter."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not stat.S_IMODE(info.st_mode) & 0o077


def check_socket_path(run_dir: Path) -> None:
    """Raise ClaimError if the sockets in `run_dir` have longer paths than the system takes."""
    longest = len(os.fsencode(run_dir / LONGEST_SOCKET))
    if longest > discovery.SOCKET_PATH_MOST:
        raise ClaimError(
            f"{run_dir}/{LONGEST_SOCKET} has {longest} bytes, a socket path at most {discovery.SOCKET_PATH_MOST}; "
            f"set XDG_RUNTIME_DIR to a folder with a name shorter by {longest - discovery.SOCKET_PATH_MOST}"
        )


def names() -> dict[str, str]:
    """Return name to id of every live engine in the runtime folder, those included that are starting."""
    found = {record.name: record.id for record in discovery.list_engines()}
    for path in _folders(discovery.runtime_dir(), ""):
        # A folder without engine.json, or with half of one, is being removed.
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found.setdefault(EngineConfig.load(path / "engine.json").name, path.name)
    return found


def sweep() -> None:
    """Remove what engines left whose supervisor is gone, and whose gateway could not do it. Call it `locked`."""
    discovery.list_engines()
    for path in _folders(discovery.runtime_dir(), ""):
        if not _owned(path):
            discovery.remove_engine(path.name)
    prefix = discovery.ring_dir("").name
    for path in _folders(discovery.ring_dir("").parent, prefix):
        if not _owned(path):
            shutil.rmtree(path, ignore_errors=True)


def _folders(parent: Path, prefix: str) -> list[Path]:
    """Return this user's engine folders in `parent`: `prefix` and an id, and no link."""
    found = []
    for path in sorted(parent.glob(f"{prefix}*")):
        if ENGINE_ID.fullmatch(path.name.removeprefix(prefix)) and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(OSError):
                if path.stat().st_uid == os.getuid():
                    found.append(path)
    return found


def identity(pid: int) -> tuple[int, int]:
    """Return pid and start time of a process; a start of 0 if it is gone."""
    return pid, discovery.process_start(pid) or 0


def _make(path: Path, owner: tuple[int, int]) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.mkdir(mode=0o700, parents=True)
    try:
        _own(draft, owner)
        draft.rename(path)
    except OSError:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _own(path: Path, owner: tuple[int, int]) -> None:
    (path / _OWNER).write_text(f"{owner[0]} {owner[1]}\n")


def _owned(path: Path) -> bool:
    """Return whether the process that owns `path` runs."""
    try:
        pid, start = (path / _OWNER).read_text().split()
        return discovery.runs((int(pid), int(start)))
    except (OSError, ValueError):
        return False
