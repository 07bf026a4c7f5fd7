"""What `import ppconsole.cli` brings with it, and the exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import typing
from pathlib import Path

from click.testing import CliRunner
from ppconsole.cli import COMMANDS, exits, ppconsole
from ppconsole.cli.environment import VARIABLES
from ppengine.protocol.control import ErrorCode, Outcome

HEAVY = ("torch", "textual", "numpy", "zmq", "ray", "transformers", "msgspec")

MEASURE = """
import json, sys, time
begun = time.perf_counter()
import ppconsole.cli
took = time.perf_counter() - begun
print(json.dumps([took, sorted(name for name in sys.modules if "." not in name)]))
"""


def test_import_is_light_and_quick() -> None:
    took = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
        seconds, modules = json.loads(done.stdout)
        took.append(seconds)
        assert not set(HEAVY) & set(modules)
    print(f"import ppconsole.cli: {min(took) * 1000:.0f} ms more than bare Python")
    assert min(took) < 1.0  # generous: the figure is printed, and a busy machine must not fail this


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from ppconsole.cli import main; main(['--help']); "
        f"sys.exit(bool({set(HEAVY)!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in COMMANDS:
        assert f"\n  {name} " in done.stdout
    assert "..." not in done.stdout.partition("Commands:")[2], "a help line is cut"


def test_every_command_of_the_design_is_there() -> None:
    design = (
        "demo tour serve attach ls status watch events show logs doctor submit follow abort preempt swap-out swap-in "
        "release priority set-memory pause resume drain stop explain stacks streams continue restart-stage cordon "
        "check record replay export bench plan fault help incidents history finished key context lease topology "
        "clients limit kick drain-client store wait"
    )
    assert set(COMMANDS) == set(design.split())
    for name in COMMANDS:
        command = ppconsole.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.name == name


def test_every_verb_takes_json_and_a_timeout() -> None:
    """`bench` and `plan` take them, too, in parsers of their own. The others wait for nothing."""
    for name in set(COMMANDS) - {"bench", "plan", "help", "key", "context", "store"}:
        command = ppconsole.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        options = {word for parameter in command.params for word in parameter.opts}
        assert {"--json", "--timeout"} <= options, name


def test_every_error_and_every_end_has_an_exit_code() -> None:
    assert set(exits.OF_CODE) == set(typing.get_args(ErrorCode))
    states = typing.get_type_hints(Outcome)["state"]
    assert set(exits.OF_STATE) == set(typing.get_args(states))
    assert {exits.OF_CODE[code] for code in ("DENIED", "EXPIRED", "CONFLICT", "NOT_FOUND", "DOES_NOT_FIT")} == set(
        range(4, 9)
    )


def test_the_help_lists_every_environment_variable_that_the_code_reads() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = [*(root / "console").rglob("*.py"), *(root / "engine").rglob("*.py")]
    read = {name for path in sources for name in re.findall(r'"(PPCONSOLE_\w+)"', path.read_text())}
    listed = {variable.name for variable in VARIABLES}
    assert read and not read - listed
    text = CliRunner().invoke(ppconsole, ["--help"]).output
    assert all(name in text for name in listed)
