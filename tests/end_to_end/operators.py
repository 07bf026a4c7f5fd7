"""A console without a screen: commands, pictures that are new enough to judge by, and requests held in place."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from ppconsole.link.engine_link import EngineLink
from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused
from ppengine.protocol.inspection import RequestDetail
from ppengine.protocol.recording import Update
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event, RequestInfo, Snapshot
from ppengine.protocol.verbs import Abort, Drain, Pause, RestartStage, Resume, SetMemory, Submit, Verb

if TYPE_CHECKING:
    from serving import Ran, Served

Prompt = str | list[int]
CATCHES = 10
"""How often a request is queued anew that had ended before it could be held."""

BACK_S = 90.0
"""Allowed until an engine that has lost a stage serves again: a process loads, and the machine may be busy."""


class Operator:
    """Commands, the newest picture, and waiting for what a picture shows.

    `engine` is for what signals and the CLI do; who only looks needs none.
    """

    def __init__(self, link: EngineLink, engine: Served | None = None) -> None:
        self.link, self.engine = link, engine
        self.events: list[Event] = []
        self._picture: Snapshot | None = None
        self._fresh = asyncio.Event()

    # --- pictures -------------------------------------------------------------------------------------------

    def take(self, update: Update) -> None:
        """Take one update of the link."""
        if isinstance(update, Snapshot):
            self._picture = update
            self._fresh.set()
        elif isinstance(update, Event):
            self.events.append(update)

    @property
    def picture(self) -> Snapshot:
        """The newest snapshot. It may be older than the last command: right after one of the waits below it is not."""
        assert self._picture is not None
        return self._picture

    async def until(
        self, condition: Callable[[Snapshot], Any], what: str, timeout: float = 60.0, *, core: bool = True
    ) -> Snapshot:
        """Return the first snapshot of what was so after this call that meets `condition`.

        With `core` false the core's part of it may be older: a stopped core reports nothing.
        """
        since = time.time()

        def met(picture: Snapshot | None) -> bool:
            if picture is None or (core_time(picture) if core else picture.sampled_at) < since:
                return False
            return bool(condition(picture))

        try:
            async with asyncio.timeout(timeout):
                while not met(self._picture):
                    self._fresh.clear()
                    await self._fresh.wait()
        except TimeoutError:
            shown = msgspec.json.encode(self._picture).decode()
            raise AssertionError(f"not within {timeout:g} s: {what}; the newest picture: {shown[:3000]}") from None
        return self.picture

    async def now(self) -> Snapshot:
        """Return a snapshot of what is so now."""
        return await self.until(lambda picture: True, "a new snapshot")

    async def request(self, name: str, condition: Callable[[RequestInfo], Any], what: str) -> RequestInfo:
        """Return the first picture of a request that meets `condition`; it must last, or a fast engine is past it."""

        def met(picture: Snapshot) -> bool:
            return any(request.id == name and condition(request) for request in picture.requests)

        picture = await self.until(met, f"{name} {what}")
        return next(request for request in picture.requests if request.id == name)

    async def stuck(self, name: str) -> RequestInfo:
        """Wait until the same steps of a request stay in flight: the stage that holds them is stopped."""
        seen: list[int] = []
        since = 0.0

        def stays(request: RequestInfo) -> bool:
            nonlocal seen, since
            if request.in_flight != seen:
                seen, since = list(request.in_flight), core_time(self.picture)
            return bool(seen) and core_time(self.picture) - since > 0.4

        return await self.request(name, stays, "has steps that stay in flight")

    async def idle(self) -> Snapshot:
        """Wait until no request is left and every block is back, and return that picture."""

        def given_back(picture: Snapshot) -> bool:
            blocks, swap = picture.stages[0].kv_blocks, picture.stages[0].swap_blocks
            return not picture.requests_total and blocks.used == 0 and swap.used == 0

        picture = await self.until(given_back, "all blocks are back")
        for stage in picture.stages:
            blocks = stage.kv_blocks
            assert blocks.cached is not None
            assert blocks.free is not None
            assert blocks.mapped == blocks.cached + blocks.free + 1, "cached, free and the null block make all"
        return picture

    async def quiet(self) -> Snapshot:
        """Wait until a paused engine has nothing in flight."""

        def still(picture: Snapshot) -> bool:
            return picture.engine.state == "paused" and not any(request.in_flight for request in picture.requests)

        return await self.until(still, "paused and quiet")

    async def heard(self) -> list[Event]:
        """Return the events once all that has happened until now is among them."""
        newest = (await self.now()).event_seq
        await self.until(lambda _: self.events and self.events[-1].seq >= newest, "all events are here")
        return self.events

    async def looked_at(self, stage: int) -> None:
        """Wait until the agent has looked at a stage since this call."""
        for _ in range(2):  # The first look may have begun before.
            since = time.time()

            def anew(picture: Snapshot, since: float = since) -> bool:
                age = picture.stages[stage].sample_age_ms
                return age is not None and picture.sampled_at - age / 1000 > since

            await self.until(anew, f"stage {stage} is looked at")

    async def detail(self, name: str) -> RequestDetail:
        """Ask for all that is known of a request, which may have ended."""
        detail = await self.link.inspect("request", request=name)
        assert isinstance(detail, RequestDetail)
        return detail

    # --- commands -------------------------------------------------------------------------------------------

    async def ask(self, verb: Verb, **options: Any) -> Outcome | Refused:
        """Send a command and return its end, whatever it is."""
        return await self.link.command(verb, timeout=60, **options)

    async def do(self, verb: Verb, **options: Any) -> Outcome:
        """Send a command that must be applied (or planned)."""
        end = await self.ask(verb, **options)
        assert isinstance(end, Outcome), end
        assert end.state == ("planned" if options.get("dry_run") else "applied"), end
        return end

    async def refused(self, verb: Verb, code: str, **options: Any) -> str:
        """Send a command that must be refused with `code`; returns its one line."""
        end = await self.ask(verb, **options)
        assert isinstance(end, Refused), end
        assert end.code == code, end
        assert end.text
        assert "\n" not in end.text
        return end.text

    async def begin(self, verb: Verb, **options: Any) -> Begun:
        """Send a command and return once it is accepted."""
        begun = Begun()
        command = self.link.command(verb, timeout=60, on_progress=begun.take, **options)
        begun.end = asyncio.create_task(command)
        accepted = asyncio.create_task(begun.accepted.wait())
        await asyncio.wait([accepted, begun.end], timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert accepted.done(), begun.end
        return begun

    async def cli(self, *words: str) -> Ran:
        """Run a verb of the command line to its end; this console goes on reading meanwhile."""
        return await asyncio.to_thread(self.engine.cli, *words)

    async def end_of(self, process: subprocess.Popen[str]) -> Ran:
        """Wait for a verb that was started."""
        return await asyncio.to_thread(self.engine.end_of, process)

    async def pause(self) -> Snapshot:
        """Stop scheduling, keep all, and wait until nothing is in flight."""
        await self.do(Pause(mode="keep"))
        return await self.quiet()

    async def clean(self, utilization: float) -> None:
        """Undo whatever a test may have left: requests, pause, drain, memory."""
        await self.ask(Resume())
        await self.ask(Drain(undo=True))
        for request in (await self.now()).requests:
            await self.ask(Abort(request=request.id))
        await self.until(lambda picture: not picture.requests_total, "no request is left")
        await self.do(SetMemory(utilization=utilization))
        await self.idle()

    async def repair(self, stage: int) -> Snapshot:
        """Restart a stage that a test has broken, abort all requests, and wait until nothing is wrong."""
        await (await self.begin(RestartStage(stage=stage))).applied()
        await self.abort(*[request.id for request in (await self.now()).requests])
        picture = await self.until(
            lambda picture: picture.engine.state == "serving" and not picture.verdicts, "it serves again", BACK_S
        )
        self.engine.find_pids()
        await self.idle()
        return picture

    # --- requests -------------------------------------------------------------------------------------------

    async def submit(self, prompt: Prompt, **sampling: Any) -> str:
        """Queue a request (greedy, end of sequence ignored, unless told otherwise) and return its id."""
        params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
        text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        end = await self.do(Submit(prompt=text, prompt_token_ids=ids, sampling=params))
        assert end.request is not None
        return end.request

    async def submit_all(self, prompts: list[Prompt] | list[list[int]], **sampling: Any) -> list[str]:
        """Queue several requests."""
        return [await self.submit(prompt, **sampling) for prompt in prompts]

    async def abort(self, *names: str) -> None:
        """End what has not ended by itself."""
        for name in names:
            end = await self.ask(Abort(request=name))
            assert not isinstance(end, Refused) or end.code == "NOT_FOUND", end

    async def tokens(self, request: str, sample: int = 0) -> list[int]:
        """Return all tokens of a sample once it has ended."""
        return (await self.output(request, sample))[0]

    async def output(self, request: str, sample: int = 0, timeout: float = 60) -> tuple[list[int], str, str | None]:
        """Return tokens, text and finish reason of a sample once it has ended."""
        tokens: list[int] = []
        text = ""
        async with asyncio.timeout(timeout):
            while True:
                part = await self.link.fetch(request, offset=len(tokens), text_offset=len(text), sample=sample)
                tokens += part.token_ids
                text += part.text
                if part.finished:
                    return tokens, text, part.finish_reason

    async def all_tokens(self, requests: list[str]) -> list[list[int]]:
        """Return the tokens of several requests."""
        return [await self.tokens(request) for request in requests]

    async def written(self, request: str, count: int = 1, sample: int = 0, timeout: float = 60) -> list[int]:
        """Return the tokens of a sample as soon as it has written `count`, or has ended.

        The engine answers with the token, so this sees what a picture now and then would miss.
        """
        tokens: list[int] = []
        async with asyncio.timeout(timeout):
            while len(tokens) < count:
                part = await self.link.fetch(request, offset=len(tokens), sample=sample)
                tokens += part.token_ids
                if part.finished:
                    break
        return tokens

    # --- requests held in place -----------------------------------------------------------------------------

    async def step(self) -> Snapshot:
        """Let a paused engine go on for the few steps that fit into its pipeline; it is paused again afterwards.

        Stage 1 is stopped meanwhile, so that no speed of the machine lets more of them through.
        """
        with self.engine.stopped("stage1"):
            await self.do(Resume())
            await self.until(lambda picture: any(r.in_flight for r in picture.requests), "steps are in flight")
            paused = asyncio.create_task(self.do(Pause(mode="keep")))
            await self.until(lambda picture: picture.engine.state == "paused", "is told to pause")
        await paused
        return await self.pause()

    async def halfway(self, prompts: list[list[int]] | list[str], count: int = 6, **sampling: Any) -> list[str]:
        """Return requests of which each has written `count` tokens and none has ended; the engine is paused.

        They are queued anew when one was through before the engine could be paused.
        """
        for _ in range(CATCHES):
            names = await self.submit_all(prompts, **sampling)
            await self._all_written(names, count, sampling)
            await self.pause()
            if await self._alive(names, sampling):
                return names
            await self.do(Resume())
            await self.abort(*names)
        raise AssertionError(f"{CATCHES} times, a request was through before it could be paused")

    @contextlib.asynccontextmanager
    async def frozen(self, prompt: Prompt, count: int = 6, **sampling: Any) -> AsyncIterator[str]:
        """Yield a request that is held while it writes: stage 1 is stopped with steps of it.

        Verbs begun inside find it in flight; leaving lets it go on. It is queued anew when it was through before.
        """
        for _ in range(CATCHES):
            name = await self.submit(prompt, **sampling)
            await self._all_written([name], count, sampling)
            with self.engine.stopped("stage1"):
                if await self._caught(name, sampling):
                    yield name
                    return
            await self.abort(name)
        raise AssertionError(f"{CATCHES} times, a request was through before it could be held")

    @contextlib.asynccontextmanager
    async def crowd(self, prompts: list[list[int]] | list[str], **sampling: Any) -> AsyncIterator[list[str]]:
        """Yield requests that all began before any of them could write: stage 1 is stopped. Leaving lets them go on."""
        await self.pause()
        names = await self.submit_all(prompts, **sampling)
        with self.engine.stopped("stage1"):
            await self.do(Resume())
            yield names

    async def _all_written(self, names: list[str], count: int, sampling: dict[str, Any]) -> None:
        for name in names:
            for sample in range(sampling.get("n", 1)):
                await self.written(name, count, sample)

    async def _caught(self, name: str, sampling: dict[str, Any]) -> bool:
        """Tell whether all samples are there, and steps of them are held by the stage that is stopped.

        What the stage had answered before it was stopped arrives within a moment; after that nothing moves.
        """
        moved: list[Any] | None = None
        while await self._alive([name], sampling):
            infos = [request for request in (await self.now()).requests if request.id.partition(".")[0] == name]
            now = [(request.id, request.in_flight, request.output_tokens) for request in infos]
            if now == moved:
                return any(request.in_flight for request in infos)
            moved = now
            await asyncio.sleep(0.2)
        return False

    async def _alive(self, names: list[str], sampling: dict[str, Any]) -> bool:
        every = [f"{name}.{sample}" if sample else name for name in names for sample in range(sampling.get("n", 1))]
        living = {request.id for request in (await self.now()).requests}
        return living.issuperset(every)


@dataclass
class Begun:
    """A command under way: what it said so far, and its end to come."""

    accepted: asyncio.Event = field(default_factory=asyncio.Event)
    deferred: list[str] = field(default_factory=list)
    end: asyncio.Task[Outcome | Refused] = field(init=False)

    def take(self, step: Accepted | Deferred) -> None:
        """Take one piece of progress."""
        self.accepted.set()
        if isinstance(step, Deferred):
            self.deferred.append(step.text)

    async def applied(self) -> Outcome:
        """Return the end, which must be that it was applied."""
        return await self._ended("applied")

    async def superseded(self) -> Outcome:
        """Return the end, which must be that another command took its place."""
        return await self._ended("superseded")

    async def _ended(self, state: str) -> Outcome:
        end = await self.end
        assert isinstance(end, Outcome), end
        assert end.state == state, end
        return end


def core_time(picture: Snapshot) -> float:
    """Return when the core said what it says in a picture (wall clock); 0 when it has said nothing yet."""
    return 0.0 if picture.core_age_ms is None else picture.sampled_at - picture.core_age_ms / 1000
