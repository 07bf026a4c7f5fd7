"""`doctor`: what this machine has, and what would keep an engine or a console from working."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common, json_option, timeout_option
from ppconsole.cli.session import deadline, one_snapshot, print_json, run

if TYPE_CHECKING:
    from ppengine.protocol.discovery import EngineRecord

Level = Literal["ok", "note", "bad"]
_CONSOLE = ("ppconsole", "textual", "pyzmq", "msgspec", "click")
_PR_SET_PTRACER = 0x59616D61
_SPY_S = 3.0
_ANSWER_S = 2.0
"""Seconds for the gateway of a running engine to answer."""
COMPILERS = ("cc", "gcc", "clang")
"""C compilers that HTTP processes look for."""
_ENGINE = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "py-spy", "ray")


class Finding(NamedTuple):
    """One line: `bad` keeps something from working, `note` takes something away."""

    level: Level
    what: str
    text: str


@click.command("doctor")
@json_option()
@timeout_option("Give up after S seconds (exit code 5).")
def doctor_command(as_json: bool, timeout: float | None) -> int:
    """Check versions, folders, permissions and memory.

    Exit code 1 if something cannot work."""
    from ppconsole.model.safe import clean

    with deadline(timeout):
        findings = examine()
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        for finding in findings:
            click.echo(clean(f"{finding.level:<4} {finding.what:<12} {finding.text}"))
    return exits.ERROR if any(finding.level == "bad" for finding in findings) else exits.DONE


def examine() -> list[Finding]:
    """Return all findings."""
    return [
        _python(),
        _versions("console", _CONSOLE),
        _engine_extra(),
        *_runtime(),
        *_stacks(),
        *_compiler(),
        _cores(),
        _memory(),
        _shared_memory(),
    ]


def _python() -> Finding:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding("ok" if good else "bad", "python", version if good else f"{version}; 3.11 to 3.13 are supported")


def _versions(what: str, names: tuple[str, ...]) -> Finding:
    return Finding("ok", what, ", ".join(f"{name} {_version(name) or 'missing'}" for name in names))


def _engine_extra() -> Finding:
    if _version("torch") is None:
        return Finding("note", "engine", "not installed, the console works without: pip install 'ppconsole[engine]'")
    return _versions("engine", _ENGINE)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime() -> list[Finding]:
    from ppengine.protocol.discovery import RuntimeDirError, list_engines, runtime_dir

    try:
        folder = runtime_dir()
    except RuntimeDirError as error:
        return [Finding("bad", "folder", str(error))]
    # An engine's sockets are <folder>/<id>/<name>.
    longest = len(str(folder)) + 32
    engines = list_engines()
    names = ", ".join(f"{record.id} ({record.name})" for record in engines) or "none"
    return [_folder(folder, longest), Finding("ok", "engines", names), *map(_engine, engines)]


def _engine(record: EngineRecord) -> Finding:
    """Return whether all processes of an engine run, and its gateway answers."""
    from ppconsole.cli.host_report import troubles
    from ppconsole.link.engine_host import processes_of

    found = troubles(processes_of(record))
    try:
        run(lambda: one_snapshot(Common(record.id, timeout=_ANSWER_S)))
    except exits.Failure as error:
        found.append(f"{error}; see: ppconsole -e {record.id} explain")
    return Finding(
        "bad" if found else "ok", "engine", f"{record.name} ({record.id}): {'; '.join(found) or 'it answers'}"
    )


def _folder(folder: Path, longest: int) -> Finding:
    from ppengine.protocol.discovery import SOCKET_PATH_MOST

    if longest > SOCKET_PATH_MOST:
        text = (
            f"{folder} makes socket addresses of {longest} bytes, {SOCKET_PATH_MOST} fit; "
            "set XDG_RUNTIME_DIR to a shorter one"
        )
        return Finding("bad", "folder", text)
    return Finding("ok", "folder", f"{folder}, mode 0700")


def _stacks() -> list[Finding]:
    """Return the findings of the agents of running engines, or those of a test here."""
    from ppengine.protocol.discovery import list_engines

    records = {record.id: _read(f"{record.run_dir}/stacks.txt") for record in list_engines()}
    reports = [
        Finding("ok" if "and native" in text else "note", "stacks", f"{engine}: {text}")
        for engine, text in records.items()
        if text
    ]
    return reports or [_try_stacks()]


def _try_stacks() -> Finding:
    """Let py-spy look at this process, which allows it as stages do."""
    spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if spy is None:
        return Finding("note", "stacks", "py-spy is missing, so `stacks` has none; it comes with ppconsole[engine]")
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(-1), 0, 0, 0)
    command = [spy, "dump", "--native", "--pid", str(os.getpid())]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SPY_S, check=False)
        why = " ".join(done.stderr.partition("Stack backtrace")[0].split())[:200] if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        why = str(error)
    scope = _read("/proc/sys/kernel/yama/ptrace_scope") or "0"
    if not why:
        return Finding("ok", "stacks", f"{spy} sees native frames, kernel.yama.ptrace_scope {scope}")
    text = f"py-spy fails: {why} (kernel.yama.ptrace_scope {scope}); stacks come from faulthandler alone"
    return Finding("note", "stacks", text)


def _compiler() -> list[Finding]:
    """Return the C compiler of a host that can run engines."""
    if _version("torch") is None:
        return []
    found = next(filter(None, map(shutil.which, COMPILERS)), None)
    lack = f"none ({', '.join(COMPILERS)}): a token over HTTP takes twice the CPU, and kernels on GPUs need one"
    return [Finding("ok" if found else "note", "compiler", found or f"{lack}; try apt-get install gcc libc6-dev")]


def _cores() -> Finding:
    mine = len(os.sched_getaffinity(0))
    quota = _read("/sys/fs/cgroup/cpu.max").split()
    limit = f", of which the cgroup grants {int(quota[0]) / int(quota[1]):.1f}" if quota and quota[0] != "max" else ""
    return Finding("ok", "cores", f"{mine} of {os.cpu_count()}{limit}")


def _memory() -> Finding:
    from ppconsole.model.units import bytes_text

    fields = dict(line.split(":", 1) for line in _read("/proc/meminfo").splitlines() if ":" in line)
    total, free = (_kib(fields.get(name)) for name in ("MemTotal", "MemAvailable"))
    limit = _read("/sys/fs/cgroup/memory.max")
    capped = f", cgroup limit {bytes_text(int(limit))}" if limit.isdigit() else ""
    return Finding("ok", "memory", f"{bytes_text(free)} available of {bytes_text(total)}{capped}")


def _shared_memory() -> Finding:
    from ppconsole.model.units import bytes_text

    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Finding("bad", "/dev/shm", f"{error.strerror}: an engine keeps its recorder rings there")
    level: Level = "ok" if usage.free >= 64 * 2**20 else "bad"
    need = "" if level == "ok" else "; an engine needs 64M for its recorder rings"
    return Finding(level, "/dev/shm", f"{bytes_text(usage.free)} free of {bytes_text(usage.total)}{need}")


def _kib(text: str | None) -> int | None:
    return int(text.split()[0]) * 1024 if text else None


def _read(path: str) -> str:
    """Return the text of a file of the kernel, empty where it does not exist."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
