"""An engine whose API is at a Unix socket."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2
import pytest
from engines import wait_until
from ppengine.bench.http_client import Client
from ppengine.bench.load_plan import Plan, Planned
from ppengine.bench.online_servers import Server
from ppengine.common.config import load_profile
from serving import Served


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="pp-", dir="/tmp") as folder:
        yield Path(folder, "http.sock")


async def test_it_serves_at_its_file_also_behind_a_kill_and_leaves_none(path: Path) -> None:
    settings = ["threads_per_stage=1", "model.max_model_len=256", "memory.device_mib=128"]
    with Served(load_profile("tiny", [*settings, f"http.listen=unix:{path}"])) as engine:
        assert f"serving, unix:{path}" in engine.engine.errors.read_text()
        await check(path)
        gone = engine.pids["http0"]
        os.kill(gone, signal.SIGKILL)
        wait_until(lambda: engine.find_pids() is None and engine.pids.get("http0", gone) != gone, "another is there")
        wait_until(lambda: _ready(path), "it is ready", 30.0)
        await check(path)
    assert not path.exists()


async def check(path: Path) -> None:
    """Check answers to a client of any name, and to the bench's."""
    with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://any.name") as client:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 8
    server = Server(f"unix:{path}")
    planned = [Planned(0.0, [5, 6, 7], 9, 0.0, 1.0, 0, 0)] * 4
    seen = await Client(Plan(target=server.target, requests=planned, model=server.model)).run()
    assert [(one.tokens, one.error) for one in seen.outcomes] == [(9, "")] * 4


def _ready(path: Path) -> bool:
    try:
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            return client.get("/ready").status_code == 200
    except httpx2.TransportError:
        return False
