"""The identity of a model's weights: a hash of config.json and all weight files, kept for the next start.

$XDG_STATE_HOME/ppconsole/weights/<hash of the folder's path>.json    sums by name, size, times, inode and device
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
from xxhash import xxh3_128, xxh3_128_hexdigest

from ppengine.checkpoint.config_json import CheckpointError
from ppengine.checkpoint.model_spec import DUMMY_SEED, check_weights
from ppengine.common.config import EngineConfig
from ppengine.common.one_line import one_line
from ppengine.common.thread_priority import yield_to_others
from ppengine.protocol.kept_files import state_dir, write_file
from ppengine.protocol.store_messages import Weights

PIECE = 8 * 2**20
State = tuple[str, int, int, int, int, int]


class FileSum(msgspec.Struct, frozen=True):
    """One file as it was hashed."""

    name: str
    size: int
    mtime_ns: int
    ctime_ns: int
    """Unlike `mtime_ns`, it cannot be set back."""
    inode: int
    device: int
    sum: str

    @property
    def state(self) -> State:
        """Return all but the sum: a file of the same state is unchanged."""
        return self.name, self.size, self.mtime_ns, self.ctime_ns, self.inode, self.device


def start(config: EngineConfig, report: Callable[[Weights], None]) -> None:
    """Hash on a thread of its own; `report` is called there."""

    def run() -> None:
        yield_to_others()  # Stages load the same files meanwhile.
        try:
            message = Weights(weights_digest(config))
        except (OSError, CheckpointError) as error:
            message = Weights(b"", one_line(str(error)))
        report(message)

    threading.Thread(target=run, name="weights", daemon=True).start()


def weights_digest(config: EngineConfig) -> bytes:
    """Return the hash of the weights. Raises OSError, CheckpointError.

    Dummy weights follow from config.json, the seed and torch's generators. Those of a GPU are others than a CPU's;
    the layout of a slot distinguishes them.
    """
    folder = Path(config.model_path)
    whole = xxh3_128(b"weights 1")
    whole.update((folder / "config.json").read_bytes())
    if config.profile.model.load_format == "dummy":
        whole.update(f"dummy {DUMMY_SEED} {version('torch')}".encode())
        return whole.digest()
    for each in file_sums(check_weights(folder), _kept_file(folder)):
        whole.update(f"{each.name} {each.size} {each.sum}\n".encode())
    return whole.digest()


def file_sums(files: list[Path], kept: Path) -> list[FileSum]:
    """Return the sums of files; those in `kept` that are unchanged are taken from there, and it is rewritten.

    Raises OSError, also for a file that changes meanwhile.
    """
    known = {each.state: each for each in _read_kept(kept)}
    sums = []
    for path in sorted(files):
        status = path.stat()
        state = _state_of(path, status)
        sums.append(known[state] if state in known else FileSum(*state, _sum_of(path, status)))
    if set(sums) != set(known.values()):
        # Without room the next start hashes again.
        with contextlib.suppress(OSError):
            kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(kept, msgspec.json.encode(sums))
    return sums


def _sum_of(path: Path, before: os.stat_result) -> str:
    """Return the hash of a file. Raises OSError."""
    whole, buffer = xxh3_128(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            whole.update(buffer[:count])
        after = os.fstat(file.fileno())
    if _state_of(path, after) != _state_of(path, before):
        raise OSError(f"{path} changed while it was read")
    return whole.hexdigest()


def _state_of(path: Path, status: os.stat_result) -> State:
    times = status.st_mtime_ns, status.st_ctime_ns
    return path.name, status.st_size, *times, status.st_ino, status.st_dev


def _kept_file(folder: Path) -> Path:
    return state_dir() / "weights" / f"{xxh3_128_hexdigest(os.fsencode(folder.resolve()))}.json"


def _read_kept(kept: Path) -> list[FileSum]:
    try:
        return msgspec.json.decode(kept.read_bytes(), type=list[FileSum])
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return []
