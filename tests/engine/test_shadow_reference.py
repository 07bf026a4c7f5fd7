"""The reference of the shadow check agrees with transformers, and a token that rounding cannot explain is found."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_logits
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.config import EngineConfig, build_profile
from ppengine.protocol.check_messages import ShadowTask
from ppengine.shadow import reference
from ppengine.shadow.reference import Reference

PROMPT, OUTPUTS = list(range(5, 45)), 24


def config_of(folder: Path, dtype: str = "float64", **model: object) -> EngineConfig:
    data = {"name": "t", "model": {"path": str(folder), "dtype": dtype, **model}, "parallel": {"pipeline": 2}}
    profile = build_profile(data, base=folder)
    return EngineConfig(
        id="t", name="t", epoch="e", profile=profile, model_path=str(folder), model_type="",
        layers=[(0, 2), (2, read_spec(folder).num_layers)], max_model_len=128, run_dir="/r", ring_dir="/d",
        started_wall=0.0,
    )  # fmt: skip


def task(outputs: list[int], **fields: object) -> ShadowTask:
    values = {"first": 0, "min_tokens": 0, "stop_token_ids": [], **fields}
    return ShadowTask(nonce=7, step=41, request="r-1", prompt_ids=PROMPT, output_ids=outputs, **values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("shadow") / "llama", "llama", dtype="float64")


@pytest.fixture(scope="module")
def outputs(folder: Path) -> list[int]:
    import torch

    return reference_greedy(folder, PROMPT, OUTPUTS, torch.float64)


@pytest.mark.parametrize("chunk", [7, 256])
def test_the_right_tokens_agree(folder: Path, outputs: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "CHUNK", chunk)
    judge = Reference(config_of(folder))
    answer = judge.judge(task(outputs))
    assert (answer.nonce, answer.compared, answer.difference) == (7, OUTPUTS, None)
    # Another request in the same cache, and only the end of it.
    assert judge.judge(task(outputs[:9], first=6)).compared == 3
    assert judge.judge(task(outputs)).difference is None


@pytest.mark.parametrize("at", [0, 11, OUTPUTS - 1])
def test_a_wrong_token_is_named_with_position_both_tokens_and_margin(folder: Path, outputs: list[int], at: int) -> None:
    import torch

    right = outputs[at]
    wrong = (right + 1) % 100
    answer = Reference(config_of(folder)).judge(task([*outputs[:at], wrong, *outputs[at + 1 :]]))
    assert answer.compared == at + 1, "what comes behind it was chosen from other tokens"
    finding = answer.difference
    assert finding is not None
    assert (finding.stage, finding.cause) == (None, "mismatch")
    position = len(PROMPT) + at
    assert finding.summary == f"request r-1: token {wrong} at position {position}, the reference gives {right}"
    row = reference_logits(folder, PROMPT + outputs[:at], torch.float64)[-1]
    margin = float(row[right] - row[wrong])
    assert f"the reference puts token {right} ahead by {margin:.3g}; " in "\n".join(finding.evidence)
    assert "looked at with step 41" in "\n".join(finding.evidence)


def test_tokens_that_may_not_come_yet_are_no_choice_of_the_reference(folder: Path, outputs: list[int]) -> None:
    """A stop token is banned before min_tokens: the engine's second best is right, and was not without the ban."""
    import torch

    row = reference_logits(folder, PROMPT, torch.float64)[-1]
    best, second = row.topk(2).indices.tolist()
    judge = Reference(config_of(folder))
    assert judge.judge(task([second])).difference is not None
    assert judge.judge(task([second], min_tokens=1, stop_token_ids=[best, 10_000])).difference is None


def test_a_choice_within_rounding_is_no_difference(
    folder: Path, outputs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    row = reference_logits(folder, PROMPT, torch.float64)[-1]
    first, second = row.topk(2).values.tolist()
    token = int(row.topk(2).indices[1])
    judge = Reference(config_of(folder))
    for factor, differs in ((0.49, True), (0.51, False)):
        monkeypatch.setattr(judge, "_tolerance", lambda _, limit=factor * (first - second): limit)
        assert (judge.judge(task([token])).difference is not None) == differs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precision_agrees_with_itself_in_other_chunks(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that one cut of the prompt gives are fine for another: rounding is allowed for."""
    judge = Reference(config_of(folder, dtype))
    tokens: list[int] = []
    for _ in range(12):
        monkeypatch.setattr(reference, "CHUNK", 5)
        row = judge._logits(task([*tokens, 0], first=len(tokens)))[0]
        tokens.append(int(row.argmax()))
    monkeypatch.setattr(reference, "CHUNK", 256)
    assert judge.judge(task(tokens)).difference is None
    wrong = task([*tokens[:5], (tokens[5] + 1) % 100])
    assert dtype == "bfloat16" or judge.judge(wrong).difference is not None


def test_half_precision_of_gpus_is_judged_in_float32_with_the_weights_that_they_have(
    folder: Path, outputs: list[int]
) -> None:
    import torch

    exact, judge = Reference(config_of(folder)), Reference(config_of(folder, "bfloat16"), gpus=True)
    row, wanted = judge._logits(task(outputs[:1]))[0], exact._logits(task(outputs[:1]))[0]
    assert row.dtype == torch.float32 and not torch.allclose(row.double(), wanted, atol=1e-5), "weights are rounded"
    # What bfloat16 computes is within what is allowed for, a choice that is far from it is not.
    half = Reference(config_of(folder, "bfloat16"))
    limit = judge._tolerance(row.double())
    assert float((half._logits(task(outputs[:1]))[0].double() - row.double()).abs().max()) < limit
    assert limit == pytest.approx(half._tolerance(row.double())) and limit > 1000 * exact._tolerance(row.double())
    assert Reference(config_of(folder, "float32"), gpus=True)._logits(task([3])).dtype == torch.float32


def test_dummy_weights_are_those_of_the_stages(folder: Path) -> None:
    first, second = (Reference(config_of(folder, load_format="dummy")) for _ in range(2))
    rows = [judge._logits(task([3])) for judge in (first, second)]
    assert msgspec.json.encode(rows[0].tolist()) == msgspec.json.encode(rows[1].tolist())
