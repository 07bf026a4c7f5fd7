"""A mixed load on one engine, and the judge of its greedy tokens."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import reference
from ppengine.common.config import Profile, load_profile, profiles_dir
from serving import Operator

MODEL = profiles_dir() / "models" / "tiny"
VOCABULARY = 2048
MOST = 128
"""Tokens that the reference knows of each prompt."""
PROMPTS = [
    *reference.prompts(6, VOCABULARY, low=4, high=40, seed=3),
    *reference.prompts(2, VOCABULARY, low=200, high=320, seed=4),
]

LONG = reference.prompts(24, VOCABULARY, low=300, high=340, seed=5)
"""Prompts of a chunk of KV tiers each: together more than the device and the host of a small engine hold."""


def profile(stages: int, *settings: str) -> Profile:
    """Return the bundled profile in `stages` stages, in float64: greedy tokens are the same however it is cut."""
    return load_profile("tiny", [f"parallel.pipeline={stages}", "model.dtype=float64", *settings])


class Load:
    """Keeps `width` requests in flight: short and long prompts, greedy and sampled, each judged when it ends."""

    def __init__(
        self, op: Operator, width: int = 4, seed: int = 0, *, long: bool = False, between_s: float = 0.0
    ) -> None:
        """`long`: of the long prompts, with few tokens each, and of new ones, which are not judged.

        `between_s`: mean seconds before each request.
        """
        self._op, self._width, self._between_s = op, width, between_s
        self._random = random.Random(seed)
        self._chosen = range(len(PROMPTS), len(PROMPTS) + len(LONG)) if long else range(len(PROMPTS))
        self._most = MOST // 8 if long else MOST
        self._new = 0.3 if long else 0.0
        """Share of new prompts."""
        self._open: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self.names: list[str] = []
        """Requests in flight, oldest first."""
        self.ended = 0
        self.judged = 0
        """Greedy requests among those that ended."""
        self.wrong: list[str] = []
        """Greedy requests that had other tokens than the reference."""
        self.errors: list[str] = []
        """Requests that were refused, lost or cut short."""

    @property
    def running(self) -> bool:
        """Whether new requests are made."""
        return self._keeper is not None

    def start(self) -> None:
        """Begin, or go on, to make requests."""
        if self._keeper is None:
            self._keeper = asyncio.create_task(self._keep())

    async def pause(self) -> None:
        """Make no new requests."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)

    async def finish(self, timeout: float) -> bool:
        """Make no new requests and wait for those in flight; return whether all have ended."""
        await self.pause()
        if self._open:
            await asyncio.wait(self._open, timeout=timeout)
        return not self._open

    async def drop(self) -> None:
        """Forget what is in flight."""
        await self.pause()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            while len(self._open) < self._width:
                task = asyncio.create_task(self._one())
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            await asyncio.wait(self._open, return_when=asyncio.FIRST_COMPLETED)
            if self.errors:
                await asyncio.sleep(0.2)  # an engine that is lost refuses at once: no flood of that

    async def _one(self) -> None:
        prompt = self._random.choice(self._chosen)
        count = self._random.randint(self._most // 4, self._most)
        sampling: dict[str, Any] = {"max_tokens": count}
        greedy, tokens_in = self._random.random() < 0.8, _prompt(prompt)
        if self._new and self._random.random() < self._new:
            greedy, tokens_in = False, [self._random.randrange(4, VOCABULARY) for _ in tokens_in]
        if not greedy:
            sampling |= {"temperature": 0.8, "top_p": 0.9, "seed": self._random.randrange(1000)}
        name = ""
        if self._between_s:
            await asyncio.sleep(self._random.expovariate(1 / self._between_s))
        try:
            name = await self._op.submit(tokens_in, **sampling)
            self.names.append(name)
            tokens, _, reason = await self._op.output(name, timeout=3600)
        except (Exception, AssertionError) as error:  # noqa: BLE001 - whatever ends it is what is counted
            self.errors.append(f"{name or 'submit'}: {type(error).__name__}: {error}"[:200])
            return
        finally:
            if name in self.names:
                self.names.remove(name)
        self.ended += 1
        self.judged += greedy
        if reason != "length":
            self.errors.append(f"{name} ended by {reason}")
        elif greedy and tokens != expected(prompt)[:count]:
            self.wrong.append(name)


_known: dict[int, list[int]] = {}


def expected(prompt: int) -> list[int]:
    """Return the greedy tokens that transformers gives after a prompt; the long ones follow the others."""
    if prompt not in _known:
        most = MOST if prompt < len(PROMPTS) else MOST // 8
        _known[prompt] = reference.greedy(MODEL, _prompt(prompt), most)
    return _known[prompt]


def _prompt(number: int) -> list[int]:
    return PROMPTS[number] if number < len(PROMPTS) else LONG[number - len(PROMPTS)]


def learn(*, long: bool = False) -> None:
    """Ask the reference for all prompts, the long ones too if `long`: not while an engine is being timed."""
    for prompt in range(len(PROMPTS) + (len(LONG) if long else 0)):
        expected(prompt)
