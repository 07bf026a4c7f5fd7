"""What still waits to be sent when the link breaks: its asker is told, and the loop has nothing to add."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_gateway import FakeGateway
from link_helpers import FAST, Seen
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.source import LinkLost
from ppengine.protocol.verbs import Pause


@pytest.fixture
async def strays() -> AsyncIterator[list[str]]:
    """What the loop had to say of futures and tasks by itself; a test must leave it empty."""
    said: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(str(context["message"])))
    yield said
    gc.collect()
    assert said == []


@asynccontextmanager
async def unheard(fake: FakeGateway, folder: Path) -> AsyncIterator[EngineLink]:
    """A live link whose `control` and `bulk` have lost their peers, so that what is sent on them waits."""
    link, seen = EngineLink(fake.record, user="tester", timing=FAST), Seen()
    await link.start(seen.take)
    await seen.until(lambda seen: bool(seen.snapshots))
    sockets = link._session._sockets  # type: ignore[union-attr]
    was = sockets.control, sockets.bulk
    sockets.control, sockets.bulk = (sockets._connect(socket.type, f"ipc://{folder}/nobody") for socket in was)
    try:
        yield link
    finally:
        await link.close()
        for socket in was:
            socket.close(linger=0)


@pytest.mark.parametrize("way", ["inspect", "command"])
async def test_the_link_breaks_under_what_waits_to_be_sent(
    fake: FakeGateway, tmp_path: Path, strays: list[str], way: str
) -> None:
    async with unheard(fake, tmp_path) as link:
        waits: Any = link.inspect("about") if way == "inspect" else link.command(Pause())
        task = asyncio.create_task(waits)
        await asyncio.sleep(0.1)
        assert not task.done()
        fake.stop()
        with pytest.raises(LinkLost, match="not sent, nothing happened") as lost:
            await task
        assert not lost.value.sent
