"""Each backend against the same rules, and what is particular of files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import pytest
from ppengine.store.backend import PAGE, Backend, BackendError, Layout, Usage
from ppengine.store.backend_kinds import GROUP, known_kinds, make_backend
from ppengine.store.backends import files_backend
from ppengine.store.backends.direct_io import can_direct
from ppengine.store.backends.files_backend import FilesBackend
from ppengine.store.backends.memory_backend import OWN_PAGES_BYTES, MemoryBackend
from ppengine.store.lru_index import LruIndex
from store_contract import LAYOUT, SIZE, Contract, page_view, read


def memory(folder: Path) -> Contract:
    return Contract(MemoryBackend, "", persistent=False)


def files(folder: Path) -> Contract:
    return Contract(FilesBackend, str(folder / "kv"))


def cached_files(folder: Path) -> Contract:
    class CachedFiles(FilesBackend):
        """As on a file system without O_DIRECT."""

        def open(self, *arguments: object) -> None:
            super().open(*arguments)  # type: ignore[arg-type]
            self._direct = False

    return Contract(CachedFiles, str(folder / "kv"))


KINDS = [memory, files, cached_files]


@pytest.fixture(params=KINDS)
def contract(request: pytest.FixtureRequest, tmp_path: Path) -> Contract:
    made: Callable[[Path], Contract] = request.param
    return made(tmp_path)


def test_objects(contract: Contract) -> None:
    contract.check_objects()


def test_clear(contract: Contract) -> None:
    contract.check_clear()


def test_quota(contract: Contract) -> None:
    contract.check_quota()


def test_reopen(contract: Contract) -> None:
    contract.check_reopen()


@pytest.mark.parametrize("kind", [files, cached_files])
def test_shares(kind: Callable[[Path], Contract], tmp_path: Path) -> None:
    kind(tmp_path).check_shares()


def test_unknown_kinds_are_refused_with_those_that_are_there() -> None:
    with pytest.raises(BackendError, match="no backend of kind tape; there are memory, files, valkey, s3"):
        make_backend("tape")
    assert isinstance(make_backend("files"), FilesBackend)


# --- memory -----------------------------------------------------------------------------------------------------


def test_a_place_of_kind_memory_is_refused() -> None:
    with pytest.raises(BackendError, match=r"^kind memory has no url"):
        Contract(lambda: make_backend("memory"), "/kv").open()


def test_a_new_object_takes_the_pages_of_an_evicted_one_of_its_size() -> None:
    backend = MemoryBackend()
    contract = Contract(lambda: backend, "", persistent=False)
    contract.open(quota=2 * OWN_PAGES_BYTES + PAGE)
    first, second, third, small = (os.urandom(size) for size in (OWN_PAGES_BYTES,) * 3 + (PAGE,))
    for name, data in (("a", first), ("b", second), ("c", small)):
        backend.write(name, memoryview(data))
    evicted, kept = backend._objects["a"], backend._objects["b"]
    assert isinstance(evicted, mmap) and isinstance(kept, mmap) and isinstance(backend._objects["c"], bytes)
    backend.write("d", memoryview(third))
    assert backend._objects["d"] is evicted and backend.find(["a", "b", "c"]) == [False, True, True]
    backend.write("d", memoryview(first))
    backend.write("b", memoryview(first + small))
    assert backend._objects["d"] is evicted and backend._objects["b"] is not kept, "it has another size"
    assert read(backend, "d", OWN_PAGES_BYTES) == first
    assert read(backend, "b", len(first + small)) == first + small


def test_an_object_is_read_before_a_writer_may_take_its_pages() -> None:
    backend, seen = MemoryBackend(), []

    class Into(bytearray):
        def __setitem__(self, where: object, data: object) -> None:
            seen.append(backend._lock.locked())

    Contract(lambda: backend, "", persistent=False).open(quota=OWN_PAGES_BYTES)
    backend.write("a", memoryview(os.urandom(OWN_PAGES_BYTES)))
    assert backend.read("a", Into(OWN_PAGES_BYTES)) == OWN_PAGES_BYTES  # type: ignore[arg-type]
    assert seen == [True]


# --- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "words"), [(0o755, "chmod 700"), (0o770, "chmod 700")])
def test_a_folder_of_others_is_refused(tmp_path: Path, mode: int, words: str) -> None:
    contract = files(tmp_path)
    Path(contract.url).mkdir(mode=0o700)
    Path(contract.url).chmod(mode)
    with pytest.raises(BackendError, match=words):
        contract.open()


def test_a_made_folder_is_of_its_user_alone(tmp_path: Path) -> None:
    backend = files(tmp_path).open()
    backend.write("0.0/ab/0123", page_view(bytes(SIZE)))
    found = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    assert len(found) > 5 and all(not path.stat().st_mode & 0o077 for path in found)
    backend.close()


def test_a_relative_folder_and_strange_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="absolute path"):
        Contract(FilesBackend, "kv").open()
    with pytest.raises(BackendError, match="absolute path") as caught:
        Contract(FilesBackend, "redis://:se0cret@host").open()
    assert "se0cret" not in str(caught.value)
    backend = files(tmp_path).open()
    for key in ("../x", "a/../b", "a//b", "/a/b", "name", "a/.b"):
        with pytest.raises(BackendError, match="is no key"):
            backend.write(key, memoryview(b"x"))
    backend.close()


def test_buffers_that_are_not_aligned_are_written_too(tmp_path: Path) -> None:
    backend = files(tmp_path).open()
    data = memoryview(bytearray(os.urandom(2 * SIZE + 1)))[1:]
    backend.write("0.0/ab/1", data)
    into = memoryview(bytearray(2 * SIZE + 1))[1:]
    assert backend.read("0.0/ab/1", into) == 2 * SIZE and into == data
    backend.close()


def test_the_probe_leaves_nothing(tmp_path: Path) -> None:
    assert isinstance(can_direct(tmp_path), bool) and list(tmp_path.iterdir()) == []


def test_engines_that_share_a_folder_leave_each_other_whole(tmp_path: Path) -> None:
    """One evicts and deletes objects that the other has listed, and keeps those that the other uses."""
    contract = files(tmp_path)
    first, second = contract.open(quota=4 * SIZE), contract.open(quota=4 * SIZE)
    keys = [f"0.0/ab/{number}" for number in range(6)]
    for key in keys[:4]:
        first.write(key, page_view(bytes(SIZE)))
    second.close()
    second = contract.open(quota=4 * SIZE)
    # The first uses an object long after the second has listed it; the second evicts the next one.
    path = Path(contract.url) / "0.0/ab/0/0"
    os.utime(path, (path.stat().st_mtime + 100,) * 2)
    second.write(keys[4], page_view(bytes(SIZE)))
    assert first.find(keys) == [True, False, True, True, True, False]
    with pytest.raises(KeyError):
        read(first, keys[1])
    second.delete([keys[2]])
    first.delete([keys[2]])
    assert read(second, keys[3]) == bytes(SIZE)
    second.close()
    assert read(first, keys[4]) == bytes(SIZE), "the drafts of one are not those of the other"
    first.write(keys[5], page_view(bytes(SIZE)))
    first.close()


def test_a_full_disk_evicts_the_oldest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = files(tmp_path).open()
    keys = [f"0.0/ab/{number}" for number in range(4)]
    for key in keys[:3]:
        backend.write(key, page_view(bytes(SIZE)))
    room = iter([False, True, False, False])

    def write_file(path: Path, data: memoryview, *, direct: bool) -> None:
        if not next(room):
            path.write_bytes(data[:4096])
            raise OSError(errno.ENOSPC, "No space left on device")
        path.write_bytes(data)

    monkeypatch.setattr(files_backend, "write_file", write_file)
    backend.write(keys[3], page_view(bytes(SIZE)))
    assert backend.find(keys) == [False, True, True, True]
    assert backend.usage() == Usage(3 * SIZE, 1)
    with pytest.raises(OSError, match="No space left"):
        backend.write("0.0/ab/9", page_view(bytes(SIZE)))
    assert len(list((tmp_path / "kv/drafts").rglob("*"))) == 2, "no draft is left beside folder and lock"
    backend.close()


@pytest.mark.parametrize("all_of_it", [False, True])
def test_a_folder_that_was_emptied_is_written_again(tmp_path: Path, all_of_it: bool) -> None:
    contract = files(tmp_path)
    backend, other = contract.open(), contract.open()
    for number in range(2):
        backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
    for path in [tmp_path / "kv"] if all_of_it else list((tmp_path / "kv").iterdir()):
        shutil.rmtree(path)
    for number in range(2, 4):
        backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
    other.write("0.0/ab/4", page_view(bytes(SIZE)))
    assert backend.find([f"0.0/ab/{number}" for number in range(5)]) == [False, False, True, True, True]
    assert backend.usage().used_bytes == 2 * SIZE, "those that were removed count no longer"
    assert len(list((tmp_path / "kv/drafts").iterdir())) == 2, "each has a folder of its own"
    assert (tmp_path / "kv").stat().st_mode & 0o077 == 0
    backend.close()
    other.close()
    assert list((tmp_path / "kv/drafts").iterdir()) == []


def test_folders_of_another_program_are_left_alone(tmp_path: Path) -> None:
    """A profile may name a home folder by mistake, and have drafts of letters there."""
    (tmp_path / "kv").mkdir(mode=0o700)
    letters = [tmp_path / "kv/drafts/letters/a.txt", tmp_path / "kv/drafts/0123456789ab/b.txt"]
    for letter in letters:
        letter.parent.mkdir(parents=True)
        letter.write_text("Dear")
    killed = [tmp_path / "kv/drafts/ab0123456789", tmp_path / "kv/drafts/ba0123456789"]
    for folder in killed:
        folder.mkdir()
    (killed[0] / "lock").touch()
    (killed[0] / "1").write_bytes(bytes(SIZE))
    backend = files(tmp_path).open()
    assert all(letter.read_text() == "Dear" and len(list(letter.parent.iterdir())) == 1 for letter in letters)
    assert not any(folder.exists() for folder in killed), "these are of stores that were killed"
    backend.close()


def test_a_smaller_quota_evicts_each_object_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more objects than the quota has room for are looked at about once each."""
    contract, looks, oldest = files(tmp_path), 0, LruIndex.oldest
    backend = contract.open()
    for number in range(300):
        backend.write(f"0.0/ab/{number}", memoryview(bytes(10)))
    backend.close()

    def note(index: LruIndex, *arguments: int) -> list[str]:
        nonlocal looks
        chosen = oldest(index, *arguments)
        looks += len(chosen)
        return chosen

    monkeypatch.setattr(LruIndex, "oldest", note)
    backend = contract.open(quota=50)
    backend.write("0.0/ab/300", memoryview(bytes(10)))
    assert backend.find([f"0.0/ab/{number}" for number in range(295, 301)]) == [False, *[True] * 5]
    assert backend.usage() == Usage(50, 296) and looks == 296
    backend.close()


def test_files_that_are_no_objects_are_left_alone(tmp_path: Path) -> None:
    """They were never written here: the quota and a clear are about objects alone."""
    contract, keys = files(tmp_path), [f"0.0/ab/{number}" for number in range(3)]
    backend = contract.open()
    backend.write(keys[0], page_view(bytes(SIZE)))
    backend.close()
    part = tmp_path / "kv/0.0"
    strange = [part / "ab/0/.nfs0001", part / "ab/0/1", part / "ab/0/0~", part / "ab/note", part / "note"]
    for path in strange:
        path.write_bytes(bytes(SIZE))
        os.utime(path, (1, 1))
    backend = contract.open(quota=2 * SIZE)
    assert backend.usage().used_bytes == SIZE
    for key in keys[1:]:
        backend.write(key, page_view(bytes(SIZE)))
    assert backend.find(keys) == [False, True, True] and backend.usage() == Usage(2 * SIZE, 1)
    backend.delete(["0.0/ab/"])
    assert backend.find(keys) == [False] * 3 and backend.usage().used_bytes == 0
    assert all(path.exists() for path in strange)
    backend.close()


def test_tries_to_open_that_fail_leave_no_descriptor_and_no_drafts(tmp_path: Path) -> None:
    """A lane tries again for as long as the engine runs."""
    contract = files(tmp_path)
    contract.open().close()
    (tmp_path / "kv" / "0.0").symlink_to("0.0")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(OSError, match="symbolic links"):
            contract.open()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert list((tmp_path / "kv" / "drafts").iterdir()) == []


def test_a_write_that_fails_before_its_file_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = files(tmp_path).open(quota=2 * SIZE)
    for number in range(2):
        backend.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))

    def evict(key: str, known: float) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(backend, "_evict", evict)
    for _ in range(2):
        with pytest.raises(PermissionError):
            backend.write("0.0/ab/2", page_view(bytes(SIZE)))
    assert backend.usage().used_bytes == 2 * SIZE
    backend.close()


def test_files_of_other_engines_count_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contract = files(tmp_path)
    first, second = contract.open(quota=2 * SIZE), contract.open()
    for number in range(4):
        second.write(f"0.0/ab/{number}", page_view(bytes(SIZE)))
    assert first.usage().used_bytes == 0
    monkeypatch.setattr(files_backend, "SCAN_S", -1.0)
    assert first.usage().used_bytes == 4 * SIZE, "also while it writes nothing"
    first.write("0.0/ab/4", page_view(bytes(SIZE)))
    assert first.usage().used_bytes == 2 * SIZE
    assert sum(first.find([f"0.0/ab/{number}" for number in range(5)])) == 2
    first.close()
    second.close()


WRITER = """
import sys
from ppengine.store.backend import BackendOptions, Layout
from ppengine.store.backends.files_backend import FilesBackend
from store_contract import page_view
backend = FilesBackend()
backend.open(BackendOptions("b", sys.argv[1], 2**30, 5.0), Layout(("0.0",)))
print("open", flush=True)
for number in range(10**9):
    # Objects replace each other: those of one letter are whole.
    backend.write(f"0.0/ab/{number % 8}", page_view(bytes([65 + number % 26]) * (1 << 20)))
    if number == 8:
        print("eight", flush=True)
"""


def test_a_kill_in_the_middle_of_writes_leaves_whole_objects(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    for _ in range(4):
        path = os.pathsep.join([*sys.path, str(Path(__file__).parent)])
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
        )
        assert child.stdout is not None
        assert [child.stdout.readline(), child.stdout.readline()] == [b"open\n", b"eight\n"]
        child.send_signal(signal.SIGKILL)
        child.wait(30)
        child.stdout.close()
        backend = Contract(FilesBackend, str(folder)).open(layout=Layout(("0.0",)))
        (left,) = (folder / files_backend.DRAFTS).iterdir()
        assert [path.name for path in left.iterdir()] == ["lock"], "only its own folder of drafts is left"
        keys = [f"0.0/ab/{number}" for number in range(8)]
        for key in keys:
            data = read(backend, key, 1 << 20)
            assert len(data) == 1 << 20 and data == data[:1] * (1 << 20), key
        assert backend.usage().used_bytes == 8 << 20
        backend.close()


def test_a_backend_is_made_for_each_kind() -> None:
    assert all(isinstance(make_backend(kind), Backend) for kind in ("memory", "files"))
    assert LAYOUT.alignment == 4096


# --- backends of other packages ---------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Contract:
    """The example of docs/backends.md, installed as a package."""
    text = (Path(__file__).parents[2] / "docs/backends.md").read_text()
    (tmp_path / "my_package.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    points = tmp_path / "my_package-1.dist-info/entry_points.txt"
    points.parent.mkdir()
    table = text.partition(f'[project.entry-points."{GROUP}"]')[2].partition("```")[0]
    points.write_text(f"[{GROUP}]{table.replace(chr(34), '')}")
    (points.parent / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return Contract(lambda: make_backend("sqlite"), str(tmp_path / "kv.db"))


def test_the_example_of_the_documentation_keeps_the_rules(example: Contract) -> None:
    assert len((Path(example.url).parent / "my_package.py").read_text().splitlines()) <= 60
    example.check_objects()
    Path(example.url).unlink()
    for check in (example.check_clear, example.check_quota, example.check_reopen, example.check_shares):
        check()
        Path(example.url).unlink()


def test_known_kinds_are_those_that_can_be_made(example: Contract, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = known_kinds()
    assert list(kinds) == ["memory", "files", "valkey", "s3", "sqlite"]
    for kind in [kind for kind, lack in kinds.items() if not lack]:
        make_backend(kind)
    monkeypatch.setattr("ppengine.store.backend_kinds.find_spec", lambda package: None)
    assert known_kinds()["s3"] == "needs a package: pip install 'ppconsole[s3]' (there is no obstore)"
    assert not known_kinds()["files"]


def test_an_entry_point_that_is_no_backend_is_refused(example: Contract) -> None:
    (points,) = Path(example.url).parent.rglob("entry_points.txt")
    points.write_text(f"[{GROUP}]\nsqlite = pathlib:Path\nmemory = pathlib:Path\n")
    with pytest.raises(BackendError, match=r"makes \w+Path, which is no Backend"):
        make_backend("sqlite")
    assert isinstance(make_backend("memory"), MemoryBackend), "a built-in kind cannot be replaced"
