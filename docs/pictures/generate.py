"""Take the pictures of every screen at three sizes from the real console on a real engine, and write docs/screens.md.

    python docs/pictures/generate.py [SCREEN]...     needs rsvg-convert and pngquant (Debian: librsvg2-bin, pngquant)

An engine of the bundled model starts in a private folder and gets requests of three users. Later one of its stages is
stopped and continued. Then an engine of two stages with two ranks each has one rank stopped. The console is headless,
so that no terminal decides about fonts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from textual.pilot import Pilot

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SIZES = ((80, 24), (120, 36), (200, 50))
USERS = (("alice", 6), ("bob", 4), ("carol", 5))
"""Owners, and how many requests of each run at a time."""
_TOKENS = 3000
_SERVES_S = 120.0
_SETTLE_S = 1.5
"""Seconds in which a screen has the newest figures."""
_CELL = 10
"""Pixels of a cell in a PNG."""
_COLOURS = 64


class Scene(NamedTuple):
    """One screen: its keys from the main screen (a word that begins with `:` is typed), and a caption."""

    name: str
    keys: tuple[str, ...]
    caption: str


CALM = (
    Scene("main", (), "Main screen: stages, pool, requests, timeline, KV map, trends, log, prompt."),
    Scene("filter", ("/", ":owner:bob out>20", "enter"), "Main screen with a filter of requests."),
    Scene("request", ("enter",), "One request: progress, blocks on each stage, latencies, text."),
    Scene("marks", ("space", "space", "down", "space", "a"), "One plan for all marked requests."),
    Scene("finished", ("H",), "Requests that have ended."),
    Scene("trends", ("T",), "Trends over minutes to an hour."),
    Scene("events", ("e",), "Events, in order."),
    Scene("logs", ("l",), "Logs of the engine's processes."),
    Scene("stacks", ("s",), "Call stacks of stages and core."),
    Scene("streams", ("v",), "Streams, hand-offs and live checks."),
    Scene("past", ("h",), "Time travel through the last hour."),
    Scene("engines", ("w",), "Engines on this host; those that ended are below."),
    Scene("confirm", (":", ":set-memory 0.6", "enter"), "The plan of a verb, before anything happens."),
    Scene("help", ("question_mark",), "Help: the selected row in words, keys, legend of the screen."),
    Scene("stage", ("tab", "enter"), "One stage: streams, memory, steps, card."),
)
STUCK = (
    Scene("stuck", (), "Main screen while stage 2 is stopped."),
    Scene("diagnosis", ("d",), "Diagnosis: the stage, the cause, the evidence, the command that mends it."),
)
RANKS = (
    Scene("topology", ("L",), "Topology of two stages with two ranks each: places, neighbours, ways of messages."),
    Scene("ranks", ("tab", "down", "u"), "Stage 1 is opened into its ranks, of which one is stopped."),
    Scene("rank", ("enter",), "One rank beside the others of its stage."),
    Scene("rank-diagnosis", ("d",), "Diagnosis: the stopped rank, and the ranks that wait for it."),
)
"""Each goes on from the one before: the rank stays selected."""
FIXED = (Scene("tiers", ("V",), "Tiers, with fixed figures: device, host, backends and stores."),)
"""Taken without an engine, from the snapshot of their tests."""
HEALED = (Scene("incidents", ("I",), "Incidents: what happened, and how it ended."),)


def main() -> int:
    """Write the pictures that are asked for, or all of them with their page."""
    only = set(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="pp-pictures-", dir="/tmp") as folder:
        for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
            os.environ[name] = folder
        if not only or only - {scene.name for scene in (*RANKS, *FIXED)}:
            with served(Path(folder), "parallel.pipeline=4"), Load():
                asyncio.run(take_all(only))
        if not only or only & {scene.name for scene in RANKS}:
            with served(Path(folder), "parallel.pipeline=2", "parallel.tensor=2"), Load():
                asyncio.run(take_ranks(only))
        if not only or only & {scene.name for scene in FIXED}:
            asyncio.run(take_fixed())
    if not only:
        write_page()
    return 0


@contextlib.contextmanager
def served(folder: Path, *settings: str) -> Iterator[None]:
    """Run an engine with `settings` that allows faults."""
    log = folder / "serve.log"
    command = [sys.executable, "-m", "ppconsole", "serve", "tiny", "--name", "opal", "--allow-faults"]
    options = [word for setting in settings for word in ("--set", setting)]
    with log.open("w") as file:
        engine = subprocess.Popen([*command, *options], stdout=file, stderr=file)
    try:
        wait_for(lambda: "serving" in log.read_text(), "the engine serves")
        yield
    finally:
        engine.terminate()
        engine.wait(20)


def wait_for(done: Callable[[], bool], what: str) -> None:
    """Wait until `done`; raise TimeoutError after two minutes."""
    end = time.monotonic() + _SERVES_S
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {_SERVES_S:g} s")
        time.sleep(0.1)


def cli(*words: str) -> list[str]:
    """Return the command line of the CLI on this engine."""
    return [sys.executable, "-m", "ppconsole", "-e", "opal", *words]


class Load:
    """Clients of three users: each submits again when its request has ended."""

    def __enter__(self) -> None:
        self._ends = threading.Event()
        names = [name for name, count in USERS for _ in range(count)]
        self._threads = [threading.Thread(target=self._submit, args=each) for each in enumerate(names)]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()

    def _submit(self, number: int, user: str) -> None:
        environ = {**os.environ, "USER": user, "LOGNAME": user}
        tokens = _TOKENS // 3 + number * 97 % _TOKENS
        words = cli("submit", f"Tell me about pipelines, part {number}", "--max-tokens", str(tokens), "--ignore-eos")
        while not self._ends.is_set():
            quiet = subprocess.DEVNULL
            client = subprocess.Popen(words, env=environ, stdout=quiet, stderr=quiet)
            while client.poll() is None and not self._ends.wait(0.2):
                pass
            client.kill()
            client.wait()


async def take_all(only: set[str]) -> None:
    """Take the pictures, in the order in which things happen to the engine."""
    await asyncio.sleep(20)
    await take(CALM, only)
    await asyncio.to_thread(subprocess.run, cli("fault", "sigstop", "--stage", "2"), check=True, capture_output=True)
    await asyncio.sleep(3)
    await take(STUCK, only)
    await asyncio.to_thread(subprocess.run, cli("continue", "2"), check=True, capture_output=True)
    await asyncio.sleep(8)
    await take(HEALED, only)


async def take_ranks(only: set[str]) -> None:
    """Take the pictures of ranks: first the calm one, then those with rank 1 of stage 1 stopped."""
    await asyncio.sleep(8)
    await take(RANKS[:1], only)
    status = await asyncio.to_thread(subprocess.run, cli("status", "--json"), check=True, capture_output=True)
    stages = json.loads(status.stdout)["stages"]
    pid = next(each["pid"] for each in stages if (each["index"], each["tensor_rank"]) == (1, 1))
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(3)
        await take(RANKS[1:], only)
    finally:
        os.kill(pid, signal.SIGCONT)


async def take(scenes: tuple[Scene, ...], only: set[str]) -> None:
    """Take `scenes` at each size, with one console each, that goes back to its main screen after each of them."""
    from ppconsole.app import ConsoleApp
    from ppconsole.link.engine_link import EngineLink
    from ppconsole.link.find import find_engine

    wanted = [scene for scene in scenes if not only or scene.name in only]
    for size in SIZES if wanted else ():
        app = ConsoleApp(EngineLink(find_engine("opal"), slow=True), theme="pp-dark")
        async with app.run_test(size=size) as pilot:
            await asyncio.sleep(_SETTLE_S)
            for scene in wanted:
                await press(pilot, scene.keys)
                await asyncio.sleep(_SETTLE_S)
                write_picture(scene, size, app.export_screenshot(title=f"ppconsole, {size[0]}x{size[1]}"))
                await press(pilot, ("escape",) * 3 if scene.keys else ())


async def take_fixed() -> None:
    """Take the pictures of fixed figures."""
    sys.path.insert(0, str(ROOT / "tests" / "console"))
    from test_tiers import picture
    from test_tui_console import console

    for size in SIZES:
        async with console(picture(), size=size) as rig:
            for scene in FIXED:
                await press(rig.pilot, scene.keys)
                write_picture(scene, size, rig.app.export_screenshot(title=f"ppconsole, {size[0]}x{size[1]}"))


async def press(pilot: Pilot[object], keys: tuple[str, ...]) -> None:
    """Press `keys`, one after the other as a hand does."""
    names = {" ": "space", "-": "minus", ":": "colon", ".": "full_stop", ">": "greater_than_sign", "/": "slash"}
    for key in keys:
        if key.startswith(":") and key != ":":
            await pilot.press(*(names.get(one, one) for one in key[1:]))
        else:
            await pilot.press(names.get(key, key))
        await asyncio.sleep(0.4)


def write_picture(scene: Scene, size: tuple[int, int], svg: str) -> None:
    """Write a PNG with few colours."""
    target = HERE / f"{scene.name}-{size[0]}x{size[1]}.png"
    svg = svg.replace("<text ", '<text xml:space="preserve" ')  # Else rsvg-convert trims each piece's spaces.
    width = str(size[0] * _CELL)
    png = subprocess.run(["rsvg-convert", "-w", width], input=svg.encode(), check=True, capture_output=True).stdout
    few = subprocess.run(["pngquant", str(_COLOURS), "-"], input=png, check=True, capture_output=True).stdout
    target.write_bytes(few)
    print(f"{target.relative_to(ROOT)}: {len(few)} bytes")


def write_page() -> None:
    """Write the page with all pictures."""
    lines = ["# Screens", "", "Every screen in terminals of 80×24, 120×36 and 200×50 cells. The columns are in the"]
    lines += ["[handbook](handbook.md). `python docs/pictures/generate.py` took the pictures from a real engine of the"]
    lines += ["bundled model with four stages. Those of ranks are from one with two stages of two ranks.", ""]
    for scene in (*CALM, *STUCK, *HEALED, *RANKS, *FIXED):
        lines += [f"## {scene.name.capitalize()}", "", scene.caption, ""]
        for width, height in SIZES:
            lines += [f"![{scene.name} at {width}×{height}](pictures/{scene.name}-{width}x{height}.png)", ""]
    (ROOT / "docs" / "screens.md").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
