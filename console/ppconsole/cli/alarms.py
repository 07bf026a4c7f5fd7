"""`watch --thresholds`: the console's thresholds and incidents without a screen, for cron, systemd and scripts."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common
from ppconsole.cli.session import WAITS, attached, print_json, say

if TYPE_CHECKING:
    from ppengine.protocol.recording import Update


async def watch_thresholds(common: Common, count: int | None) -> None:
    """Print and run alarms until SIGINT or SIGTERM, or until `count` of them. Raises Failure.

    With `count` an engine that ends is a Failure; without it, a successor of its name is waited for.
    """
    from ppengine.protocol.recording import LinkState
    from ppengine.protocol.snapshot import Snapshot

    from ppconsole.link.alarm_commands import AlarmCommands
    from ppconsole.link.config_file import ConfigFileError, config_path, read_config
    from ppconsole.model.thresholds import Alarm, AlarmConfig, Watches

    try:
        config = read_config(config_path())
    except ConfigFileError as error:
        raise exits.Failure(str(error), exits.USAGE) from None
    if config == AlarmConfig():
        text = f"{config_path()} has neither thresholds nor on_incident, so there is nothing to watch"
        raise exits.Failure(text, exits.USAGE)
    watches = Watches(config, time.monotonic)
    commands = AlarmCommands(lambda text, failed: say(text))
    over, printed, ended = asyncio.Event(), 0, ""

    def show(alarm: Alarm, engine: str) -> None:
        nonlocal printed
        state = "raised" if alarm.raised else "cleared"
        if common.json:
            print_json({"wall": time.time(), "state": state, "metric": alarm.metric, "value": alarm.value,
                        "text": alarm.text, "incident": alarm.incident, "engine": engine})  # fmt: skip
        else:
            click.echo(f"{time.strftime('%H:%M:%S')} {state} {alarm.text}")
        commands.run(alarm, engine)
        printed += 1
        if printed == count:
            over.set()

    def take(update: Update) -> None:
        nonlocal ended
        if isinstance(update, Snapshot) and not over.is_set():
            for alarm in watches.look(update):
                show(alarm, update.engine.id)
        elif isinstance(update, LinkState) and update.state == "ended" and count is not None:
            ended = update.text
            over.set()
        elif isinstance(update, LinkState) and update.state not in ("connecting", "live"):
            say(f"{update.text}{WAITS}" if update.state == "ended" else f"{update.state}: {update.text}")

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, over.set)
    try:
        async with attached(common, take, slow=True):
            await over.wait()
        if ended and count is not None and printed < count:
            raise exits.Failure(f"the engine {ended}", exits.NO_ENGINE)
        if count is not None and printed >= count:
            await commands.finished()
    finally:
        await commands.close()
