"""Objects as files: `FOLDER/PART/NAMESPACE/xx/NAME`, where xx are the last two characters of the name.

Several engines may share a folder. A file is written as a draft and renamed, so it is whole or absent, also after a
kill. Nothing is flushed to the disk: after a loss of power the checksum shows a torn file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from typing_extensions import override

from ppengine.store.backend import Backend, BackendError, BackendOptions, Layout, Usage
from ppengine.store.backends.direct_io import can_direct, read_file, write_file
from ppengine.store.backends.draft_folder import DraftFolder, sweep
from ppengine.store.lru_index import LruIndex

log = logging.getLogger("ppengine.store")

SCAN_S = 60.0
"""Seconds after which the files are listed again, for those of other engines."""
TOUCH_S = 60.0
"""Seconds within which further reads of a file do not change its time."""
EVICT_MOST = 64
"""Objects that are chosen at once. Few, so that uses meanwhile still count."""
DRAFTS = "drafts"


class FilesBackend(Backend):
    """Files of one folder. The time of change of a file is that of its last use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._index = LruIndex()
        self._times: dict[str, float] = {}
        """Times of the files as this process knows them, in Unix seconds."""
        self._scanned = 0.0
        self._scanning = threading.Lock()
        self._evicted = 0
        self._drafts: DraftFolder | None = None
        self._draft_lock = threading.Lock()

    @override
    def open(self, config: BackendOptions, layout: Layout) -> None:
        self._folder, self._quota, self._parts = Path(config.url), config.quota_bytes, layout.parts
        if not self._folder.is_absolute():
            raise BackendError("url must be the absolute path of a folder")
        self._make_root()
        if removed := sweep(self._folder / DRAFTS):
            log.info("%s: removed the drafts of %d stores that were killed", config.name, removed)
        self._drafts = DraftFolder(self._folder / DRAFTS)
        try:
            self._direct = can_direct(self._drafts.path)
            self._scan()
        except BaseException:
            self.close()
            raise
        how = "O_DIRECT" if self._direct else "page cache"
        text = "%s: %s, by %s, with %d objects of %d bytes"
        log.info(text, config.name, self._folder, how, len(self._index), self._index.used_bytes)

    @override
    def find(self, keys: Sequence[str]) -> list[bool]:
        return [self._path(key).exists() for key in keys]

    @override
    def read(self, key: str, into: memoryview) -> int:
        path = self._path(key)
        try:
            size = read_file(path, into, direct=self._direct)
        except FileNotFoundError:
            self._forget(key)
            raise KeyError(key) from None
        self._use(key, path)
        return size

    @override
    def write(self, key: str, data: memoryview) -> None:
        if len(data) > self._quota:
            raise BackendError(f"an object has {len(data)} bytes, the quota is {self._quota}")
        self._scan_if_old()
        try:
            self._reserve(key, len(data))
            try:
                self._put(key, data)
            except OSError as error:
                if error.errno != errno.ENOSPC or not self._shrink(key, len(data)):
                    raise
                self._put(key, data)
        except BaseException:
            self._forget(key)
            raise
        with self._lock:
            # A scan may have missed it.
            self._index.put(key, len(data))

    @override
    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            for each in self._below(key) if key.endswith("/") else [key]:
                self._remove(each)

    @override
    def usage(self) -> Usage:
        # An engine that writes nothing sees what others do in a shared folder, too.
        self._scan_if_old()
        return Usage(self._index.used_bytes, self._evicted)

    @override
    def close(self) -> None:
        if self._drafts is not None:
            self._drafts.close()
            self._drafts = None

    # --- files ----------------------------------------------------------------------------------------------

    def _make_root(self) -> None:
        """Make the folder if it is missing. Raises BackendError for one of others."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._folder.stat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            text = f"{self._folder} has mode {found.st_mode & 0o777:o} and owner {found.st_uid}"
            raise BackendError(f"{text}; it must be yours alone: chmod 700")

    def _path(self, key: str) -> Path:
        return self._folder / self._place(key)

    def _place(self, key: str) -> str:
        """Return the path of an object in the folder."""
        folder, _, name = key.rpartition("/")
        if not folder or any(part.startswith(".") or not part for part in key.split("/")):
            raise BackendError(f"{key!r} is no key")
        return f"{folder}/{name[-2:]}/{name}"

    def _has_place(self, key: str, place: str) -> bool:
        """Return whether an object is at `place`, and no file of another program as `.nfs0001` of NFS."""
        try:
            return self._place(key) == place
        except BackendError:
            return False

    def _put(self, key: str, data: memoryview) -> None:
        """Write an object, also after someone has emptied the folder. Raises OSError."""
        drafts = self._drafts
        assert drafts is not None, "it is open"
        try:
            self._put_draft(drafts, key, data)
        except FileNotFoundError:
            self._put_draft(self._replace_drafts(drafts), key, data)

    def _replace_drafts(self, gone: DraftFolder) -> DraftFolder:
        """Make the folder of drafts again, unless another thread has."""
        with self._draft_lock:
            if self._drafts is gone and not gone.path.exists():
                log.warning("%s: its folder of drafts was removed", self._folder)
                self._make_root()
                self._drafts = DraftFolder(self._folder / DRAFTS)
                gone.close()
                # Objects may be gone, too.
                self._scanned = -SCAN_S
            assert self._drafts is not None, "it is open"
            return self._drafts

    def _put_draft(self, drafts: DraftFolder, key: str, data: memoryview) -> None:
        """Write a draft and rename it. Raises OSError, FileNotFoundError for a folder that is no more."""
        draft, path = drafts.draft(), self._path(key)
        try:
            write_file(draft, data, direct=self._direct)
            # The kernel's own times are as coarse as its ticks.
            os.utime(draft, ns=(time.time_ns(),) * 2)
            try:
                draft.rename(path)
            except FileNotFoundError:
                self._make_folders(path.parent)
                draft.rename(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _shrink(self, key: str, size: int) -> bool:
        """Make room on a full disk: evict objects of `size` bytes in all. Returns False without any."""
        with self._lock:
            chosen = [each for each in self._index.oldest(size, self._index.used_bytes) if each != key]
        for each in chosen:
            self._remove(each, evicts=True)
        return bool(chosen)

    def _make_folders(self, folder: Path) -> None:
        if folder != self._folder:
            self._make_folders(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)

    def _below(self, prefix: str) -> list[str]:
        return [key for key, _ in self._list(self._folder / prefix, prefix.rstrip("/"))]

    def _list(self, folder: Path, key: str) -> Iterator[tuple[str, os.stat_result]]:
        """Yield key and status of the objects below `folder`, whose key is `key`. Strange files are left alone."""
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            # Files of another process come and go meanwhile.
            with contextlib.suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    own = f"{key.rpartition('/')[0]}/{entry.name}"
                    if self._has_place(own, f"{key}/{entry.name}"):
                        yield own, entry.stat(follow_symlinks=False)
                elif entry.is_dir(follow_symlinks=False):
                    yield from self._list(Path(entry.path), f"{key}/{entry.name}")

    def _scan_if_old(self) -> None:
        if time.monotonic() - self._scanned > SCAN_S:
            self._scan()

    def _scan(self) -> None:
        """List the files of this store's parts, as other engines may have changed them."""
        with self._scanning:
            self._scanned = time.monotonic()
            files = [each for part in self._parts for each in self._list(self._folder / part, part)]
            files.sort(key=lambda each: each[1].st_mtime_ns)
            with self._lock:
                self._index.replace((key, status.st_size) for key, status in files)
                self._times = {key: status.st_mtime for key, status in files}

    def _use(self, key: str, path: Path) -> None:
        """Note a use in the index, and once a minute in the file's time."""
        now = time.time()
        with self._lock:
            self._index.touch(key)
            if 0 <= now - self._times.get(key, 0.0) < TOUCH_S:
                return
            self._times[key] = now
        with contextlib.suppress(OSError):
            os.utime(path, (now, now))

    def _reserve(self, key: str, size: int) -> None:
        """Enter an object that is about to be written, and evict what has no room beside it."""
        with self._lock:
            self._index.put(key, size)
            self._times[key] = time.time()
        # Each turn evicts objects, or finds that another engine has used them.
        for _ in range(len(self._index)):
            with self._lock:
                chosen = {old: self._times.get(old, 0.0) for old in self._index.oldest(0, self._quota, EVICT_MOST)}
            if not chosen:
                return
            for old, known in chosen.items():
                self._evict(old, known)

    def _evict(self, key: str, known: float) -> None:
        """Delete an object for the quota, unless another engine has used it since the time that is `known` here."""
        with contextlib.suppress(FileNotFoundError):
            used = self._path(key).stat().st_mtime
            if used > known + TOUCH_S / 2:
                with self._lock:
                    self._index.touch(key)
                    self._times[key] = used
                return
        self._remove(key, evicts=True)

    def _remove(self, key: str, *, evicts: bool = False) -> None:
        self._path(key).unlink(missing_ok=True)
        with self._lock:
            # Another thread may have chosen it, too.
            self._evicted += evicts and key in self._index
            self._index.remove(key)
            self._times.pop(key, None)

    def _forget(self, key: str) -> None:
        with self._lock:
            self._index.remove(key)
            self._times.pop(key, None)
