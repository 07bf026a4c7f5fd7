"""An HTTP process that is killed under 200 streams takes those of its own clients along, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal

import pytest
from engines import wait_until
from ppengine.common.config import load_profile
from ppengine.protocol.verbs import Pause, Resume
from serving import Served

pytestmark = pytest.mark.long
STREAMS, TOKENS, END = 200, 60, b"data: [DONE]"
BODY = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}


class Client:
    """One connection with a streamed completion."""

    def __init__(self, engine: Served) -> None:
        self._address = str(engine.config.profile.http.listen).rpartition(":")
        self._data = b""

    async def ask(self) -> None:
        """Send the request, and return when the answer has begun."""
        host, _, port = self._address
        self._reader, self._writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(BODY).encode()
        self._writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await self.until(b"\r\n\r\n")

    async def until(self, end: bytes) -> bool:
        """Read until `end` has come; return whether it has, and not the end of the connection."""
        with contextlib.suppress(ConnectionError):
            while end not in self._data and (piece := await self._reader.read(65536)):
                self._data += piece
        return end in self._data

    async def read(self) -> str | None:
        """Return the text of the stream; None if its connection was closed before its end."""
        done = await self.until(END)
        self._writer.close()
        lines = [line.removeprefix(b"data: ") for line in self._data.splitlines() if line.startswith(b"data: {")]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines) if done else None


async def test_a_killed_process_takes_its_own_of_200_streams_and_leaves_no_request() -> None:
    settings = [
        "threads_per_stage=1", "model.dtype=float64", "model.max_model_len=256", "memory.device_mib=512",
        "scheduler.max_num_seqs=256", "http.listen=127.0.0.1:0", "http.processes=2",
    ]  # fmt: skip
    with Served(load_profile("tiny", settings)) as engine:
        async with engine.operator() as op:
            alone = Client(engine)
            await alone.ask()
            written = await alone.read()
            await op.do(Pause(mode="keep"))
            clients = [Client(engine) for _ in range(STREAMS)]
            await asyncio.gather(*(client.ask() for client in clients))
            assert len((await op.now()).requests) == STREAMS
            await op.do(Resume())
            assert all(await asyncio.gather(*(client.until(b"data: {") for client in clients)))
            reads = [asyncio.create_task(client.read()) for client in clients]
            await asyncio.sleep(0.05)
            assert not any(read.done() for read in reads), "all are under way"
            gone = engine.pids["http0"]
            os.kill(gone, signal.SIGKILL)
            await op.do(Pause(mode="keep"))  # None ends by itself meanwhile.
            await op.until(
                lambda picture: picture.requests_total == STREAMS - sum(read.done() for read in reads) < STREAMS,
                "its successor has aborted what it left",
            )  # fmt: skip
            await op.do(Resume())
            texts = await asyncio.gather(*reads)
            closed = texts.count(None)
            assert 0 < closed < STREAMS, "both processes had some"
            assert texts.count(written) == STREAMS - closed, "the others are whole"
            await op.idle()
        wait_until(
            lambda: engine.find_pids() is None and engine.pids.get("http0", gone) != gone, "another one is there"
        )
