"""What cannot be done is refused in one line with the numbers and what would fit; the engine goes on serving."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import reference
from ppengine import LLM, SamplingParams
from ppengine.common.config import load_profile, profiles_dir
from ppengine.protocol.verbs import Abort, SetMemory, Submit
from serving import Ran, Served, stage_pids

from profiles import small

Serve = Callable[..., Ran]
STEPS = 24


@pytest.fixture(scope="module")
def engine() -> Iterator[Served]:
    settings = ["threads_per_stage=1", "model.max_model_len=128", "scheduler.max_num_batched_tokens=64"]
    with Served(load_profile("tiny", settings)) as served:
        yield served


@pytest.fixture
def serve(runtime: Path) -> Serve:
    """Run `ppconsole serve` on what cannot be served, to its end; assert that it leaves nothing in `runtime`."""

    def run(*words: str, at: Path = runtime) -> Ran:
        process = subprocess.run(
            [sys.executable, "-m", "ppconsole", "serve", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "XDG_RUNTIME_DIR": str(at)},
            text=True,
            timeout=60,
            check=False,
        )
        assert list((runtime / "ppconsole").glob("*")) == []
        return Ran(process.returncode, process.stdout, process.stderr)

    return run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the bundled model, to be spoiled."""
    return Path(shutil.copytree(profiles_dir() / "models" / "tiny", tmp_path / "model"))


def serves(engine: Served) -> None:
    """Check that the engine still writes."""
    ran = engine.cli("submit", "Once upon a time", "--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json")
    assert ran.code == 0, ran
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert sum(len(line.get("token_ids", [])) for line in lines) == 4


# --- before anything runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["tiny", "--set", "memory.utilisation=0.5"], 2, "key memory.utilisation; did you mean memory.utilization?"),
        (["tiny", "--set", "scheduler.preemtion=swap"], 2, "did you mean scheduler.preemption?"),
        (["tiny", "--set", "memory.utilization=0"], 2, "memory.utilization is 0; it must be above 0 and at most 1"),
        (["tiny", "--set", "memory.utilization=1.5"], 2, "memory.utilization is 1.5; it must be above 0 and at most 1"),
        (["tiny", "--set", "model.path=/nowhere"], 1, "/nowhere"),
        (["tiny", "--set", "parallel.pipeline=100"], 2, "100"),
        (["nothing"], 2, "no profile 'nothing'; bundled: llama-8b-pp1"),
        (["tiny", "--set", "scheduler.max_num_batched_tokens=1000000"], 2, "is 1000000; it must be 1 to 32768"),
        (["tiny", "--set", "memory=["], 2, "--set 'memory': line 1, column 2: "),
        (["tiny", "--set", "\x1b[2Jname=x"], 2, r"unknown key \x1b[2Jname; did you mean name?"),
        (["tiny", "--set", "k" * 10_000], 2, "write it as key=value, for example memory.utilization=0.5"),
        (["\x1b]0;x\x07/" * 300 + "a.yaml"], 2, r"no profile at \x1b]0;x\x07/"),
        (["tiny", "--name", "-x"], 2, "engine name is '-x'; it must be 1 to 64 letters"),
    ],
)  # fmt: skip
def test_profile_is_refused(serve: Serve, words: list[str], code: int, text: str) -> None:
    ran = serve(*words)
    assert ran.code == code, ran
    assert text in ran.error
    is_one_short_line(ran)


def is_one_short_line(ran: Ran) -> None:
    (line,) = ran.err.splitlines()
    assert line.isprintable()
    assert len(line) <= 300


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"a: &a [x]\nb: &b [*a, *a]", "anchors and aliases are not read"),
        (b"[" * 16_000, "more than 8 levels of nesting"),
        (b"name: \xff", "byte 0xff at offset 6 is not UTF-8"),
        (b"name: x\nname: y", "key 'name' is given twice"),
        (b"name: 2024-13-45 25:61\nmodel: {path: x}", "it must be 1 to 64 letters, digits"),
        (b"name: x\nmodel: {path: x}\nthreads_per_stage: 0x" + b"f" * 4_000, "is no whole number of 64 bits"),
    ],
)
def test_profile_file_that_is_made_to_harm(serve: Serve, tmp_path: Path, data: bytes, text: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(data)
    ran = serve(str(path))
    assert ran.code == 2
    assert ran.error.startswith(f"error: {path}: ")
    assert text in ran.error
    is_one_short_line(ran)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 10**9), ("head_dim", 33), ("eos_token_id", [[-1]]), ("model_type", "\x1b[2J" * 5_000)],
)
def test_model_that_lies(serve: Serve, model: Path, field: str, value: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {field: value}))
    ran = serve("tiny", "--set", f"model.path={model}")
    assert ran.code == 1
    assert ran.error.startswith(f"error: {path}: ")
    assert field in ran.error
    is_one_short_line(ran)


def test_missing_weights(serve: Serve, model: Path) -> None:
    (model / "model.safetensors").unlink()
    ran = serve("tiny", "--set", f"model.path={model}")
    assert ran.code == 1
    assert str(model) in ran.error
    assert "safetensors" in ran.error
    assert len(ran.err.splitlines()) == 1


def test_truncated_weights(serve: Serve, model: Path) -> None:
    weights = model / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 100)
    ran = serve("tiny", "--set", f"model.path={model}")
    assert ran.code == 1
    assert "truncated" in ran.error
    assert f"{size - 100}" in ran.error
    assert f"{size}" in ran.error
    assert len(ran.err.splitlines()) == 1


def test_too_small_for_one_sequence(serve: Serve) -> None:
    ran = serve("tiny", "--set", "memory.utilization=0.08", "--set", "threads_per_stage=1")
    assert ran.code == 8
    needs = r"utilization 0\.08 leaves \d+ blocks; one sequence of \d+ tokens needs (\d+): "
    found = re.search(needs + r"stage \d is short by [\d.]+ [KMG]iB; at least (0\.\d+) would fit", ran.error)
    assert found, ran.error
    assert float(found.group(2)) > 0.08


def test_name_in_use(serve: Serve, engine: Served) -> None:
    ran = serve("tiny", at=engine.runtime)
    assert ran.code == 1
    assert ran.error == f"error: an engine named 'tiny' runs already (id {engine.record.id}); give --name NAME"
    serves(engine)


# --- on a running engine ------------------------------------------------------------------------------------


def test_prompt_too_long(engine: Served) -> None:
    ran = engine.cli("submit", "word " * 200)
    assert ran.code == 8
    refused = r"error: submit refused: the prompt has (\d+) tokens, max_model_len is 128; at most 127 would fit"
    found = re.match(refused, ran.error)
    assert found, ran.error
    assert int(found.group(1)) > 127
    serves(engine)


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["set-memory", "0"], 2, "memory utilization is 0; it must be above 0 and at most 1"),
        (["set-memory", "1.5"], 2, "memory utilization is 1.5; it must be above 0 and at most 1"),
        (["set-memory", "nan"], 2, "memory utilization is nan; it must be above 0 and at most 1"),
        (["set-memory", "0.01"], 8, "utilization 0.01 leaves 0 blocks; one sequence of 128 tokens needs 9: stage "),
        (["set-memory", "0.01", "--dry-run"], 8, "utilization 0.01 leaves 0 blocks"),
        (["abort", "r-gone"], 7, "no request r-gone"),
        (["preempt", "r-gone"], 7, "no request r-gone"),
        (["show", "r-gone"], 7, "no request r-gone"),
        (["follow", "r-gone"], 7, "no request r-gone"),
        (["submit", "x", "--max-tokens", "0"], 2, "max_tokens is 0; it must be at least 1"),
        (["submit", "x", "--temperature", "-1"], 2, "temperature is -1.0; it must be 0 (greedy) to 100"),
        (["submit", "x", "--stop-token-ids", "a"], 2, "--stop-token-ids is 'a'; it must be numbers"),
        (["continue", "9"], 7, "no process of stage 9 runs"),
        (["stacks", "--stage", "9"], 7, "stage 9"),
    ],
)
def test_verb_is_refused(engine: Served, words: list[str], code: int, text: str) -> None:
    ran = engine.cli(*words)
    assert ran.code == code, ran
    assert text in ran.error
    assert len(ran.err.splitlines()) == 1


async def test_requests_that_make_no_sense(engine: Served) -> None:
    async with engine.operator() as op:
        for verb, text in (
            (Submit(prompt_token_ids=[5, 10**6]), "token id 1000000 is not in the vocabulary (0 to "),
            (Submit(prompt_token_ids=[-1]), "token id -1 is not in the vocabulary (0 to "),
            (Submit(prompt_token_ids=[]), "the prompt is empty; give at least one token"),
            (Submit(), "give either a prompt text or prompt_token_ids"),
            (Submit(prompt="x", prompt_token_ids=[5]), "give either a prompt text or prompt_token_ids"),
        ):
            assert (await op.refused(verb, "INVALID")).startswith(text)
        name = await op.submit([5, 6, 7], max_tokens=4)
        text = await op.refused(Submit(prompt_token_ids=[5], request=name), "INVALID")
        assert text == f"request id {name} is already in use"
        await op.tokens(name)
        text = await op.refused(Abort(request=name), "NOT_FOUND")
        assert text == f"request {name} has finished (length, 4 tokens)"
        await op.refused(SetMemory(utilization=float("nan")), "INVALID")
    serves(engine)


def test_engine_that_is_not_there(engine: Served, runtime: Path) -> None:
    assert engine.cli("status", "-e", "nobody").code == 3
    process = subprocess.run(
        [sys.executable, "-m", "ppconsole", "status"], capture_output=True, text=True, timeout=60, check=False
    )
    assert process.returncode == 3
    assert process.stderr.startswith("error: no engine runs here")


# --- from Python --------------------------------------------------------------------------------------------


def test_offline_refusals_leave_the_engine_serving() -> None:
    """One stage with more than one thread is what `LLM` has by default on most machines."""
    folder = profiles_dir() / "models" / "tiny"
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    profile = small(
        folder, stages=1, threads=2, model={"skip_tokenizer": False, "max_model_len": 64}, memory={"device_mib": 64}
    )
    with LLM(profile) as llm:
        engine = llm.llm_engine
        with pytest.raises(ValueError, match=r"prompt 1: the prompt has 70 tokens, max_model_len is 64; at most 63"):
            llm.generate([{"prompt_token_ids": [5]}, {"prompt_token_ids": [5] * 70}], params, use_tqdm=False)
        with pytest.raises(ValueError, match="token id 99999 is not in the vocabulary"):
            llm.generate([{"prompt_token_ids": [99999]}], params, use_tqdm=False)
        with pytest.raises(ValueError, match="request id a is given twice"):
            engine.add_many([{"prompt_token_ids": [5]}] * 2, [params] * 2, ["a", "a"])
        two = SamplingParams(n=2, max_tokens=3)
        with pytest.raises(ValueError, match=r"request id b\.1 is given twice"):
            engine.add_many([{"prompt_token_ids": [5]}] * 2, [two, params], ["b", "b.1"])
        (stage,) = stage_pids(engine.supervisor_pid, 0)
        os.kill(stage, signal.SIGSTOP)  # or it might be through before it is aborted
        try:
            engine.add_request("c", {"prompt_token_ids": [5] * 8}, SamplingParams(max_tokens=50, ignore_eos=True))
            engine.abort_request("c")
            engine.abort_request("c")
        finally:
            os.kill(stage, signal.SIGCONT)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[0].outputs[0].finish_reason == "abort"
        prompts = ["The engine stopped because", "Once upon a time", "To pause the engine,", "What is a block?"]
        params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt == prompt
        tokens = output.outputs[0].token_ids
        assert tokens == reference.greedy(folder, output.prompt_token_ids, STEPS, draft=tokens)
        assert output.outputs[0].finish_reason == "length"
