"""`ppconsole bench` on a real engine: what it prints adds up."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_vllm import install

COMMAND = [sys.executable, "-m", "ppconsole", "bench"]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=100)


def test_a_run_says_where_its_time_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    ran = bench("tiny", "--no-baseline", "--rounds", "1", "--requests", "8", "--output-len", "24", "--json")
    assert ran.returncode == 0, ran.stderr
    lines = ran.stderr.splitlines()
    first, timed, rates, *stages = map(json.loads, ran.stdout.splitlines())
    assert (first["profile"], first["requests"], first["stages"]) == ("tiny", 8, 2)
    assert timed["engine_tok_s"] > 0 < rates["engine_tok_s"]
    assert rates["of_limit"] == pytest.approx(rates["engine_tok_s"] / rates["limit_tok_s"], rel=0.02)
    assert rates["copy_gbps"] > 0 < rates["product_tflops"]
    assert [stage["stage"] for stage in stages] == [0, 1]
    batches = {stage["micro_batches"] for stage in stages}
    assert len(batches) == 1 and batches.pop() >= 24, "both stages have done every micro-batch"
    for stage in stages:
        assert 0 < stage["idle"] < 1
        parts = ("compute_ms", "sample_ms", "send_ms", "memory_ms", "other_ms")
        assert stage["own_ms"] == pytest.approx(sum(stage[part] for part in parts), abs=0.01)
        assert stage["of_copy"] == pytest.approx(stage["gbps"] / rates["copy_gbps"], abs=0.001)
    assert stages[1]["sample_ms"] > 0 == stages[0]["sample_ms"], "the last stage samples"
    assert [line.split()[0] for line in lines[-3:-1]] == ["0", "1"]
    assert lines[-1].startswith("layers [4, 4]")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_bench_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    process = subprocess.Popen([*COMMAND, "tiny", "--no-baseline", "--rounds", "1000"], stdout=subprocess.PIPE)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        assert process.stdout is not None and process.stdout.readline()
        assert b"ppengine.bench" in _command(children)
        bench = int(children.read_text())
        process.send_signal(number)
        assert process.wait(20) == 128 + number
        assert not Path(f"/proc/{bench}").exists()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "words",
    [
        ["bench", "tiny", "--no-baseline"],
        ["bench", "--help"],
        ["plan", "tiny", "--cards", "2", "--gbps", "100", "--tflops", "10", "--memory", "1"],
        ["plan", "--help"],
    ],
)
def test_an_output_that_is_full_or_closed_is_no_crash(words: list[str]) -> None:
    command = shlex.join([*COMMAND[:-1], *words])
    full = subprocess.run(f"{command} >/dev/full", shell=True, stderr=subprocess.PIPE, text=True)
    says = "error: the output or a temporary file cannot be written: No space left on device\n"
    assert (full.returncode, full.stderr) == (1, says)
    read, write = os.pipe()
    os.close(read)
    left = subprocess.run(shlex.split(command), stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (left.returncode, left.stderr) == (1, "")


def _command(children: Path) -> bytes:
    """Return the command line of the one child; empty before it is there."""
    pids = children.read_text().split()
    return Path(f"/proc/{pids[0]}/cmdline").read_bytes() if pids else b""


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (
            ["tiny", "--rounds", "0"],
            2,
            "argument --rounds: 0 is not a number of 1 or more. See: ppconsole bench --help",
        ),
        (["tiny", "--output-length=3"], 2, "unrecognized arguments: --output-length=3. See: ppconsole bench --help"),
        (["tiny", "--timeout", "nan"], 2, "argument --timeout: nan is not a number of seconds above 0, 1e6 at most"),
        (["tiny", "--timeout", "0.000001"], 5, "not done within 1e-06 s"),
    ],
)
def test_what_it_cannot_do_it_says_in_one_line(words: list[str], code: int, says: str) -> None:
    ran = bench(*words)
    assert (ran.returncode, ran.stdout) == (code, "")
    assert ran.stderr.startswith(f"error: {says}")
    assert ran.stderr.count("\n") == 1


def test_weights_that_are_dummies_are_not_compared() -> None:
    ran = bench("opt-6.7b-pp1")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == (
        "error: model.load_format is dummy: transformers has no weights to compare; add --no-baseline\n"
    )


def test_a_plan_of_the_bundled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With costs measured here: the weights and blocks that the engine has, and a layout to take."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    words = ["plan", "tiny", "--cards", "2", "--requests", "8", "--input", "32", "--output", "16", "--json"]
    ran = subprocess.run([*COMMAND[:-1], *words], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    plan = json.loads(ran.stdout)
    assert [(row["pipeline"], row["tensor"]) for row in plan["layouts"]] == [(1, 1), (1, 2), (2, 1)]
    for row in plan["layouts"]:
        assert row["refusal"] == "" and row["at_once"] > 0
        assert row["single_tokens_s"] > 0 < row["tokens_s"]
    assert plan["layouts"][0]["weights_bytes"] == [14_168_832]
    assert plan["take"] in ("1 x 1", "1 x 2", "2 x 1") and "tokens/s expected" in plan["why"]
    assert plan["costs"]["hop"]["points"][0][1] > 0 < plan["costs"]["reduce"]["2"]["points"][0][1]


def test_a_plan_for_cards_that_are_not_here() -> None:
    words = ["plan", "llama-8b-pp1", "--cards", "2", "--gbps", "4000", "--tflops", "600"]
    ran = subprocess.run([*COMMAND[:-1], *words], capture_output=True, text=True, timeout=100)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "error: --gbps and --tflops describe cards that are not here: add --memory GIB\n"
    ran = subprocess.run([*COMMAND[:-1], *words, "--memory", "80"], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("take 1 x 2: ")
    assert "   2 x 1" in ran.stdout
    ran = subprocess.run([*COMMAND[:-1], *words, "--memory", "8"], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 8 and ran.stdout.splitlines()[-1] == "no layout fits"


def test_a_workload_has_its_own_requests() -> None:
    assert bench("tiny", "--workload", "single", "--requests", "4").stderr == (
        "error: --workload single has its own requests; leave --requests away\n"
    )


def test_a_workload_by_name_and_the_same_requests_in_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for vLLM, which makes its tokens in no time."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    install(tmp_path, monkeypatch)
    words = ["--workload", "sampled", "single", "--scale", "0.05", "--beside", "vllm", "--rounds", "1", "--json"]
    ran = bench("tiny", *words)
    assert ran.returncode == 0, ran.stderr
    first, *lines = map(json.loads, ran.stdout.splitlines())
    assert first["requests"] == 13 + 1
    rates = {(line["side"], line["workload"]): line["tok_s"] for line in lines if "tok_s" in line}
    assert set(rates) == {(side, name) for side in ("engine", "vllm") for name in ("sampled", "single")}
    assert rates["vllm", "sampled"] > rates["engine", "sampled"] > 0
    assert [line["vllm"] for line in lines if "vllm" in line] == ["0.0.fake"]
    assert [line["workload"] for line in lines if 0 <= line.get("ratio", 1) < 1] == ["sampled", "single"]
    calls = [len(json.loads(line)[1]) for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == [8, 13, 1, 1], "a few requests warm it up"
    assert ran.stderr.splitlines()[-1].startswith("single")


def test_requests_that_arrive_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, without a tokenizer, beside the core's own socket and a stand-in for `vllm serve`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    install(tmp_path, monkeypatch)
    words = ["--set", "model.skip_tokenizer=true", "--requests", "6", "--prompt-len", "4:8", "--output-len", "5"]
    ran = bench(
        "tiny", *words, "--online", "--rounds", "1", "--rate", "50", "--slo", "ttft_ms=60000", "--beside", "vllm",
        "--beside-args=--no-enable-prefix-caching", "--json",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    rows = [line for line in lines if "side" in line]
    assert [(row["side"], row["load"]) for row in rows] == [
        ("engine", "all"), ("engine", "50/s"), ("socket", "50/s"), ("vLLM", "all"), ("vLLM", "50/s"),
    ]  # fmt: skip
    for row in rows:
        assert row["errors"] == 0 and row["reached_rate"] > 0 < row["good_rate"], row
        assert row["tokens_s"] == pytest.approx(5 * row["reached_rate"], rel=0.01)
        assert 0 <= row["ttft_ms"][0] <= row["ttft_ms"][2] <= row["e2e_ms"][2]
    assert rows[1]["asked_rate"] == rows[4]["asked_rate"] == 50
    found = {name: value for line in lines for name, value in line.items()}
    assert found["over_http"] > 0 < found["cpu_a_token"]["http_us"] and found["vllm"] == "0.0.fake"
    assert [line["load"] for line in lines if "ratios" in line] == ["all", "50/s"]
    serve = json.loads((tmp_path / "calls").read_text())
    assert serve[0] == "serve" and serve[-1] == "--no-enable-prefix-caching"
    assert serve[serve.index("--pipeline-parallel-size") + 1] == "2" and "--skip-tokenizer-init" not in serve
    assert "engine / vLLM at 50/s" in ran.stderr.splitlines()[-1]
