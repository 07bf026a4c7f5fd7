"""Named workloads, and the driver of vLLM against a stand-in of it."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from fake_vllm import install
from ppengine.bench.__main__ import check_options, make_rounds, parse
from ppengine.bench.beside import Vllm, check_installed, vllm_arguments
from ppengine.bench.named_workloads import WORKLOADS
from ppengine.bench.vllm_worker.drawn_weights import DrawnWeights
from ppengine.bench.workload import GREEDY, Job, Sampling
from ppengine.common.config import ConfigError, Profile
from ppengine.common.profile_sections import ModelConfig, ParallelConfig
from ppengine.models.loader import DUMMY_SCALE
from torch import nn


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `vllm` for processes started from here; the file that its calls are written to."""
    install(tmp_path, monkeypatch)
    return tmp_path / "calls"


def make_profile(path: str) -> Profile:
    model = ModelConfig(path=path, dtype="bfloat16", load_format="dummy", max_model_len=2048)
    return Profile(name="beside", model=model, parallel=ParallelConfig(pipeline=2))


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_workload_is_the_same_each_time(name: str) -> None:
    work = WORKLOADS[name].scaled(0.02)
    first, second = work.jobs(500, 0), work.jobs(500, 0)
    assert first == second and len(first) == work.requests
    other = work.jobs(500, 1)
    assert [len(job.prompt) for job in other] == [len(job.prompt) for job in first]
    assert other != first, "new ids, so that no prefix of another round is found"
    for job in first:
        assert work.prefix + work.low <= len(job.prompt) <= work.prefix + work.high
        assert job.output_len == work.output and all(0 <= token < 500 for token in job.prompt)
        assert job.sampling == (Sampling(0.8, 0.95, 50) if name == "sampled" else GREEDY)
    assert len({tuple(job.prompt[: work.prefix]) for job in first}) == 1


def test_rounds_of_a_file_find_nothing_of_each_other(tmp_path: Path) -> None:
    """Token ids need no tokenizer: the folder has none."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt_token_ids": [1, 7, 8]}\n\n{"prompt_token_ids": [1, 7, 9], "output_len": 5}\n')
    (rounds,) = make_rounds(arguments(prompts=file), tmp_path, 500).values()
    first, *others = itertools.islice(rounds, 4)
    assert [(job.prompt, job.output_len) for job in first] == [([1, 7, 8], 64), ([1, 7, 9], 5)]
    for jobs in others:
        assert [job.prompt[1:] for job in jobs] == [[7, 8], [7, 9]]
        assert [job.output_len for job in jobs] == [64, 5]
    begins = [{job.prompt[0] for job in jobs} for jobs in (first, *others)]
    assert all(len(each) == 1 for each in begins), "prompts that begin alike still do"
    assert len(set.union(*begins)) == 4
    file.write_text('{"prompt": "a text"}')
    with pytest.raises(ConfigError, match="no tokenizer"):
        make_rounds(arguments(prompts=file), tmp_path, 500)


def test_the_workloads_are_those_of_the_docs() -> None:
    shown = {name: (w.requests, w.low, w.high, w.output, w.prefix) for name, w in WORKLOADS.items()}
    assert shown == {
        "offline": (512, 64, 512, 256, 0), "single": (1, 128, 128, 256, 0), "single-long": (1, 12_000, 12_000, 256, 0),
        "sixteen": (16, 64, 512, 256, 0), "long-prompts": (48, 4_000, 14_000, 128, 0),
        "sampled": (256, 64, 512, 256, 0), "prefix": (256, 16, 128, 64, 1_500),
    }  # fmt: skip
    small = WORKLOADS["offline"].scaled(0.1)
    assert (small.requests, small.low, small.high, small.output) == (51, 6, 51, 26)


def arguments(**fields: object) -> argparse.Namespace:
    own = {"workload": [], "scale": 1.0, "requests": 32, "prompt_len": "16:128", "output_len": 64, "prompts": None}
    online = {"online": False, "rate": [], "load": [], "url": None, "slo": None}
    return argparse.Namespace(**{**own, **online, "seed": 0, **fields})


@pytest.mark.parametrize("words", [["--gbps", "-5"], ["--gbps", "0"], ["--tflops", "nan"]], ids="=".join)
def test_a_device_has_rates_above_zero(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "tiny", *words])
    with pytest.raises(SystemExit) as caught:
        parse()
    assert (
        caught.value.code == 2 and f"argument {words[0]}: {words[1]} is not a number above 0" in capsys.readouterr().err
    )


def test_options_that_exclude_each_other_are_refused() -> None:
    check_options(arguments(workload=["offline", "single"], scale=0.5))
    with pytest.raises(ConfigError, match="--scale shrinks a --workload; name one"):
        check_options(arguments(scale=0.5))
    with pytest.raises(ConfigError, match="--workload single prefix has its own requests; leave --output-len away"):
        check_options(arguments(workload=["single", "prefix"], output_len=3))
    with pytest.raises(ConfigError, match="--online measures one workload; choose one of single, offline"):
        check_options(arguments(workload=["single", "offline"], online=True))
    rounds = make_rounds(arguments(workload=["sixteen"], scale=0.25), Path(), 300)["sixteen"]
    assert [next(rounds) for _ in range(2)] == [WORKLOADS["sixteen"].scaled(0.25).jobs(300, k) for k in range(2)]


def test_vllm_gets_the_same_requests(fake_vllm: Path, tmp_path: Path) -> None:
    jobs = [Job([1, 2, 3], 4, Sampling(0.8, 0.95, 50)), Job([5], 2, Sampling(0.8, 0.95, 50))]
    with Vllm(vllm_arguments(make_profile(str(tmp_path))), sys.executable) as other:
        assert other.started.version == "0.0.fake"
        assert other.run(jobs) > 0 and other.run([Job([1], 1)]) > 0
    calls = fake_vllm.read_text().splitlines()
    said = f'["{tmp_path}", 1, 2, "bfloat16", "dummy", 2048, ["draw_weights", 0.05]]'
    assert calls == [f"[{said}, [3, 1], [0.8, 0.95, 50, 1]]", f"[{said}, [1], [0.0, 1.0, -1, null]]"]


def test_weights_of_a_checkpoint_stay(fake_vllm: Path, tmp_path: Path) -> None:
    profile = make_profile(str(tmp_path))
    read = msgspec.structs.replace(profile, model=msgspec.structs.replace(profile.model, load_format="auto"))
    with Vllm(vllm_arguments(read), sys.executable) as other:
        other.run([Job([1], 1)])
    assert '"auto", 2048], [1]' in fake_vllm.read_text()


def test_dummy_weights_of_vllm_are_drawn_as_ours() -> None:
    layers = nn.ModuleDict({"q_proj": nn.Linear(200, 100), "input_layernorm": nn.LayerNorm(5000)})
    worker = DrawnWeights()
    worker.model_runner = SimpleNamespace(model=layers)
    assert worker.draw_weights(DUMMY_SCALE) == 4
    for name, parameter in layers.named_parameters():
        one = name == "input_layernorm.weight"
        assert parameter.mean().item() == pytest.approx(float(one), abs=0.03), name
        assert parameter.std().item() == pytest.approx(DUMMY_SCALE, rel=0.5), name


def test_a_vllm_that_fails_is_reported(
    fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="vLLM ended with exit code"):
        Vllm(vllm_arguments(make_profile(str(tmp_path / "broken"))), sys.executable)
    assert "RuntimeError: no such model" in capfd.readouterr().err
    monkeypatch.setenv("FAKE_SHORT", "1")
    with (
        Vllm(vllm_arguments(make_profile(str(tmp_path))), sys.executable) as other,
        pytest.raises(ValueError, match="made 1 tokens"),
    ):
        other.run([Job([1], 5)])


def test_without_vllm_it_says_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ppengine.bench", "tiny", "--workload", "single", "--scale", "0.1"]
    ran = subprocess.run([*command, "--beside", "vllm", "--json"], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1 and ran.stderr.startswith(f"error: {sys.executable} has no vLLM: pip install vllm there")
    with pytest.raises(ValueError, match=r"--vllm-python .*/nowhere: No such file or directory"):
        check_installed(str(tmp_path / "nowhere"))


def test_vllm_runs_by_a_python_of_its_own(fake_vllm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other Python finds vLLM, and this package only here."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "packages"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.delenv("PYTHONPATH")
    check_installed(str(python))
    with Vllm(vllm_arguments(make_profile(str(tmp_path))), str(python)) as other:
        assert other.started.version == "0.0.fake"
    with pytest.raises(ValueError, match="has no vLLM"):
        check_installed(sys.executable)
