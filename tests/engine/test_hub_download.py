"""Models of both hubs: downloaded in part and whole, resumed, checked, and refused in one line."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from email.message import Message
from io import BytesIO
from pathlib import Path
from urllib.request import Request

import pytest
from hub_server import COMMIT, Hub, served
from ppengine.common.config import ConfigError, build_profile
from ppengine.common.profile_sections import ModelConfig
from ppengine.hub import fetch, transfer
from ppengine.hub.fetch import MARKER, PARTS, fetch_model
from ppengine.hub.transfer import HubError, Stopped

WEIGHTS = bytes(range(256)) * 40
FILES = {
    "config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "model.safetensors": WEIGHTS,
    "README.md": b"# A model", "modeling_own.py": b"raise SystemExit", "pytorch_model.bin": b"\x80\x04.",
    "onnx/model.safetensors": b"elsewhere",
}  # fmt: skip
READ = {"config.json", "tokenizer.json", "model.safetensors"}
SOURCES = ["huggingface", "modelscope"]
Model = Callable[..., ModelConfig]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub(dict(FILES))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    real = transfer.Transfer.__init__
    monkeypatch.setattr(transfer.Transfer, "__init__", lambda self, *given: real(self, *given, pause_s=0.0))
    with served(found) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", address + "/")
        yield found


def model_of(source: str, **fields: str) -> ModelConfig:
    """Return the section of a profile, as it is read from a file."""
    data = {"name": "x", "model": {"source": source, "id": "org/model", **fields}}
    return build_profile(data, Path("/nowhere")).model


def fetched(model: ModelConfig, **options: bool) -> list[str]:
    """Fetch, and return the lines of progress."""
    lines: list[str] = []
    fetch_model(model, lines.append, **options)
    return lines


def downloads(hub: Hub) -> list[str]:
    """Return what was requested, listings left out, without the part before the file."""
    paths = [path for path, _ in hub.requests if "repo/files" not in path and "/revision/" not in path]
    return [path.rpartition("/" if "resolve" in path else "FilePath=")[2] for path in paths]


@pytest.mark.parametrize("source", SOURCES)
def test_only_files_that_an_engine_reads_come_and_a_complete_folder_asks_nothing(
    source: str, hub: Hub, tmp_path: Path
) -> None:
    model = model_of(source)
    branch = "main" if source == "huggingface" else "master"
    folder = tmp_path / "ppconsole" / "models" / source / branch / "org" / "model"
    assert model.path == str(folder)
    lines = fetched(model)
    assert {path.name for path in folder.iterdir()} == READ | {MARKER, fetch.LOCK}
    assert all((folder / name).read_bytes() == FILES[name] for name in READ)
    title = "Hugging Face" if source == "huggingface" else "ModelScope"
    assert lines == [f"downloading org/model from {title}: 3 files, 10.0 KiB, to {folder}"]
    assert set(downloads(hub)) == READ
    hub.requests.clear()
    assert fetched(model) == []
    assert hub.requests == []
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])
    fetched(model)
    assert downloads(hub) == ["model.safetensors"], "a file of another size is not complete"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


@pytest.mark.parametrize("whole", [False, True], ids=["ranges", "whole files alone"])
@pytest.mark.parametrize("source", SOURCES)
def test_a_broken_connection_goes_on_where_it_was(source: str, whole: bool, hub: Hub) -> None:
    model = model_of(source)
    fetched(model, weights=False)
    hub.cuts, hub.whole = [3_000, 5_000], whole
    hub.requests.clear()
    fetched(model)
    assert Path(model.path, "model.safetensors").read_bytes() == WEIGHTS
    have = [headers.get("range") for path, headers in hub.requests if "model.safetensors" in path]
    assert have == [None, "bytes=3000-", "bytes=5000-" if whole else "bytes=8000-"]


def test_a_download_goes_on_in_the_next_process(hub: Hub) -> None:
    model = model_of("modelscope")
    hub.files["config.json"] = b'{"model_type": "opt"}'
    hub.cuts = [0, 0, 0, 0]
    with pytest.raises(HubError, match=r"127\.0\.0\.1:\d+: .*, 4 times in a row$"):
        fetched(model)
    hub.cuts.clear()
    fetched(model, weights=False)
    hub.cuts = [4_000]
    # Before the listing, for each setting that is here, before the file, and behind its first bytes.
    asked = iter([False] * 5)
    with pytest.raises(Stopped):
        fetch_model(model, print, lambda: next(asked, True))
    folder = Path(model.path)
    part = folder / PARTS / hashlib.sha256(WEIGHTS).hexdigest()
    assert part.read_bytes() == WEIGHTS[:4_000]
    assert not (folder / "model.safetensors").exists()
    assert not (folder / MARKER).exists()
    hub.requests.clear()
    fetched(model)
    assert hub.requests[-1][1]["range"] == "bytes=4000-"
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not (folder / PARTS).exists()


def test_files_that_are_here_are_checked_with_progress_until_a_stop(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model takes minutes; an operator sees that, and can end it."""
    model = model_of("modelscope")
    fetched(model)
    folder = Path(model.path)
    (folder / MARKER).unlink()
    hub.requests.clear()
    with pytest.raises(Stopped):
        fetch_model(model, print, lambda: bool(hub.requests))
    assert not (folder / MARKER).exists()
    monkeypatch.setattr(fetch, "SAY_S", 0.0)
    lines = fetched(model)
    assert [line.partition(":")[0] for line in lines] == [
        "checking tokenizer.json", "checking config.json", "checking model.safetensors",
    ]  # fmt: skip
    assert lines[-1].startswith("checking model.safetensors: 100 % of all, 10.0 KiB, ")
    assert downloads(hub) == [] and (folder / MARKER).exists()


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_wrong_checksum_is_refused_and_its_bytes_go(name: str, source: str, hub: Hub) -> None:
    model, right = model_of(source), hub.files[name]
    listing = hub.huggingface() if source == "huggingface" else hub.modelscope()
    setattr(hub, source, lambda: listing)
    hub.files[name] = right[:-1] + b"!"
    kind = "git's sha1" if source == "huggingface" and name == "config.json" else "sha256"
    with pytest.raises(
        HubError, match=rf"^{name} of org/model from \w+( Face)?: {kind} is \w+; the hub lists \w+; try"
    ):
        fetched(model)
    assert not Path(model.path, name).exists()
    assert not Path(model.path, MARKER).exists()
    hub.files[name] = right
    fetched(model)
    assert Path(model.path, name).read_bytes() == right


def test_a_file_longer_than_its_listing_is_refused(hub: Hub) -> None:
    hub.listed["model.safetensors"] = {"Size": len(WEIGHTS) - 5}
    with pytest.raises(HubError, match="more than the 10235 bytes of its listing"):
        fetched(model_of("modelscope"))


WRONG_SUMS = ["../../../../evil", "", "ab" * 31, "AB" * 32]


@pytest.mark.parametrize("checksum", WRONG_SUMS)
def test_a_checksum_is_never_part_of_a_path_before_it_was_checked(checksum: str, hub: Hub, tmp_path: Path) -> None:
    hub.listed["model.safetensors"] = {"Sha256": checksum}
    with pytest.raises(HubError, match=r"org/model: the hub lists no sha256 of model\.safetensors"):
        fetched(model_of("modelscope"))
    assert downloads(hub) == []


def test_names_that_lead_out_of_the_folder_are_not_read(hub: Hub, tmp_path: Path) -> None:
    evil = ["../config.json", "/etc/config.json", "a/../../tokenizer.json", "model-00001-of-00002.safetensors/../x"]
    hub.files |= dict.fromkeys(evil, b"evil")
    for source in SOURCES:
        model = model_of(source)
        fetched(model)
        assert {path.name for path in Path(model.path).iterdir()} == READ | {MARKER, fetch.LOCK}
    assert set(downloads(hub)) == READ


def test_a_folder_of_the_user_keeps_its_own_files(hub: Hub, tmp_path: Path) -> None:
    own = tmp_path / "tuned"
    own.mkdir()
    (own / "model.safetensors").write_bytes(b"of long nights")
    (own / "tokenizer.json").write_bytes(FILES["tokenizer.json"])
    for _ in range(2):
        with pytest.raises(HubError, match=r"model\.safetensors is not the hub's, and no download has made it; name"):
            fetched(model_of("huggingface", path=str(own)))
        assert (own / "model.safetensors").read_bytes() == b"of long nights"
    (own / "model.safetensors").write_bytes(WEIGHTS)
    fetched(model_of("huggingface", path=str(own)))
    assert (own / MARKER).exists(), "those that are the hub's are taken"


@pytest.mark.parametrize("name", [fetch.LOCK, "part", "marker"])
def test_a_link_of_another_user_of_the_folder_leads_to_no_file(name: str, hub: Hub, tmp_path: Path) -> None:
    model, victim = model_of("huggingface"), tmp_path / "victim"
    victim.write_bytes(b"of this user")
    folder = Path(model.path)
    (folder / PARTS).mkdir(parents=True)
    part = f"{PARTS}/{hashlib.sha256(WEIGHTS).hexdigest()}"
    (folder / {"part": part, "marker": f"{MARKER}.{os.getpid()}"}.get(name, name)).symlink_to(victim)
    with pytest.raises(HubError, match=r"a folder of yours$"):
        fetched(model)
    assert victim.read_bytes() == b"of this user"


def test_redirects_are_bounded_and_stay_with_https(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.hops = transfer.REDIRECTS_MOST + 1
    with pytest.raises(HubError, match="more than 5 redirects"):
        fetched(model_of("huggingface"))
    hub.hops = 3
    fetched(model_of("huggingface"), weights=False)
    assert all(headers["authorization"] == "Bearer hf_secret" for _, headers in hub.requests)
    hub.hops, hub.leads_to = 0, "file:///etc/passwd"
    with pytest.raises(HubError, match="status 302: more than 5 redirects, or one that leaves HTTP"):
        fetched(model_of("huggingface"))
    elsewhere = Hub(dict(FILES))
    with served(elsewhere) as address:
        hub.leads_to = f"{address}/org/model/resolve/{COMMIT}/model.safetensors"
        fetched(model_of("huggingface"))
    assert elsewhere.requests
    assert all("authorization" not in headers for _, headers in elsewhere.requests), "a token stays with its hub"


def test_https_is_not_left() -> None:
    request = Request("https://hub.test/a")
    with pytest.raises(HubError, match=r"hub\.test redirects to 'http://hub\.test/b'; only https is followed"):
        transfer._Redirects().redirect_request(request, BytesIO(), 302, "", Message(), "http://hub.test/b")


def test_the_hub_says_no(hub: Hub) -> None:
    with pytest.raises(HubError, match=r"^127\.0\.0\.1:\d+: status 404: no such model, revision or file$"):
        fetched(model_of("huggingface", revision="v2"))
    hub.modelscope = lambda: {"Code": 10010205001, "Message": "no\nsuch model", "Data": None}
    with pytest.raises(HubError, match=r"^org/model: ModelScope says: no such model$"):
        fetched(model_of("modelscope"))
    hub.modelscope = lambda: {"Code": 200, "Data": {"Files": 7}}
    with pytest.raises(HubError, match="a listing of another form"):
        fetched(model_of("modelscope"))


def test_pickled_weights_alone_are_refused(hub: Hub) -> None:
    del hub.files["model.safetensors"]
    with pytest.raises(HubError, match=r"no model\.safetensors, .* shards; 'pytorch_model\.bin' is not read$"):
        fetched(model_of("huggingface"))
    hub.files |= {"model.safetensors.index.json": b"{}", "model-00001-of-00001.safetensors": WEIGHTS}
    fetched(model_of("huggingface"))
    del hub.files["config.json"]
    with pytest.raises(HubError, match=r"no config\.json; a model is"):
        fetched(model_of("modelscope"))


def test_without_room_or_network(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.listed["model.safetensors"] = {"Size": 2**50}
    with pytest.raises(HubError, match=r"org/model from ModelScope needs 1048576\.0 GiB more, and .* are free$"):
        fetched(model_of("modelscope"))
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"^127\.0\.0\.1:9: Connection refused$"):
        fetched(model_of("modelscope"))


def test_the_supervisor_ends_in_one_line_without_the_hub(tmp_path: Path) -> None:
    model = {"source": "modelscope", "id": "org/model", "path": str(tmp_path / "kept")}
    (tmp_path / "profile.json").write_text(json.dumps({"name": "x", "model": model}))
    command = [sys.executable, "-m", "ppengine.supervisor", "--profile-json", str(tmp_path / "profile.json")]
    environment = {**os.environ, "MODELSCOPE_ENDPOINT": "http://127.0.0.1:9", "no_proxy": "*"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "error: 127.0.0.1:9: Connection refused\n")


def test_settings_of_a_hub(tmp_path: Path) -> None:
    assert model_of("modelscope", path="kept").path == "/nowhere/kept"
    wrong = {
        "model.source is modelscope; it needs model.id": {"source": "modelscope", "path": "m"},
        "model.path is missing": {"source": "modelscope"},
        "model.id is org/m; it needs model.source: huggingface or modelscope": {"path": "m", "id": "org/m"},
        "model.revision is v1; it needs": {"path": "m", "revision": "v1"},
        "model.id is '../evil'; it must be ORG/NAME": {"source": "huggingface", "id": "../evil"},
        "model.id is 'a/b/c'": {"source": "huggingface", "id": "a/b/c"},
        "model.revision is '../..'; it must": {"source": "huggingface", "id": "a/b", "revision": "../.."},
        "model.source is 'ftp'; it must be one of folder, huggingface, modelscope": {"source": "ftp", "id": "a/b"},
    }
    for text, model in wrong.items():
        with pytest.raises(ConfigError) as caught:
            build_profile({"name": "x", "model": model}, tmp_path, "p")
        assert text in str(caught.value)


def test_files_of_another_commit_are_not_taken_for_those_of_the_hub(hub: Hub) -> None:
    model = model_of("huggingface")
    fetched(model, weights=False)
    hub.files["config.json"] = b'{"model_type": "LLAMA"}'
    fetched(model)
    assert Path(model.path, "config.json").read_bytes() == b'{"model_type": "LLAMA"}', "of the same size"
    Path(model.path, MARKER).unlink()
    Path(model.path, "generation_config.json").write_bytes(b"{}")
    with pytest.raises(HubError, match=r"generation_config\.json is there, and the hub has none; remove it"):
        fetched(model)
