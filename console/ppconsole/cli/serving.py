"""`serve`, `bench` and `plan`: run an engine, or a measurement, in the foreground."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import json_option, timeout_option
from ppconsole.cli.session import print_json, say

if TYPE_CHECKING:
    from ppconsole.cli.launch import EngineProcess

_NOTED_S = 5.0
"""Seconds for the note of a gateway that has lost its supervisor."""


@click.command("serve")
@click.argument("profile")
@click.option("--set", "settings", multiple=True, metavar="a.b=c", help="Change one key of the profile; repeatable.")
@click.option("--name", help="Name of the engine; without it, the profile's.")
@click.option("--listen", metavar="tcp://IP:PORT", help="Also for consoles on other hosts, whose keys are allowed.")
@click.option(
    "--http",
    metavar="[HOST:PORT|unix:/PATH]",
    is_flag=False,
    flag_value="127.0.0.1:8000",
    help="Serve OpenAI's API there; 127.0.0.1:8000 without an address.",
)
@click.option("--tool-parser", metavar="NAME", help="Form of tool calls in the model's text; else by its template.")
@click.option("--otlp-traces-endpoint", metavar="URL", help="Send OpenTelemetry traces of requests there, over HTTP.")
@click.option("--allow-faults", is_flag=True, help="Let operators break it on demand: for drills.")
@click.option(
    "--journal", type=click.Choice(["on", "off"]), help="Keep requests on disk, so that they survive the core; else on."
)
@click.option("--restart", is_flag=True, help="Start another supervisor if it is killed: requests go on.")
@json_option("Print the engine's announcements as JSON lines.")
@timeout_option("End it if it does not serve within S seconds (exit code 5).")
def serve_command(
    profile: str,
    settings: Sequence[str],
    name: str | None,
    listen: str | None,
    http: str | None,
    tool_parser: str | None,
    otlp_traces_endpoint: str | None,
    allow_faults: bool,
    journal: str | None,
    restart: bool,
    as_json: bool,
    timeout: float | None,
) -> int:
    """Run an engine of PROFILE in the foreground.

    PROFILE is a bundled name or a .yaml file.
    """
    from ppconsole.cli.launch import EngineProcess, need_engine

    need_engine()
    texts = {"console.listen": listen, "http.listen": http, "http.tool_parser": tool_parser}
    texts["http.otlp_traces_endpoint"] = otlp_traces_endpoint
    # In quotes: YAML would take a port alone as a number.
    quoted = {key: json.dumps(value, ensure_ascii=False) for key, value in texts.items() if value is not None}
    journals = {} if journal is None else {"journal": journal}
    settings = [*settings, *(f"{key}={value}" for key, value in {**journals, **quoted}.items())]
    within = [] if timeout is None else [f"--within={timeout}"]
    engine = EngineProcess([*profile_arguments(profile, settings, name, allow_faults), *within], kept=restart)
    try:
        identity, passed = asyncio.run(_relay(engine, as_json))
        code = engine.wait(30.0)
        if code == -signal.SIGKILL and (reason := _noted_end(identity)):
            raise exits.Failure(f"engine {identity} has ended: {reason}")
        code = _exit_code(code, "the engine's supervisor", passed)
        # Ctrl-C is passed on, and an engine that stops in order has obeyed.
        return exits.INTERRUPTED if passed == signal.SIGINT and code == exits.DONE else code
    finally:
        engine.close()


@click.command("bench", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench_command(arguments: Sequence[str]) -> int:
    """Measure an engine; `bench --help` has options."""
    return _run_module("ppengine.bench", arguments, "the bench")


@click.command("plan", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan_command(arguments: Sequence[str]) -> int:
    """List layouts that fit; `plan --help` has options."""
    return _run_module("ppengine.bench.plan", arguments, "the plan")


def _run_module(module: str, arguments: Sequence[str], what: str) -> int:
    """Run a module of the engine in a process of its own and return its exit code."""
    from ppconsole.cli.launch import need_engine

    need_engine()
    process: subprocess.Popen[bytes] | None = None
    passed: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        if process is not None:
            process.send_signal(number)

    # The terminal's Ctrl-C reaches both of us; the module takes it once.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, pass_on)  # else it would go on by itself
    process = subprocess.Popen([sys.executable, "-m", module, *arguments])
    if passed:
        process.send_signal(passed[-1])
    return _exit_code(process.wait(), what, passed[-1] if passed else None)


def profile_arguments(profile: str, settings: Sequence[str], name: str | None, allow_faults: bool = False) -> list[str]:
    """Return the arguments of the supervisor."""
    arguments = [profile]
    for setting in settings:
        arguments.append(f"--set={setting}")
    # Joined by a sign: a value that begins with a dash is still a value.
    arguments += [] if name is None else [f"--name={name}"]
    return arguments + (["--allow-faults"] if allow_faults else [])


def _noted_end(identity: str) -> str:
    """Return the reason that the gateway notes when its supervisor is gone; empty: it has noted none in time."""
    from ppengine.protocol import kept_files

    until = time.monotonic() + _NOTED_S
    while identity and kept_files.engine_folder(identity).is_dir() and time.monotonic() < until:
        if (end := kept_files.read_end(identity)) is not None:
            return end.reason
        time.sleep(0.05)
    return ""


async def _relay(engine: EngineProcess, as_json: bool) -> tuple[str, int | None]:
    """Print the engine's announcements until it ends, and pass signals on to it; return its id and the first signal."""
    from ppconsole.model.safe import clean

    identity = ""
    passed: list[int] = []

    def pass_on(number: int) -> None:
        passed.append(number)
        engine.signal(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, pass_on, number)
    notices = await engine.notices()
    while (notice := await notices.get()) is not None:
        started = notice.get("event") == "started"
        if started:
            identity = clean(str(notice.get("id")))
        if as_json:
            print_json(notice)
        elif started:
            name = clean(str(notice.get("name")))
            say(f"engine {name} ({identity}) can be attached to: ppconsole attach {identity}")
    return identity, passed[0] if passed else None


def _exit_code(code: int, what: str, passed: int | None) -> int:
    """Return a process's exit code; 128 + N after the signal N that was `passed` on to it.

    Raises Failure for any other signal: `what` had no time to report anything.
    """
    if code >= 0:
        return code
    if -code == passed:
        return 128 - code
    raise exits.Failure(f"{what} was killed by {signal.Signals(-code).name}, and its child processes end with it")
