"""Two ranks that share a vocabulary sample what one card does, and exchange best tokens where those decide.

Runners, groups and kernels are a card's. The device is a stand-in, and each rank a process that shares its memory.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which has no macOS build")

from interpreted_ranks import fork, interpret_few_programs
from kernel_variants import Variants
from ppengine.checkpoint.model_shard import Shard, shard_of
from ppengine.models.group import ALONE, Group
from ppengine.models.layers import gather_logits
from ppengine.protocol.place import Place
from ppengine.protocol.steps import Adjustments, Check, Mask, Register, Row
from ppengine.protocol.token_mask import TokenMask
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppengine.stage.backends.cuda.device_tokens import LocalTokenTable
from ppengine.stage.backends.cuda.streams import Order, Stream
from standin_card import CPU, TOKENS, Device, Layers, StandInDriver, StandInStage, decode, prompt
from standin_sampling import booted, join, sampling_card
from thread_group import make_spec
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")
SIZE, VOCABULARY, SLOTS = 2, 43, 4
LOGITS = torch.randn(32, VOCABULARY, generator=torch.Generator().manual_seed(2)).mul_(1.5).round_()
"""Few levels, so that the best token of a row is in many columns."""
MASK = TokenMask(b"\0\x0f\0\0\0\4\0\0")
HOT: dict[str, Any] = {"temperature": 0.8}
BELOW: dict[str, Any] = {**HOT, "top_k": 5}
BANNED: dict[str, Any] = {"min_tokens": 30, "stop_token_ids": list(range(0, VOCABULARY, 2))}
ADJUSTED: dict[str, Any] = {"adjustments": Adjustments(frequency_penalty=0.5, min_p=0.1)}


class SplitLayers(Layers):
    """A model with a rank's columns of `LOGITS`: each token has a row."""

    spec = SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=[])

    def __init__(self, device: Device, shard: Shard, group: Group) -> None:
        super().__init__(device, True, True)
        self.shard, self.group = shard, group

    def logits(self, hidden: Tensor) -> Tensor:
        return LOGITS[hidden[:, 0].long() % len(LOGITS), slice(*self.shard.vocabulary)].contiguous()

    def gather(self, logits: Tensor) -> Tensor:
        return gather_logits(logits, self.shard, self.group)


class Case(NamedTuple):
    """A step, and the numbers of exchanges of logits, of best tokens, and of candidates below top-k in it."""

    rows: list[Row]
    gathers: int = 0
    choices: int = 0
    more: dict[str, Any] | None = None
    below: int = 0


def registered(*wishes: dict[str, Any]) -> dict[str, Any]:
    """Return what a step needs to make a request known in each slot."""
    registers = []
    for slot in range(SLOTS):
        tokens = [(5 * place + 3 * slot) % VOCABULARY for place in range(TOKENS)]
        register = Register(slot, f"r{slot}", tokens, TOKENS, 0.0, 1.0, 0, slot, 0, 0, [], -1)
        for name, value in wishes[slot % len(wishes)].items():
            setattr(register, name, value)
        registers.append(register)
    return {"register": registers, "tables": [(slot, 0, list(range(1, 12))) for slot in range(SLOTS)]}


def decodes(token: int, *slots: int) -> list[Row]:
    return [row for slot in slots for row in decode(20, token + slot, slot)]


CASES = [
    Case(prompt(), 0, 1, registered({})),
    Case([Row(0, 0, 6, False, -2)]),
    Case(decodes(3, 0), 0, 1),
    Case(decodes(7, 0, 1, 2), 0, 1),
    Case([*decodes(9, 1), *prompt(tokens=4)], 0, 1),
    Case([*decodes(9, 1, 2), *prompt(tokens=12)], 0, 1),
    Case(decodes(12, 0, 1), 1, 0, {"masks": [Mask([1], MASK)]}),
    Case(decodes(13, 0, 1), 1, 0, {"late": [1]}),
    Case(decodes(14, 0, 1), 1, 0, {"checks": Check.FINITE}),
    Case(decodes(15, 0, 1), 0, 1, {"checks": 0}),
    Case(decodes(16, 0, 1, 2), 1, 0, registered({}, HOT)),
    Case(decodes(17, 0, 2), 0, 1),
    Case([*decodes(18, 1), *prompt(tokens=12)], 1, 0),
    Case(decodes(19, 0, 1, 2, 3), 0, 1, registered({}, BANNED)),
    Case(decodes(20, 0, 1), 1, 0, registered({}, ADJUSTED)),
    Case(decodes(21, 0, 1), 1, 0, registered({"logprobs": 2}, {})),
    Case(prompt(tokens=TOKENS), 1, 1, registered({"prompt_logprobs": 2})),
    Case(decodes(22, 3, 2, 1, 0), 0, 1),
    Case(decodes(23, 0, 1, 2, 3), 0, 0, registered(BELOW), 1),
    Case([*decodes(24, 1), *prompt(tokens=12)], 0, 0, registered({}, {**BELOW, "top_p": 0.7, **BANNED}), 1),
    Case(decodes(25, 0, 2), 0, 1),
    Case(decodes(26, 0, 1, 2), 0, 0, None, 1),
    Case(decodes(27, 0, 1), 1, 0, {"masks": [Mask([1], MASK)]}),
    Case(decodes(28, 0, 1), 1, 0, {"late": [1]}),
    Case(decodes(29, 0, 1), 1, 0, {"checks": Check.FINITE}),
    Case(decodes(30, 0, 1), 0, 0, {"checks": 0}, 1),
    Case(decodes(31, 0, 1), 1, 0, registered(BELOW, {**HOT, "top_k": 65})),
    Case(decodes(3, 0, 1), 1, 0, registered(BELOW, {**BELOW, "top_k": -1})),
    Case(decodes(4, 0, 1), 1, 0, registered(BELOW, {**BELOW, **ADJUSTED})),
    Case(decodes(5, 0, 1), 1, 0, registered(BELOW, {**BELOW, "logprobs": 0})),
    Case(decodes(6, 0, 1), 0, 0, registered({**HOT, "top_k": 31}, {}), 1),
    Case(decodes(7, 0, 1, 2), 1),  # more candidates than a call has words
]


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Variants:
    return Variants(monkeypatch, runs=True)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, variants: Variants) -> Device:
    interpret_few_programs(monkeypatch)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return sampling_card(monkeypatch, (4, 8))


def make_rank(card: Device, folder: Path, rank: int) -> tuple[StandInStage, CardGroup]:
    """Return a booted stage of one rank that has not met the other."""
    own = folder / str(rank)
    own.mkdir()
    driver: Any = StandInDriver(card)
    compute = Stream("compute", CPU, purpose="compute", order=Order())
    group = CardGroup(driver, "GPU-1", Place(0, rank), SIZE, folder, compute, 1)
    shard = shard_of(make_spec(vocab_size=VOCABULARY), rank, SIZE)
    return make_stage(card, own, SplitLayers(card, shard, group), group), group


def make_stage(card: Device, folder: Path, model: SplitLayers, group: CardGroup | None = None) -> StandInStage:
    stage = StandInStage(card, folder, 0, 1, model)
    stage.run_on(tokens=LocalTokenTable(), group=group)
    stage.runner._late._late_masks = lambda number: [Mask([1], MASK)]
    booted(stage)
    return stage


def run(stage: StandInStage, case: Case) -> tuple[Any, list[int]]:
    """Return the acknowledgement of a step, and the newest tokens of all slots."""
    retired = stage.step(case.rows, **case.more or {}).finish()
    assert stage.buffers.latest is not None
    return retired, stage.buffers.latest[:SLOTS].tolist()


def test_ranks_sample_what_one_card_does(card: Device, variants: Variants, tmp_path: Path) -> None:
    alone = make_stage(card, tmp_path, SplitLayers(card, shard_of(make_spec(vocab_size=VOCABULARY)), ALONE))
    wanted = [run(alone, case) for case in CASES]
    assert len({token for _, newest in wanted for token in newest}) > 12
    variants.taken()
    ranks = [make_rank(card, tmp_path, rank) for rank in range(SIZE)]
    warmed = variants.taken()
    join([group for _, group in ranks], 1)

    def live(rank: int) -> None:
        stage, group = ranks[rank]
        calls: list[str] = []
        for name in ("all_gather", "choose_greedy", "choose_below"):
            setattr(group, name, _noted(getattr(group, name), calls))
        for number, (case, (retired, newest)) in enumerate(zip(CASES, wanted, strict=True)):
            calls.clear()
            found, found_newest = run(stage, case)
            tokens = np.array([one.token for one in retired.sampled], np.int64)
            assert found_newest == newest, number
            assert found.digest == zlib.crc32(tokens.tobytes()), number
            if rank == 0:
                assert (found.sampled, found.prompts) == (retired.sampled, retired.prompts), number
            wanted_calls = ["all_gather"] * case.gathers + ["choose_greedy"] * case.choices
            assert calls == wanted_calls + ["choose_below"] * case.below, number
        assert "replay" in card.log
        assert variants.taken() - warmed == set()

    fork(SIZE, live)


def _noted(call: Any, calls: list[str]) -> Any:
    def noted(*arguments: Any) -> Any:
        calls.append(call.__name__)
        return call(*arguments)

    return noted
