"""The hash of a model's weights: what it depends on, and what is read again."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from queue import SimpleQueue

import msgspec
import pytest
from ppengine.common.config import EngineConfig, Profile, profiles_dir
from ppengine.common.profile_sections import ModelConfig
from ppengine.protocol.store_messages import Weights
from ppengine.store import weight_hash
from ppengine.store.weight_hash import weights_digest

TINY = profiles_dir() / "models" / "tiny"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are hashed."""
    names: list[str] = []
    sum_of = weight_hash._sum_of

    def note(path: Path, before: os.stat_result) -> str:
        names.append(path.name)
        return sum_of(path, before)

    monkeypatch.setattr(weight_hash, "_sum_of", note)
    return names


def config(folder: Path, load_format: str = "auto") -> EngineConfig:
    profile = Profile(name="t", model=ModelConfig(path=str(folder), load_format=load_format))  # type: ignore[arg-type]
    return EngineConfig(
        id="e", name="t", epoch="p", profile=profile, model_path=str(folder), model_type="opt", layers=[(0, 2)],
        max_model_len=64, run_dir=str(folder), ring_dir=str(folder), started_wall=0.0,
    )  # fmt: skip


def test_files_are_hashed_once(model: Path, hashed: list[str]) -> None:
    first = weights_digest(config(model))
    assert len(first) == 16 and hashed == ["model.safetensors"]
    assert weights_digest(config(model)) == first and len(hashed) == 1
    (kept,) = (Path(os.environ["XDG_STATE_HOME"]) / "ppconsole/weights").iterdir()
    assert kept.stat().st_mode & 0o077 == 0
    kept.write_bytes(b"[{")
    assert weights_digest(config(model)) == first and len(hashed) == 2


def test_a_copy_elsewhere_has_the_same_hash(model: Path) -> None:
    assert weights_digest(config(model)) == weights_digest(config(TINY))


def test_a_changed_file_is_hashed_again(model: Path, hashed: list[str]) -> None:
    first = weights_digest(config(model))
    path = model / "model.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    second = weights_digest(config(model))
    assert second != first and len(hashed) == 2
    # The same bytes, size and time under another inode, as a copy that keeps times makes.
    shutil.copy2(path, model / "copy")
    (model / "copy").replace(path)
    assert weights_digest(config(model)) == second and len(hashed) == 3


def overwrite(path: Path, data: bytes) -> None:
    """Write other bytes of the same length in place and set the time of the content back, as a copy may do."""
    before = path.stat()
    # A kernel's clock has ticks of some ms.
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        with path.open("r+b") as file:
            file.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)


def test_a_file_whose_time_was_set_back_is_hashed_again(model: Path, hashed: list[str]) -> None:
    path = model / "model.safetensors"
    first, data = weights_digest(config(model)), path.read_bytes()
    overwrite(path, data[:-1] + bytes([data[-1] ^ 1]))
    assert weights_digest(config(model)) != first and len(hashed) == 2


def test_a_changed_config_is_another_model(model: Path) -> None:
    first = weights_digest(config(model))
    (model / "config.json").write_bytes((model / "config.json").read_bytes() + b"\n")
    assert weights_digest(config(model)) != first


def test_dummy_weights_need_no_file(model: Path, hashed: list[str]) -> None:
    real = weights_digest(config(model))
    (model / "model.safetensors").unlink()
    dummy = weights_digest(config(model, "dummy"))
    assert len(dummy) == 16 and dummy != real and hashed == ["model.safetensors"]
    data = msgspec.json.decode((model / "config.json").read_bytes())
    (model / "config.json").write_bytes(msgspec.json.encode({**data, "vocab_size": 7}))
    assert weights_digest(config(model, "dummy")) != dummy


def test_a_file_that_changes_meanwhile_is_an_error(model: Path) -> None:
    path = model / "model.safetensors"
    before = path.stat()
    overwrite(path, path.read_bytes())
    with pytest.raises(OSError, match="changed while it was read"):
        weight_hash._sum_of(path, before)


def test_a_missing_model_is_reported_in_a_line(model: Path) -> None:
    reports: SimpleQueue[Weights] = SimpleQueue()
    shutil.rmtree(model)
    weight_hash.start(config(model), reports.put)
    report = reports.get(timeout=60)
    assert report.digest == b"" and "config.json" in report.error and "\n" not in report.error
