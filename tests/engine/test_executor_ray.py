"""The Ray executor: what it says of its stages, and that Ray goes with the engine."""

from __future__ import annotations

import importlib.util
import socket
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from engines import Engine, wait_until
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import ModelConfig
from ppengine.protocol.reports import ProcessInfo
from ppengine.supervisor.launch import ray_head
from ppengine.supervisor.launch.launcher import ExecutorError
from ppengine.supervisor.launch.ray_launcher import RayExecutor
from ppengine.supervisor.launch.ray_session import RaySession, cause_of_death, why_not


def test_missing_ray_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(ExecutorError, match=r"Ray is not installed: pip install 'ppconsole\[ray\]'"):
        RayExecutor()


def test_account_of_a_death_is_cut_to_what_is_known() -> None:
    account = (
        "The actor died unexpectedly before finishing this task. class_name: StageActor pid: 19495 The actor is dead "
        "because its worker process has died. Worker exit type: SYSTEM_ERROR. Some common causes include: (1) the OOM"
    )
    assert cause_of_death(account) == "Ray: its worker process has died. Worker exit type: SYSTEM_ERROR."
    assert cause_of_death("nobody knows") == "Ray: nobody knows"


def test_refused_token_says_what_to_set() -> None:
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    assert why_not(error) == "Ray did not start: Failed to connect to Ray cluster at 10.0.0.1:6379"
    error.__cause__ = RuntimeError("RPC error: InvalidAuthToken: Authentication token is missing")
    assert "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH" in why_not(error)


def test_the_words_about_a_silent_head_are_those_of_its_driver_and_of_its_end() -> None:
    words = "Ray's head at 10.0.0.1:6379 has not answered since 12:00:01"
    executor, (ours, theirs) = RayExecutor(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    driver = ProcessInfo(role="ray", stage=None, rank=None, pid=7)
    executor._words, executor._driver = ours, SimpleNamespace(info=lambda role: msgspec.structs.replace(driver))  # type: ignore[assignment]
    with ours, theirs:
        for detail in (words, "", words):
            theirs.send(msgspec.json.encode(msgspec.structs.replace(driver, detail=detail)))
            assert [(info.role, info.detail) for info in executor.poll()] == [("ray", detail)]
        driver = msgspec.structs.replace(driver, exit_code=1, detail="[2026-11-24 E 7386] rpc_client.h: no GCS")
        assert executor.poll()[0].detail == f"{words}, and Ray has ended its driver"


def test_a_head_that_listens_no_longer_is_silent_until_it_listens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_head, "CALL_GAP_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        watch = ray_head.HeadWatch(f"{host}:{port}")
        assert watch.silent == ""
    wait_until(lambda: watch.silent.startswith(f"Ray's head at {host}:{port} has not answered since "), "it is silent")
    with socket.create_server((host, port)):
        wait_until(lambda: watch.silent == "", "it answers")
    watch.stop()


@pytest.mark.parametrize(("length", "inside"), [(37, "run"), (38, "rings")])
def test_ray_keeps_its_files_where_its_sockets_have_room(length: int, inside: str) -> None:
    run_dir = "/run".ljust(length, "-")
    config = EngineConfig(
        id="abcdef", name="x", epoch="e", profile=Profile(name="x", model=ModelConfig(path="/m")), model_path="/m",
        model_type="llama", layers=[(0, 1)], max_model_len=8, run_dir=run_dir, ring_dir="/rings", started_wall=0.0,
    )  # fmt: skip
    assert RaySession(config).folder == Path({"run": run_dir, "rings": "/rings"}[inside]) / "ray"


@pytest.mark.ray
def test_stage_that_fails_in_an_actor_is_quoted_and_ray_goes(tmp_path: Path) -> None:
    env = {"STANDIN_REPORTS": str(tmp_path / "reports"), "STANDIN_STATE": "loading", "STANDIN_EXECUTOR": "ray"}
    engine = Engine(tmp_path / "run", ["standins.supervisor", "actors", "1"], env)
    try:
        engine.find_processes(4)
        assert engine.wait(60) == 1
        assert "/nowhere" in engine.errors.read_text().splitlines()[-1]
        assert engine.leftovers() == []
    finally:
        engine.end()
