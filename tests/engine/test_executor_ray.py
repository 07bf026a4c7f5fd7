"""The Ray executor: what it says of its stages, and that Ray goes with the engine."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from engines import Engine
from ppengine.executor.base import ExecutorError
from ppengine.executor.ray import RayExecutor


def test_missing_ray_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(ExecutorError, match=r"Ray is not installed: pip install 'ppconsole\[ray\]'"):
        RayExecutor()


@pytest.mark.ray
def test_stage_that_fails_in_an_actor_is_quoted_and_ray_goes(tmp_path: Path) -> None:
    env = {"STANDIN_REPORTS": str(tmp_path / "reports"), "STANDIN_STATE": "loading", "STANDIN_EXECUTOR": "ray"}
    engine = Engine(tmp_path / "run", ["standins.supervisor", "actors", "2"], env)
    try:
        engine.find_processes(4)
        assert engine.wait(60) == 1
        assert "/nowhere" in engine.errors.read_text().splitlines()[-1]
        assert engine.leftovers() == []
    finally:
        engine.end()
