"""Make the folder of a hub's model complete: the files that an engine reads, each checked, and a marker last."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ppengine.checkpoint.config_json import SETTING_MOST
from ppengine.checkpoint.tensor_files import INDEX, SINGLE
from ppengine.common.model_cache import REVISIONS
from ppengine.common.profile_sections import ModelConfig
from ppengine.common.sizes import size_text
from ppengine.hub.sites import SITES, RemoteFile
from ppengine.hub.transfer import HubError, Stopped, Transfer, git_hasher, no_link
from ppengine.protocol.error_text import shown

MARKER, PARTS, LOCK = ".complete.json", ".parts", ".lock"
SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja",
)  # fmt: skip
"""Files beside the weights that an engine reads. Nothing else is downloaded: no code, no pickled weights."""
SAY_S = 5.0
"""Seconds between two lines of progress."""
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


class _Marker(msgspec.Struct):
    """Content of the marker: the files that were checked, with their sizes."""

    files: dict[str, int]


def fetch_model(
    model: ModelConfig,
    say: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
    *,
    weights: bool | None = None,
) -> None:
    """Download the model of a hub into `model.path`, unless it is there; nothing to do for a folder.

    `weights` None: unless they are dummies. `say` takes lines of progress. Raises HubError, and Stopped soon after
    `stopped` returns True.
    """
    if model.source == "folder" or model.id is None:
        return
    folder = Path(model.path)
    weights = model.load_format != "dummy" if weights is None else weights
    if _complete(folder) or (not weights and (folder / "config.json").is_file()):
        return
    site = SITES[model.source]()
    transfer = Transfer(site.token, stopped)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, say, stopped):
            if _complete(folder):
                return
            listed = site.files(transfer, model.id, model.revision or REVISIONS[model.source])
            wanted = choose(model.id, listed, weights=weights)
            refuse_others(folder, wanted, weights=weights)
            bring(transfer, folder, wanted, f"{model.id} from {site.title}", say)
            if weights:
                _mark(folder, wanted)
                shutil.rmtree(folder / PARTS, ignore_errors=True)
    except OSError as error:
        raise HubError(f"{folder}: {error.strerror}; set XDG_CACHE_HOME or model.path to a folder of yours") from None


def choose(name: str, files: list[RemoteFile], *, weights: bool) -> list[RemoteFile]:
    """Return the files that an engine reads, of those that the hub lists. Raises HubError.

    Names are compared with fixed ones, so none of them leads out of the folder.
    """
    found = {file.path: file for file in files}
    if "config.json" not in found:
        raise HubError(f"{name}: no config.json; a model is a repository with config.json and safetensors files")
    # config.json comes last: it says that the settings are all there.
    settings = [found[path] for path in sorted(SETTINGS, key="config.json".__eq__) if path in found]
    shards = [file for path, file in sorted(found.items()) if _SHARD.fullmatch(path)]
    tensors = [found[SINGLE]] if SINGLE in found else [found[INDEX], *shards] if INDEX in found and shards else []
    if weights and not tensors:
        others = sorted(path for path in found if path.endswith((".bin", ".pt", ".pth", ".gguf")))
        has = f"; {shown(others[0], 60)} is not read" if others else ""
        raise HubError(f"{name}: no {SINGLE}, nor {INDEX} with its shards{has}")
    small = settings + [file for file in tensors if file.path == INDEX]
    for file in small:
        if file.size > SETTING_MOST:
            raise HubError(f"{name}: {file.path} has {file.size} bytes; at most {SETTING_MOST} are taken")
    wanted = settings + (tensors if weights else [])
    for file in wanted:
        checked = _SHA256.fullmatch(file.sha256) or (file in small and not file.sha256 and _SHA1.fullmatch(file.git))
        if not checked:
            raise HubError(f"{name}: the hub lists no sha256 of {file.path}; it cannot be checked")
    return wanted


def refuse_others(folder: Path, wanted: list[RemoteFile], *, weights: bool) -> None:
    """Raise HubError if `folder` has a file that an engine would read and the hub does not list: of another commit."""
    names = {file.path for file in wanted}
    for path in sorted(folder.iterdir()):
        read = path.name in SETTINGS or (weights and (path.name in (SINGLE, INDEX) or _SHARD.fullmatch(path.name)))
        if read and path.name not in names:
            raise HubError(f"{folder}: {path.name} is there, and the hub has none; remove it, or name an empty folder")


def bring(transfer: Transfer, folder: Path, files: list[RemoteFile], title: str, say: Callable[[str], None]) -> None:
    """Download the `files` that `folder` lacks, those of another commit too. Raises HubError, Stopped, OSError.

    A file has its name only when its checksum was right. Until then it is in `PARTS`, named by that checksum.
    """
    missing = _missing(transfer, folder, files, say)
    own = (folder / PARTS).is_dir() or (folder / MARKER).exists()
    if not own and (others := [file.path for file in missing if os.path.lexists(folder / file.path)]):
        text = f"{others[0]} is not the hub's, and no download has made it"
        raise HubError(f"{folder}: {text}; name an empty folder, or remove it")
    (folder / PARTS).mkdir(exist_ok=True)
    parts = {file: folder / PARTS / (file.sha256 or file.git) for file in missing}
    total = sum(file.size for file in missing)
    needed = total - sum(part.stat().st_size for part in parts.values() if part.is_file())
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise HubError(f"{folder}: {title} needs {size_text(needed)} more, and {size_text(free)} are free")
    if missing:
        say(f"downloading {title}: {len(missing)} files, {size_text(total)}, to {folder}")
    progress = _Progress(total, say)
    for file, part in parts.items():
        progress.file = file.path
        hasher = _hasher(file)
        transfer.download(file.url, part, file.size, hasher, progress.came)
        kind, right = ("sha256", file.sha256) if file.sha256 else ("git's sha1", file.git)
        if hasher.hexdigest() != right:
            part.unlink()
            raise HubError(f"{file.path} of {title}: {kind} is {hasher.hexdigest()}; the hub lists {right}; try again")
        part.replace(folder / file.path)


def _missing(transfer: Transfer, folder: Path, files: list[RemoteFile], say: Callable[[str], None]) -> list[RemoteFile]:
    """Return those of `files` that `folder` lacks, by their checksums: another commit may have as many bytes.

    Raises Stopped, OSError.
    """
    here = [file for file in files if _has(folder / file.path, file.size)]
    progress, same = _Progress(sum(file.size for file in here), say), set()
    for file in here:
        progress.file, hasher = f"checking {file.path}", _hasher(file)
        with (folder / file.path).open("rb") as content:
            transfer.feed(content, hasher, progress.came)
        if hasher.hexdigest() == (file.sha256 or file.git):
            same.add(file)
    return [file for file in files if file not in same]


class _Progress:
    """Lines of progress, one in `SAY_S` seconds."""

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self.file = ""
        self._total, self._say = total, say
        self._done, self._marked = 0, 0
        self._since = time.monotonic()

    def came(self, count: int) -> None:
        """Count bytes."""
        self._done += count
        now = time.monotonic()
        if now - self._since >= SAY_S:
            rate = size_text(int((self._done - self._marked) / (now - self._since)))
            share = 100 * self._done // max(1, self._total)
            self._say(f"{self.file}: {share} % of all, {size_text(self._done)}, {rate}/s")
            self._marked, self._since = self._done, now


@contextmanager
def _locked(folder: Path, say: Callable[[str], None], stopped: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock of `folder`, for which processes wait that download into it. Raises Stopped, OSError."""
    with open(folder / LOCK, "wb", opener=no_link) as file:
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waited:
                    say(f"another process downloads into {folder}; waiting for it")
                waited = True
                if stopped():
                    raise Stopped from None
                time.sleep(0.2)
        yield


def _complete(folder: Path) -> bool:
    """Return whether the marker is there, and every file of it with its size."""
    try:
        marker = msgspec.json.decode((folder / MARKER).read_bytes(), type=_Marker)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return all(_has(folder / name, size) for name, size in marker.files.items())


def _mark(folder: Path, files: list[RemoteFile]) -> None:
    """Write the marker, behind all files on the disk, at once or not at all. Raises OSError."""
    os.sync()
    draft = folder / f"{MARKER}.{os.getpid()}"
    with open(draft, "wb", opener=no_link) as file:
        file.write(msgspec.json.encode(_Marker({one.path: one.size for one in files})))
    draft.replace(folder / MARKER)


def _hasher(file: RemoteFile) -> Any:
    return hashlib.sha256() if file.sha256 else git_hasher(file.size)


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
