"""The finite check in a real pipeline of stages in one process: named stage, part, step, request, and why."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from ppengine.checkpoint.model_spec import read_spec
from ppengine.common.partition import partition_layers
from ppengine.models import StageModel, build_stage, load_weights
from ppengine.protocol.reports import Finding
from ppengine.protocol.steps import TOKEN_REGISTERED, Check, Register, Row
from ppengine.stage.backends.base import KvShape
from ppengine.stage.backends.cpu.kv_cache import CpuKvCache
from ppengine.stage.batch_state import BatchState
from ppengine.stage.checks import StageChecks
from ppengine.stage.finite_check import HOLD_S, FiniteCheck, is_finite
from ppengine.stage.generations import Generations

BLOCK, LAYERS = 8, 4
FAMILIES = ("opt", "opt-350m", "llama", "qwen3", "glm4")


class Clock:
    """Time that a test moves, in seconds; in place of the module `time`."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def monotonic_ns(self) -> int:
        return int(self.now * 1e9)


class Stage:
    """One stage with its check, run as the runner runs it."""

    def __init__(self, model: StageModel, index: int, dtype: torch.dtype) -> None:
        spec, (start, end) = model.spec, model.layer_range
        self.model = model
        self.state = BatchState(64, BLOCK)
        self.cache = CpuKvCache(KvShape(end - start, BLOCK, spec.num_kv_heads, spec.head_dim, dtype), 16)
        assert not self.cache.map_blocks(16)
        self.checks = StageChecks(index, 0, Generations(1))
        self.checks.apply(Check.FINITE)
        self.finite = FiniteCheck(index, model, self.state, self.cache, self.checks)

    def findings(self) -> list[Finding]:
        return [finding for message in self.checks.news() for finding in message.findings]


class Line:
    """All stages of a checkpoint."""

    def __init__(self, folder: Path, stages: int = 2) -> None:
        spec, self.step = read_spec(folder), 0
        self.stages = []
        for index, (start, end) in enumerate(partition_layers(spec.num_layers, stages)):
            model = build_stage(spec, (start, end), start == 0, end == spec.num_layers, torch.float64)
            load_weights(model, folder)
            model.pack()
            self.stages.append(Stage(model, index, torch.float64))

    def add(self, slot: int, count: int) -> None:
        for stage in self.stages:
            tokens = list(range(4, 4 + count))
            stage.state.register([Register(slot, f"r-{slot}", tokens, count, 0.0, 1.0, 0, 0, 0, 0, [], -1)])
            stage.state.set_tables([(slot, 0, [1 + 3 * slot, 2 + 3 * slot, 3 + 3 * slot])])

    def run(self, *rows: tuple[int, int, int]) -> None:
        """Run one step of (slot, start, count) rows through all stages."""
        self.step += 1
        hidden = torch.empty(0)
        with torch.inference_mode():
            for stage in self.stages:
                plan = stage.state.plan([Row(*row, True, TOKEN_REGISTERED) for row in rows])
                if stage.model.first:
                    ids = torch.from_numpy(stage.state.input_ids(plan, np.empty(0, np.int64)))
                    hidden = stage.model.embed(ids, plan.batch.positions)
                out = stage.model.run(hidden, plan.batch, stage.cache.layers)
                if stage.checks.looks_for_non_finite:
                    stage.finite.look(self.step, plan, hidden, out)
                hidden = out
                if stage.model.last:
                    logits = stage.model.logits(hidden[torch.from_numpy(plan.last_tokens)])
                    if stage.checks.looks_for_non_finite:
                        stage.finite.look_at_logits(self.step, plan, logits)

    def poison(self, name: str, value: float = float("nan")) -> None:
        """Put one bad number into the weights whose checkpoint name contains `name`."""
        for stage in self.stages:
            for source in stage.model.sources:
                target = source.target
                if name in source.name:
                    target.view(-1)[67 % target.numel()] = value  # row 0 and 1 of a position table are unused
                    return
        raise AssertionError(f"no weight {name}")

    def findings(self) -> list[Finding]:
        return [finding for stage in self.stages for finding in stage.findings()]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("finite")
    return {name: make_checkpoint(root / name, name, dtype="float64", layers=LAYERS) for name in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_healthy_model_gives_no_finding(family: str, folders: dict[str, Path]) -> None:
    line = Line(folders[family])
    line.add(0, 10)
    line.run((0, 0, 9))
    line.run((0, 9, 1))
    assert line.findings() == []


@pytest.mark.parametrize(
    ("family", "weight", "stage", "part"),
    [
        ("opt", "layers.1.self_attn.v_proj.weight", 0, "layer 1 attention"),
        ("opt", "layers.0.fc1.bias", 0, "layer 0 MLP"),
        ("opt", "layers.2.fc2.weight", 1, "layer 2 MLP"),
        ("opt", "embed_positions", 0, "embedding"),
        ("opt", "decoder.final_layer_norm.weight", 1, "head"),
        ("opt-350m", "layers.3.self_attn_layer_norm.weight", 1, "layer 3 attention"),
        ("llama", "layers.2.self_attn.k_proj.weight", 1, "layer 2 attention"),
        ("llama", "layers.3.mlp.down_proj.weight", 1, "layer 3 MLP"),
        ("llama", "lm_head", 1, "head"),
        ("qwen3", "layers.1.mlp.gate_proj.weight", 0, "layer 1 MLP"),
    ],
)
def test_the_first_part_is_named(family: str, weight: str, stage: int, part: str, folders: dict[str, Path]) -> None:
    line = Line(folders[family])
    line.poison(weight)
    line.add(0, 10)
    line.add(1, 10)
    line.run((0, 0, 9), (1, 0, 4))
    line.run((0, 9, 1))
    (finding,) = line.findings()
    assert (finding.stage, finding.cause) == (stage, "non_finite")
    assert finding.summary == f"stage {stage}: {part} gives NaN in m1, request r-0"
    text = "\n".join(finding.evidence)
    assert "requests: r-0, r-1 (2 of 2 in the step)" in text
    name = weight if weight != "lm_head" else "lm_head.weight"
    assert name in text and "values that are not finite" in text


def test_only_the_requests_that_have_it_are_named(folders: dict[str, Path]) -> None:
    """A bad KV block, as a swap or a stray copy would leave it: the weights are fine and say so."""
    line = Line(folders["opt"])
    line.add(0, 12)
    line.add(1, 12)
    line.run((0, 0, 9), (1, 0, 9))
    line.stages[1].cache.layers[0][4, 0, 2] = float("inf")
    line.run((0, 9, 1), (1, 9, 1))
    (finding,) = line.findings()
    assert finding.summary.startswith("stage 1: layer 2 attention gives ")
    assert finding.summary.endswith(" in m2, request r-1")
    text = "\n".join(finding.evidence)
    assert "requests: r-1 (1 of 2 in the step)" in text
    assert "weights of layer 2 are finite, 1 of its KV blocks are not: 4" in text
    assert "first at position 9" in text


def test_bad_values_from_the_stage_before_are_its_own(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage 0 does not look, so stage 1 says what it got; and waits with that for who knows better."""
    clock = Clock()
    monkeypatch.setattr("ppengine.stage.checks.time", clock)
    line = Line(folders["opt"])
    line.stages[0].checks.apply(0)
    line.poison("layers.0.fc1.bias")
    line.add(0, 9)
    line.run((0, 0, 9))
    clock.now += 0.9 * HOLD_S
    assert line.findings() == []
    clock.now += 0.2 * HOLD_S
    (finding,) = line.findings()
    assert finding.summary == "stage 1: input from stage 0 has NaN in m1, request r-0"


def test_what_a_second_run_does_not_show_is_no_weight(folders: dict[str, Path]) -> None:
    line = Line(folders["opt"], stages=1)
    (stage,) = line.stages
    line.add(0, 9)
    plan = stage.state.plan([Row(0, 0, 9, True, TOKEN_REGISTERED)])
    with torch.inference_mode():
        ids = torch.from_numpy(stage.state.input_ids(plan, np.empty(0, np.int64)))
        hidden = stage.model.embed(ids, plan.batch.positions)
        out = stage.model.run(hidden, plan.batch, stage.cache.layers)
        out[4, 1] = float("inf")
        stage.finite.look(1, plan, hidden, out)
    (finding,) = stage.findings()
    assert finding.summary == "stage 0: layers 0 to 3 gives infinite values in m1, request r-0"
    assert "a second run of the step is finite: no weight does it; something wrote where it should not" in (
        finding.evidence
    )


def test_off_forgets_and_on_begins_anew(folders: dict[str, Path]) -> None:
    line = Line(folders["opt"], stages=1)
    line.poison("layers.2.fc2.weight")
    line.add(0, 9)
    line.run((0, 0, 9))
    checks = line.stages[0].checks
    assert len(checks.news()[0].findings) == 1
    checks.apply(0)
    assert checks.news()[0].findings == []
    line.run((0, 0, 9))
    assert checks.news() == []
    checks.apply(Check.FINITE)
    line.run((0, 0, 9))
    news = checks.news()
    assert (len(news[-1].findings), news[-1].steps) == (1, [3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_is_finite(dtype: torch.dtype) -> None:
    values = torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)
    values[1] = torch.finfo(dtype).min
    assert is_finite(values)
    assert is_finite(values[:0])
    for bad in (float("nan"), float("inf"), float("-inf")):
        worse = values.clone()
        worse[2, 3] = bad
        assert not is_finite(worse)


def test_a_rank_of_several_runs_no_layer_again(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers may have found nothing: a second run would meet other calls of theirs."""
    line = Line(folders["llama"])
    line.add(0, 5)
    line.poison("layers.2.mlp.down_proj")
    model = line.stages[1].model
    monkeypatch.setattr(model, "group", SimpleNamespace(rank=1, size=2))
    monkeypatch.setattr(model, "parts", None)
    line.run((0, 0, 5))
    (finding,) = (one for one in line.findings() if "layers 2 to 3" in one.summary)
    assert any("layers.2.mlp.down_proj" in fact for fact in finding.evidence)
