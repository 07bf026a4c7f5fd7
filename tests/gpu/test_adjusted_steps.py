"""Adjusted rows in steps of a GPU stage: its own runner and kernels, the device a stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ppengine.checkpoint.config_json import IDS_MOST
from ppengine.protocol.sampling import MAX_BAD_WORDS, MAX_STOP_TOKENS
from ppengine.protocol.steps import TOKEN_ON_DEVICE, Adjustments
from ppengine.stage.backends.cuda import device_buffers, step_sampler
from ppkernels.gpu import sampling
from ppkernels.gpu.adjust import MOST_WORDS
from ppkernels.sampling import sample_reference
from ppkernels.sampling_inputs import Adjustment, SamplingInputs
from standin_card import WIDTH, Device, Layers, StandInStage, alone, decode, prompt, request

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")
CHANGE = Adjustments(frequency_penalty=2.0, repetition_penalty=1.5, bad_words_ids=[[7], [6, 6]], logit_bias={0: 30.0})
STEPS = 9


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandInStage:
    made = Device(monkeypatch)
    monkeypatch.setattr(device_buffers, "DeviceSampling", sampling.DeviceSampling)
    monkeypatch.setattr(step_sampler, "choose", sampling.choose)
    stage = alone(made, tmp_path)
    stage.step(map_blocks=8).finish()
    return stage


def expected() -> list[int]:
    """Return greedy tokens of the stand-in's model: its logits are the ids, by the newest token plus two."""
    known, output = np.arange(1, 7), list[int]()
    for _ in range(STEPS):
        newest = output[-1] if output else int(known[-1])
        logits = torch.arange(WIDTH).float().mul(newest + 2).unsqueeze(0)
        row = Adjustment(
            known, np.array(output, np.int64), frequency_penalty=2.0, repetition_penalty=1.5,
            bad_words=[[7], [6, 6]], logit_bias={0: 30.0},
        )  # fmt: skip
        inputs = SamplingInputs([0.0], [1.0], [0], [0], [0], [0], adjustments={0: row})
        output.append(int(sample_reference(logits, inputs).tokens))
    return output


def run(stage: StandInStage, known: list[int], count: int) -> list[int]:
    """Register a request with the outputs `known`; return `count` tokens. No step waits for the one before."""
    fields = request(tokens=6)
    (register,) = fields["register"]
    register.tokens, register.adjustments = [*range(1, 7), *known], CHANGE
    steps = [stage.step(prompt(tokens=6 + len(known)), **fields)]
    steps += [stage.step(decode(6 + len(known) + more, TOKEN_ON_DEVICE)) for more in range(count - 1)]
    for pending in steps:
        pending.finish()
    return [one.token for pending in steps for one in pending.retired.sampled]


def test_the_next_step_knows_the_token_that_the_host_has_not_seen(stage: StandInStage) -> None:
    tokens = expected()
    assert len(set(tokens)) > 2
    assert run(stage, [], STEPS) == tokens


def test_a_request_that_is_computed_again_goes_on_to_the_same_tokens(stage: StandInStage) -> None:
    tokens = expected()
    assert run(stage, [], 4) == tokens[:4]
    stage.step(release=[0]).finish()
    assert run(stage, tokens[:3], STEPS - 3) == tokens[3:]


def test_a_row_has_room_for_all_ends_of_sequence_that_a_checkpoint_may_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Device(monkeypatch)
    monkeypatch.setattr(device_buffers, "DeviceSampling", sampling.DeviceSampling)
    ends = list(range(IDS_MOST))
    monkeypatch.setattr(Layers, "spec", SimpleNamespace(vocab_size=WIDTH, eos_token_ids=ends))
    fields = request()
    fields["register"][0].min_tokens = 1
    fields["register"][0].stop_token_ids = [*ends, *range(IDS_MOST, IDS_MOST + MAX_STOP_TOKENS)]
    alone(made, tmp_path).step(**fields).finish()


def test_a_record_has_room_for_what_the_core_takes() -> None:
    assert MOST_WORDS >= MAX_BAD_WORDS


def test_a_slot_that_goes_to_another_request_is_not_adjusted(stage: StandInStage) -> None:
    run(stage, [], 2)
    stage.step(release=[0]).finish()
    pending = stage.step(prompt(), **request())
    pending.finish()
    assert [one.token for one in pending.retired.sampled] == [WIDTH - 1]
