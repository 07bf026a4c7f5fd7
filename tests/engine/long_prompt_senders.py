"""Senders of long prompts, one at a time, by HTTP or as consoles do: the load of `bench_long_prompt`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass, field
from typing import Protocol

from long_prompt_load import Texts, http_request
from ppconsole.link.engine_link import EngineLink
from ppengine.protocol.discovery import list_engines
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Abort, Submit


@dataclass
class Answered:
    """The answers to the prompts of one round."""

    ms: list[float] = field(default_factory=list)
    """Milliseconds until each prompt was refused, or computed."""
    said: str = ""
    """The newest answer."""

    def note(self, sent: float, said: str) -> None:
        """Note the answer to a prompt that was sent at a time of the monotonic clock."""
        self.ms.append(1e3 * (time.monotonic() - sent))
        self.said = said


class Sender(Protocol):
    """Sends prompts to one engine."""

    def send(self, texts: Texts, until: float, answered: Answered) -> None:
        """Send texts until a time of the monotonic clock, and note the answers."""
        ...


class _Pace:
    """Times of prompts, `every_s` apart; one that is late does not hurry the next."""

    def __init__(self, every_s: float, until: float) -> None:
        self._every_s, self._until, self._due = every_s, until, time.monotonic()

    def pause_s(self) -> float:
        """Return the seconds until the next prompt, or until the end."""
        now = time.monotonic()
        self._due = max(self._due + self._every_s, now)
        return max(0.0, min(self._due, self._until) - now)


@dataclass(frozen=True)
class HttpSender:
    """Sends completions of one token."""

    address: tuple[str, int]
    every_s: float

    def send(self, texts: Texts, until: float, answered: Answered) -> None:
        pace = _Pace(self.every_s, until)
        while (now := time.monotonic()) < until:
            with socket.create_connection(self.address) as sock:
                sock.sendall(http_request({"prompt": texts.next(), "max_tokens": 1}))
                sock.settimeout(max(0.01, until - now))
                # A prompt that is unanswered at the end is aborted: its connection is closed.
                with contextlib.suppress(TimeoutError):
                    answered.note(now, sock.recv(1 << 16).split(b"\r\n")[0].decode())
            time.sleep(pace.pause_s())


@dataclass(frozen=True)
class ConsoleSender:
    """Submits requests of one token, and aborts each after its answer."""

    engine: str
    """Id of the engine."""
    every_s: float

    def send(self, texts: Texts, until: float, answered: Answered) -> None:
        asyncio.run(self._send(texts, until, answered))

    async def _send(self, texts: Texts, until: float, answered: Answered) -> None:
        record = next(each for each in list_engines() if each.id == self.engine)
        link = EngineLink(record, find=lambda: record, user="bench", backlog=0)
        await link.start(lambda update: None)
        try:
            await link.attached(20)
            pace = _Pace(self.every_s, until)
            while (now := time.monotonic()) < until:
                end = await link.command(Submit(prompt=texts.next(), sampling=SamplingParams(max_tokens=1)), timeout=60)
                answered.note(now, getattr(end, "state", "") or end.code)
                await asyncio.sleep(pace.pause_s())
                if name := getattr(end, "request", None):
                    await link.command(Abort(request=name), timeout=60)
        finally:
            await link.close()
