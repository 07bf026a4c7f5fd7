"""The ZAP handler of a live engine hangs: no console can attach until another gateway follows."""

from __future__ import annotations

import json
import shutil
import subprocess
import time

import pytest

pytest.importorskip("torch")

from engines import wait_until
from ppengine.common.config import load_profile
from ppengine.drills.registry import FaultError
from ppengine.drills.tracer import Tracer
from ppengine.gateway.access import HUNG_S
from serving import Served

BACK_S = HUNG_S + 15.0
"""Most seconds until consoles are served again: on a crowded machine a gateway takes some of them to start."""


def handler_thread(pid: int) -> int:
    """Return the thread of the handler in a gateway."""
    text = subprocess.run(["py-spy", "dump", "--json", "--pid", str(pid)], capture_output=True, check=True).stdout
    return next(int(thread["os_thread_id"]) for thread in json.loads(text) if thread["thread_name"] == "zap")


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy finds the thread")
async def test_a_hung_handler_lets_nobody_in_and_is_replaced() -> None:
    with Served(load_profile("tiny")) as engine:
        async with engine.operator() as op:
            await op.until(lambda picture: picture.engine.state == "serving", "a snapshot before")
            gone = engine.pids["gateway"]
            try:
                hold = Tracer(handler_thread(gone))
            except (FaultError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no thread can be traced here: {error}")
            begun = time.monotonic()
            try:
                ran = engine.cli("status", "--timeout", "2")
                assert time.monotonic() - begun < HUNG_S and ran.code != 0, "no console can attach"
                wait_until(lambda: "has not answered for" in engine.said(), "the hang is noticed", BACK_S)
            finally:
                hold.detach()
            free = time.time()
            await op.until(lambda picture: picture.sampled_at > free, "the console is back by itself", BACK_S)
            wait_until(lambda: engine.cli("status").code == 0, "others get in again", BACK_S)
            took = time.monotonic() - begun
            engine.find_pids()
            assert engine.pids["gateway"] != gone
            assert [event for event in await op.heard() if event.kind == "gateway.ended"], "the end is an event"
            print(f"consoles are served again {took:.1f} s after the hang")
            assert engine.cli("submit", "Once upon a time", "--max-tokens", "4").code == 0
