"""Flags of `vllm serve` are answered with their counterparts in `ppconsole serve`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from cli_helpers import Cli
from ppconsole.cli import vllm_flags
from ppengine.common.config import Profile


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys, tmp_path)


@pytest.mark.parametrize(
    ("words", "here"),
    [
        (["--max-model-len", "512"], "it is --set model.max_model_len=VALUE"),
        (["--max_model_len=512"], "it is --set model.max_model_len=VALUE"),
        (["--enable-prefix-caching"], "it is --set scheduler.prefix_caching=true"),
        (["--no-enable-prefix-caching"], "it is --set scheduler.prefix_caching=false"),
        (["-tp", "2"], "it is --set parallel.tensor=VALUE"),
        (["--dtype", "auto"], "it is --set model.dtype=VALUE"),
        (["--host", "0.0.0.0"], "it is --http HOST:PORT"),
        (["--served-model-name", "x"], "it is --set 'http.model_names=[VALUE, ...]'"),
    ],
)
def test_a_flag_of_vllm_is_answered_with_that_of_serve(cli: Cli, words: list[str], here: str) -> None:
    run = cli("serve", "tiny", *words)
    option = words[0].partition("=")[0] if words[0].startswith("--") else words[0][:2]
    assert (run.code, run.err) == (2, f"error: No such option '{option}'; {here}. See: ppconsole serve --help\n")


def test_other_commands_and_flags_are_answered_as_before(cli: Cli) -> None:
    assert cli("attach", "--dtype", "x").err == "error: No such option '--dtype'. See: ppconsole attach --help\n"
    assert "Did you mean '--name'?" in cli("serve", "tiny", "--naem", "x").err


@pytest.mark.parametrize("key", sorted(set(vllm_flags.KEYS.values())))
def test_each_key_is_one_of_a_profile(key: str) -> None:
    section, _, name = key.partition(".")
    sections = {field.name: field.type for field in msgspec.structs.fields(Profile)}
    assert name in {field.name for field in msgspec.structs.fields(sections[section])}


def test_no_flag_here_is_one_of_serve(cli: Cli) -> None:
    options = {word for line in cli("serve", "--help").out.splitlines() for word in line.split()[:1]}
    assert "--http" in options and not options & (vllm_flags.KEYS.keys() | vllm_flags.OTHERS.keys())


def test_a_port_alone_is_refused_with_the_form_of_an_address(cli: Cli) -> None:
    process = cli.process("serve", "tiny", "--http", "8000")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "'8000' is no address; it must be HOST:PORT" in error
