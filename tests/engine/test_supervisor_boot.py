"""From a profile to one boot's configuration, and what is refused before any process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO, NoReturn

import msgspec
import pytest
from ppengine.checkpoint.model_spec import CheckpointError
from ppengine.common.config import ConfigError, Profile, profiles_dir
from ppengine.common.profile_sections import ModelConfig, ParallelConfig
from ppengine.common.tier_config import BackendConfig, TierConfig
from ppengine.offline import launch
from ppengine.supervisor.boot import engine_config, parse_profile
from ppengine.supervisor.claims import ClaimError, check_socket_path

TINY = str(profiles_dir() / "models" / "tiny")


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def profile(**fields: object) -> Profile:
    return Profile(
        **{"name": "boot", "model": ModelConfig(path=TINY), "parallel": ParallelConfig(pipeline=2), **fields}
    )


def test_profile_becomes_concrete(runtime: Path) -> None:
    config = engine_config(profile(), "mine")
    assert config.name == "mine"
    assert len(config.id) == 6
    assert set(config.id) <= set("0123456789abcdef")
    assert len(config.epoch) == 32
    assert config.run_dir == str(runtime / "ppconsole" / config.id)
    assert config.ring_dir == f"/dev/shm/ppconsole-{os.getuid()}-{config.id}"
    assert config.layers[0][0] == 0
    assert config.layers[0][1] == config.layers[1][0] > 0
    assert config.max_model_len >= 128
    assert not Path(config.run_dir).exists()


def test_two_boots_differ() -> None:
    first, second = engine_config(profile(), None), engine_config(profile(), None)
    assert first.name == second.name == "boot"
    assert first.id != second.id
    assert first.epoch != second.epoch


def test_each_place_has_a_store_if_there_are_backends() -> None:
    tiers = TierConfig(host=True, backends={"disk": BackendConfig(kind="files", url="/data/kv")})
    parallel = ParallelConfig(pipeline=2, tensor=2)
    assert engine_config(profile(parallel=parallel), None).store_roles == []
    roles = engine_config(profile(parallel=parallel, tiers=tiers), None).store_roles
    assert roles == ["store0", "store0.1", "store1", "store1.1"]


def test_stores_of_other_nodes_have_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    tiers = TierConfig(host=True, backends={"disk": BackendConfig(kind="files", url="/data/kv")})
    parallel = ParallelConfig(pipeline=2, executor="ray", listen="tcp://10.0.0.1:7000")
    config = engine_config(profile(parallel=parallel, tiers=tiers), None)
    assert config.store_roles == ["store0", "store1"]
    assert msgspec.structs.replace(config, node="b").endpoint("stores") == "tcp://10.0.0.1:7004"


@pytest.mark.parametrize("name", ["", "a b", "../up", "\x1b[31m", "-x", "n" * 65])
def test_name_with_other_signs_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"engine name is .*; it must be 1 to 64 letters, digits"):
        engine_config(profile(), name)


def test_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 1000000; this model serves at most \d+ tokens"):
        engine_config(profile(model=ModelConfig(path=TINY, max_model_len=1_000_000)), None)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pipeline is 99; the model has \d+ layers"):
        engine_config(profile(parallel=ParallelConfig(pipeline=99)), None)


def test_folder_without_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        engine_config(profile(model=ModelConfig(path=str(tmp_path))), None)


def test_dummy_weights_need_no_weight_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((Path(TINY) / "config.json").read_bytes())
    dummy = ModelConfig(path=str(tmp_path), load_format="dummy")
    assert engine_config(profile(model=dummy), None).layers == engine_config(profile(), None).layers
    with pytest.raises(CheckpointError, match="no weights"):
        engine_config(profile(model=ModelConfig(path=str(tmp_path))), None)


def test_profile_travels_as_json() -> None:
    given = profile()
    assert parse_profile(msgspec.json.encode(given)) == given


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "--profile-json: Input data was truncated"),
        ("[]", "--profile-json: a profile is an object, this is list"),
        ('{"name": "x", "modle": {}}', "unknown key modle; did you mean model?"),
    ],
)
def test_json_that_is_no_profile_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_profile(text.encode())
    assert error in str(caught.value)


def test_socket_path_of_107_bytes_is_the_longest() -> None:
    check_socket_path(Path("/" + "r" * 98))
    with pytest.raises(ClaimError, match=r"has 108 bytes, a socket path at most 107; .* shorter by 1"):
        check_socket_path(Path("/" + "r" * 99))


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        ([], 2, "error: give a PROFILE or --profile-json, one of them"),
        (["tiny", "--profile-json", "{}"], 2, "error: give a PROFILE or --profile-json, one of them"),
        (["--profile-json", "{}", "--set", "name=x"], 2, "error: --set belongs to a PROFILE"),
        (["--profile-json", "/nowhere"], 2, "error: --profile-json: /nowhere: No such file or directory"),
        (["none-such"], 2, "error: no profile 'none-such'; bundled: "),
        (["tiny", "--set", "memory.utilization=1.5"], 2, "memory.utilization is 1.5; it must be above 0 and at most 1"),
        (["tiny", "--set", "model.path=/nowhere"], 1, "error: /nowhere: no config.json"),
    ],
)
def test_refusals_are_one_line_and_a_stopped_event(arguments: list[str], code: int, error: str) -> None:
    done = subprocess.run([sys.executable, "-m", "ppengine.supervisor", *arguments], capture_output=True, text=True)
    assert done.returncode == code
    (line,) = done.stderr.splitlines()
    assert error in line
    stopped = msgspec.json.decode(done.stdout)
    assert stopped == {"event": "stopped", "code": code, "reason": line.removeprefix("error: ")}


def test_a_profile_of_a_python_program_is_in_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user can read the words of a process."""

    class StoppedError(Exception):
        pass

    def start(words: list[str], errors: IO[str], line: int) -> NoReturn:
        file = Path(words[words.index("--profile-json") + 1])
        assert parse_profile(file.read_bytes()) == given
        assert file.stat().st_mode & 0o077 == 0
        assert not any("s3cret" in word for word in words)
        raise StoppedError

    store = BackendConfig(kind="valkey", url="redis://:s3cret@10.0.0.1")
    given = profile(tiers=TierConfig(host=True, backends={"far": store}))
    monkeypatch.setattr(launch, "run_supervisor", start)
    with pytest.raises(StoppedError):
        launch.LocalEngine(given)
