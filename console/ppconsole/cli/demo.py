"""`demo`: a small engine of its own, and the console on it."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from ppconsole.cli import exits
from ppconsole.cli.bundled_engine import PROFILE, START_S, until_serving
from ppconsole.cli.options import json_option, timeout_option
from ppconsole.cli.session import print_json, run, say

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord
    from ppengine.protocol.recording import Update
    from ppengine.protocol.snapshot import Snapshot

    from ppconsole.link.engine_link import EngineLink

TEXT_S = 120.0
PROMPTS = (
    "Once upon a time",
    "The little fox",
    "In the morning the old man",
    "She opened the door and",
    "The river was",
    "One day a bird",
)
MAX_TOKENS = 48
_FIGURES_S, _UNSEEN_S = 1.0, 4.0
"""Every figure of a stage is renewed within the first; after the second, no sample of it will come."""
LOAD_SETTINGS = ("memory.device_mib=20", "scheduler.max_num_seqs=24")
"""Under --load: little enough memory that requests wait, are swapped and preempted."""


@click.command("demo")
@click.option("--headless", is_flag=True, help="Submit prompts, print their texts and the stages, and end.")
@click.option("--load", is_flag=True, help="Keep the engine busy enough to wait, swap and preempt.")
@click.option("--allow-faults", is_flag=True, help="Let `ppconsole fault` break it on demand.")
@json_option("As --headless: one text a line, then the last snapshot.")
@timeout_option("Give up if it does not serve, or --headless has not ended, within S seconds (exit code 5).")
def demo_command(headless: bool, load: bool, allow_faults: bool, as_json: bool, timeout: float | None) -> int:
    """Try it: a small engine and the console on it.

    Two CPU stages serve the bundled model. Leaving the console stops the demo."""
    from ppconsole.cli.launch import EngineProcess, need_engine
    from ppconsole.cli.screen import has_terminal
    from ppconsole.cli.serving import profile_arguments

    need_engine()
    headless = headless or as_json or not has_terminal()
    begun = time.monotonic()
    settings = LOAD_SETTINGS if load else ()
    engine = EngineProcess(profile_arguments(PROFILE, settings, _free_name(), allow_faults), silent=True)
    # SIGTERM and a closed terminal end the demo as Ctrl-C does, through the `finally` below: asyncio turns that into a
    # cancellation, where an exception out of the blue may end in some callback that swallows it.
    ended: list[int] = []

    def end(number: int, _: object) -> None:
        ended.append(number)
        signal.raise_signal(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    try:
        record = run(lambda: until_serving(engine, timeout or START_S))
        if headless:
            left = TEXT_S if timeout is None else timeout - (time.monotonic() - begun)
            return run(lambda: _headless(record, load, as_json, left))
        code = _with_console(record, load)
        return exits.INTERRUPTED if ended else code
    finally:
        say("stopping the demo")
        engine.stop()
        engine.close()


def _free_name() -> str:
    """Return `demo-N`, the first that no engine here has."""
    from ppengine.protocol.discovery import RuntimeDirError, list_engines

    try:
        taken = {record.name for record in list_engines()}
    except RuntimeDirError as error:
        raise exits.Failure(str(error)) from None
    return next(name for number in itertools.count(1) if (name := f"demo-{number}") not in taken)


async def _headless(record: EngineRecord, load: bool, as_json: bool, limit_s: float) -> int:
    """Submit all prompts at once, print their texts as they end, then the stages as they are when all have ended."""
    from ppconsole.cli.load import Load
    from ppconsole.cli.options import Common
    from ppconsole.cli.session import attached

    pictures = _Newest()
    background = Load(record) if load else None
    if background is not None:
        background.start()
    try:
        async with attached(Common(engine=record.id), pictures.take) as link, asyncio.timeout(limit_s):
            texts = [asyncio.create_task(_complete(link, prompt)) for prompt in PROMPTS]
            ended = set()
            try:
                for text in asyncio.as_completed(texts):
                    done = await text
                    ended.add(done.request)
                    _show_text(done, as_json)
            finally:
                for task in texts:
                    task.cancel()
                await asyncio.gather(*texts, return_exceptions=True)
            last = await pictures.behind(ended)
    finally:
        if background is not None:
            background.stop()
    _show_picture(last, as_json)
    return exits.DONE


class _Newest:
    """The newest snapshot of a link."""

    def __init__(self) -> None:
        self._last: Snapshot | None = None
        self._came = asyncio.Event()

    def take(self, update: Update) -> None:
        """Take one update of the link."""
        from ppengine.protocol.snapshot import Snapshot

        if isinstance(update, Snapshot):
            self._last = update
            self._came.set()

    async def behind(self, requests: set[str]) -> Snapshot:
        """Return the first snapshot without any of `requests` and with a newer sample of every stage.

        A stage without a newer sample keeps its last one.
        """
        begun = time.monotonic()
        while True:
            self._came.clear()
            await self._came.wait()
            past_s, last = time.monotonic() - begun, self._last
            if last is None or not requests.isdisjoint(request.id for request in last.requests):
                continue
            ages = [stage.sample_age_ms for stage in last.stages]
            seen = all(age is not None and past_s - age / 1e3 > _FIGURES_S for age in ages)
            if seen or past_s > _UNSEEN_S:
                return last


class _Text(NamedTuple):
    """The result of a prompt."""

    request: str
    prompt: str
    text: str


def _show_text(done: _Text, as_json: bool) -> None:
    from ppconsole.model.safe import clean

    if as_json:
        print_json(done._asdict())
    else:
        click.echo(clean(done.prompt + done.text))


def _show_picture(snapshot: Snapshot, as_json: bool) -> None:
    from ppconsole.cli.render import pool_line, stage_lines

    if as_json:
        print_json({"snapshot": snapshot})
    else:
        click.echo("\n".join(["", *stage_lines(snapshot.stages), pool_line(snapshot)]))


async def _complete(link: EngineLink, prompt: str) -> _Text:
    """Return a prompt and its text once it has ended."""
    from ppengine.protocol.sampling import SamplingParams
    from ppengine.protocol.verbs import Submit

    from ppconsole.cli.submitting import submit

    answer = await submit(link, Submit(prompt=prompt, sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)))
    if not isinstance(answer, str):
        code = getattr(answer, "code", "FAILED")
        raise exits.Failure(f"submit: {answer.text}", exits.OF_CODE[code])
    text, tokens = "", 0
    while True:
        part = await link.fetch(answer, offset=tokens, text_offset=len(text))
        text, tokens = text + part.text, tokens + len(part.token_ids)
        if part.finished:
            return _Text(answer, prompt, text)


def _with_console(record: EngineRecord, load: bool) -> int:
    from ppconsole.cli.load import Load
    from ppconsole.cli.screen import open_console

    background = Load(record) if load else None
    if background is not None:
        background.start()
    try:
        return open_console(record, note="leaving stops the demo")
    finally:
        if background is not None:
            background.stop()
