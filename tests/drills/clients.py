"""Clients that submit and read streams while parts of the engine end. They count the outcome of every request."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable

from load import MOST, PROMPTS, expected
from ppconsole.link.engine_link import EngineLink
from ppconsole.link.source import LinkLost, QueryFailed
from ppengine.protocol.control import Outcome
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit

SILENT_S = 240.0
"""Seconds without a token, an end or a loss after which a request counts as forgotten."""
_BACK_S = 0.5


class Clients:
    """`count` clients, each with a link of its own and one request at a time."""

    def __init__(self, count: int, seed: int, find: Callable[[], EngineRecord | None]) -> None:
        self.count = count
        self._find, self._seed = find, seed
        self._tasks: list[asyncio.Task[None]] = []
        self._links: list[EngineLink] = []
        self._stopping = False
        self._newest = 0.0
        """Time of the newest token."""
        self._longest = 0.0
        """Longest time between two tokens of any clients, since `listen`."""
        self.tokens = 0
        self.outcomes: Counter[str] = Counter(accepted=0, right=0, lost=0, wrong=0, forgotten=0)
        """`refused` and `unanswered` were not accepted; all others were."""
        self.losses: Counter[str] = Counter()
        """Reasons of named losses."""
        self.bad: list[str] = []
        """Requests with wrong tokens, without an end, or with an end that is none of these."""

    @property
    def line(self) -> str:
        """The outcomes so far in one line."""
        return ", ".join(f"{name} {count}" for name, count in self.outcomes.items())

    async def start(self) -> None:
        """Attach and begin."""
        record = self._find()
        assert record is not None, "the engine has a record"
        for number in range(self.count):
            link = EngineLink(record, find=self._find, user=f"client{number}", slow=True, passing=True)
            await link.start(lambda update: None)
            self._links.append(link)
            self._tasks.append(asyncio.create_task(self._client(link, random.Random(1000 * self._seed + number))))

    def listen(self) -> None:
        """Measure the silence from now on."""
        self._longest, self._newest = 0.0, time.monotonic()

    async def silence(self, timeout: float) -> float:
        """Wait for a token, up to `timeout` seconds, and return the longest time without any since `listen`."""
        begun = time.monotonic()
        while self._newest <= begun and time.monotonic() - begun < timeout:
            await asyncio.sleep(0.02)
        return max(self._longest, time.monotonic() - self._newest)

    def _hear(self) -> None:
        now = time.monotonic()
        self._longest, self._newest = max(self._longest, now - self._newest), now

    async def finish(self, timeout: float) -> int:
        """Submit nothing more, wait for what is open, and return how many requests have not ended."""
        self._stopping = True
        _, pending = await asyncio.wait(self._tasks, timeout=timeout)
        for task in pending:
            task.cancel()
        for link in self._links:
            with contextlib.suppress(Exception):
                await link.close()
        self.outcomes["forgotten"] += len(pending)
        return len(pending)

    async def _client(self, link: EngineLink, source: random.Random) -> None:
        while not self._stopping:
            try:
                await link.attached(60)
                prompt, count = source.randrange(len(PROMPTS)), source.randint(8, MOST)
                name = await self._submit(link, prompt, count)
            except (LinkLost, TimeoutError, QueryFailed):
                self.outcomes["unanswered"] += 1
                name = ""
            if not name:
                await asyncio.sleep(_BACK_S)
                continue
            await self._read(link, name, prompt, count)
            await asyncio.sleep(source.uniform(0.0, 1.0))

    async def _submit(self, link: EngineLink, prompt: int, count: int) -> str:
        sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        answer = await link.command(Submit(prompt_token_ids=PROMPTS[prompt], sampling=sampling), timeout=60)
        if not isinstance(answer, Outcome) or answer.state != "applied" or not answer.request:
            self.outcomes["refused"] += 1
            return ""
        self.outcomes["accepted"] += 1
        return answer.request

    async def _read(self, link: EngineLink, name: str, prompt: int, count: int) -> None:
        tokens, heard = list[int](), time.monotonic()
        while time.monotonic() - heard < SILENT_S:
            try:
                part = await link.fetch(name, offset=len(tokens))
            except (LinkLost, TimeoutError):
                with contextlib.suppress(LinkLost, TimeoutError):
                    await link.attached(30)
                await asyncio.sleep(0.05)
                continue
            except QueryFailed as error:
                if error.passing:
                    await asyncio.sleep(_BACK_S)
                    continue
                self._end("forgotten", f"{name}: {error.code}: {error}")
                return
            if part.token_ids:
                self._hear()
                heard = time.monotonic()
                tokens += part.token_ids
                self.tokens += len(part.token_ids)
            if part.finished:
                self._judge(name, part.finish_reason or "", tokens, expected(prompt)[:count])
                return
        self._end("forgotten", f"{name}: nothing for {SILENT_S:g} s after {len(tokens)} of {count} tokens")

    def _judge(self, name: str, reason: str, tokens: list[int], right: list[int]) -> None:
        if reason == "length" and tokens == right:
            self.outcomes["right"] += 1
        elif reason == "lost" and tokens == right[: len(tokens)]:
            self.outcomes["lost"] += 1
            self.losses[reason] += 1
        else:
            at = next(
                (place for place, pair in enumerate(zip(tokens, right, strict=False)) if pair[0] != pair[1]), "its end"
            )
            self._end(
                "wrong",
                f"{name} ended by {reason!r} with {len(tokens)} of {len(right)} tokens; first difference at {at}",
            )

    def _end(self, outcome: str, text: str) -> None:
        self.outcomes[outcome] += 1
        self.bad.append(text[:300])
