"""Random steps over two stages whose masks come at any time: all results are those of masks that are there at first.

The last stage runs its own runner, kernels and graphs. The device is a stand-in.
"""

from __future__ import annotations

import tempfile
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from ppengine.protocol.steps import (
    TOKEN_ON_DEVICE,
    TOKEN_REGISTERED,
    Adjustments,
    Check,
    Mask,
    Move,
    MoveKind,
    Register,
    Row,
    Sampled,
    Step,
)
from ppengine.protocol.token_mask import TokenMask
from ppengine.stage.backends.cuda import device_buffers, step_sampler
from ppengine.stage.step_loop import MOST_PENDING
from standin_card import BLOCK, TOKENS, Layers, Pair
from standin_sampling import sampling_card
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in's tensors are not on a card")
VOCABULARY, SLOTS, BLOCKS_OF_ONE, LENGTH = 43, 4, 4, 3
LOGITS = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(5)).mul_(2)
ADJUSTED = Adjustments(frequency_penalty=1.5, repetition_penalty=1.2, logit_bias={3: 2.0})
WISHES: list[dict[str, Any]] = [
    {}, {}, {"temperature": 0.9}, {"logprobs": 2}, {"temperature": 0.7, "top_k": 5, "logprobs": 0},
    {"min_tokens": 20, "stop_token_ids": [1, 2, 3, 4]}, {"adjustments": ADJUSTED},
    {"adjustments": ADJUSTED, "temperature": 0.8},
]  # fmt: skip
CHECKS = [Check.LEDGER, Check.LEDGER | Check.STRICT, Check.LEDGER | Check.FINITE, Check(0)]


class TellingLayers(Layers):
    """Layers whose logits tell the tokens, the blocks that each row reads, and the slots that are written."""

    spec = SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=[])

    def run(self, hidden: Tensor, batch: Any, kv: object, behind: Any = None) -> Tensor:
        out = super().run(hidden, batch, kv, behind).clone()
        out += batch.slot_mapping[: len(out)].clamp(min=0).unsqueeze(1)
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        for row, length in enumerate(lengths):
            used = batch.block_tables[row, : -(-length // BLOCK)]
            out[starts[row] : starts[row + 1]] += int((used * torch.arange(1, len(used) + 1)).sum())
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        self._device.log.append("head")
        return LOGITS[hidden[:, 0].long() % len(LOGITS)]


@dataclass
class Timed:
    """One step, and when the masks of the late step before, or of itself, come."""

    rows: list[Row]
    fields: dict[str, Any]
    masks: dict[int, TokenMask]
    """Those of sampled rows, by slot."""
    late: list[int]
    when: str
    """`before` the step on the first stage, `between` both stages, `behind` it, or `needed`."""
    ahead: bool
    """Whether the step behind has come while masks are waited for."""


@dataclass
class Request:
    """A request as the core knows it."""

    blocks: list[int]
    sample: int
    adjusted: bool
    length: int = LENGTH
    at: int = 0
    known: int = 0
    """Entries of its block table that the stages have."""
    sampled: bool = False


@dataclass
class Core:
    """Makes steps."""

    draw: Any
    requests: dict[int, Request] = field(default_factory=dict)
    begun: int = 0

    def step(self) -> Timed:
        fields: dict[str, Any] = {"release": [], "register": [], "tables": []}
        if self._rarely():
            fields["checks"] = int(self.draw(st.sampled_from(CHECKS)))
        if self._rarely():
            fields["map_blocks"] = 16
        if self._rarely():
            fields["moves"] = [Move(MoveKind.OUT, 15, 0), Move(MoveKind.IN, 0, 15)]
        for slot in range(SLOTS):
            if slot in self.requests and self._rarely():
                fields["release"].append(slot)
                del self.requests[slot]
            if slot not in self.requests or self._rarely():
                self._begin(slot, fields)
        rows, masks, late = list[Row](), dict[int, TokenMask](), list[int]()
        some = not self._rarely()
        for slot, request in self.requests.items():
            if some and self.draw(st.sampled_from([True, True, False])):
                self._row(slot, request, rows, masks, late, fields)
        when = self.draw(st.sampled_from(["needed", "needed", "needed", "between", "behind", "before"]))
        return Timed(rows, fields, masks, late, when, self.draw(st.booleans()))

    def _rarely(self) -> bool:
        return bool(self.draw(st.sampled_from([*[False] * 11, True])))

    def _begin(self, slot: int, fields: dict[str, Any]) -> None:
        self.begun += 1
        wish = self.draw(st.sampled_from(WISHES))
        first = 1 + (self.begun * BLOCKS_OF_ONE) % 12
        tokens = [(7 * place + 3 * self.begun) % VOCABULARY for place in range(LENGTH)]
        register = Register(slot, f"r{self.begun}", tokens, LENGTH, 0.0, 1.0, 0, self.begun, 0, 0, [], -1)
        for name, value in wish.items():
            setattr(register, name, value)
        fields["register"].append(register)
        self.requests[slot] = Request(list(range(first, first + BLOCKS_OF_ONE)), 0, "adjustments" in wish)

    def _row(
        self, slot: int, request: Request, rows: list[Row], masks: dict[int, TokenMask], late: list[int],
        fields: dict[str, Any],
    ) -> None:  # fmt: skip
        left = TOKENS - sum(row.count for row in rows)
        if request.at < request.length:
            left_of_it = request.length - request.at
            count, token = self.draw(st.sampled_from([left_of_it, left_of_it, 1])), TOKEN_REGISTERED
        else:
            count, token = 1, self.draw(st.integers(0, VOCABULARY - 1))
            if request.sampled and self.draw(st.sampled_from([False, False, False, True])):
                token = TOKEN_ON_DEVICE
        end = request.at + count
        if count > left or end > BLOCK * BLOCKS_OF_ONE:
            return
        rows.append(Row(slot, request.at, count, end >= request.length, token))
        if (needed := -(-end // BLOCK)) > request.known:
            fields["tables"].append((slot, request.known, request.blocks[request.known : needed]))
            request.known = needed
        request.at = end
        if end >= request.length:
            request.sampled = True
            kind = self.draw(st.sampled_from(["free", "mask", "late", "late"]))
            if kind != "free":
                allowed = self.draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
                masks[slot] = _mask(allowed)
            if kind == "late" and not request.adjusted:
                late.append(slot)


def _mask(tokens: list[int]) -> TokenMask:
    words = np.zeros(-(-VOCABULARY // 32), "<u4")
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)
    return TokenMask(words.tobytes())


@st.composite
def programs(draw: Any) -> list[Timed]:
    core = Core(draw)
    return [core.step() for _ in range(draw(st.integers(4, 12)))]


class Drive:
    """Takes steps through a pair as the step loop does: two under way, results in order."""

    def __init__(self, pair: Pair, program: list[Timed], late: bool) -> None:
        self.pair, self.program, self.late = pair, program, late
        self.runner: Any = pair.last.runner
        self.runner._late._late_masks = self._bring
        self.pending: deque[Any] = deque()
        self.results: list[list[Sampled]] = []
        self.coming: dict[int, list[Mask]] = {}
        self.now = 0

    def run(self) -> None:
        for now, timed in enumerate(self.program):
            self.now = now
            self._step(timed)
        while self.pending:
            self._finish()

    def _step(self, timed: Timed) -> None:
        pair, late = self.pair, timed.late if self.late else []
        masks = [Mask([slot], mask) for slot, mask in timed.masks.items()]
        there = [mask for mask in masks if mask.slots[0] not in late]
        if timed.when == "before" or any(row.token == TOKEN_ON_DEVICE for row in timed.rows):
            # The first stage waits for tokens of steps before.
            self._deliver()
            while self.pending:
                self._finish()
        more = {**timed.fields, "masks": there, "late": late}
        pair.first.step(timed.rows, **more).finish()
        if timed.when == "between":
            self._deliver()
        if late:
            self.coming[pair.last.steps + 1] = [mask for mask in masks if mask.slots[0] in late]
        self.pending.append(pair.last.step(timed.rows, **more))
        if timed.when == "behind":
            self._deliver()
        while len(self.pending) > MOST_PENDING:
            self._finish()
        found = [*pair.first.ledger.findings(), *pair.last.ledger.findings()]
        assert not found, found

    def _deliver(self) -> None:
        if number := self.runner.lacks_masks:
            self.runner.sample_late(self.coming.pop(number))

    def _finish(self) -> None:
        pending = self.pending.popleft()
        if not pending.done:
            assert self.runner.lacks_masks == pending.retired.number, "it can wait for its masks alone"
            self._deliver()
        assert pending.done
        self.results.append(pending.finish().sampled)

    def _bring(self, number: int) -> list[Mask]:
        ahead = self.program[self.now + 1] if self.now + 1 < len(self.program) else None
        if ahead is not None and self.program[self.now].ahead:
            fields = {**ahead.fields, "late": ahead.late}
            for _ in range(2):
                self.runner.prepare(Step(1, self.pair.last.steps + 1, 0, rows=ahead.rows, **fields))
        return self.coming.pop(number)


def results(card: Any, program: list[Timed], *, late: bool, by_device: bool, graphs: bool) -> list[Any]:
    """Return the tokens of all steps, and the tables of the device behind them."""
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(card, Path(folder), by_device, TellingLayers)
        for one in (pair.first, pair.last):
            if graphs:
                one.buffers.capture(lambda done, total: None)
            one.step(map_blocks=16, checks=int(Check.LEDGER)).finish()
        drive = Drive(pair, program, late)
        drive.run()
        buffers = pair.last.buffers
        newest = pair.first.buffers.latest if by_device else buffers.latest
        assert newest is not None and buffers.adjustments is not None
        records = {slot: record.tolist() for slot, record in buffers.adjustments._records.items()}
        for one in (pair.first, pair.last):
            one.runner.leave()
            one.main.close()
            one.buffers.progress.page._words.release()
            one.buffers.progress.page._map.close()
        return [drive.results, newest.tolist(), records]


# To shrink a failure would take longer than the time limit of a test.
@settings(max_examples=25, deadline=None, phases=[Phase.reuse, Phase.generate], suppress_health_check=list(HealthCheck))
@given(program=programs(), by_device=st.booleans(), graphs=st.booleans())
@pytest.mark.timeout(600)  # It takes half a minute of a core, and unit tests give way to engines.
def test_late_masks_change_no_result(program: list[Timed], by_device: bool, graphs: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        card = sampling_card(patch, (4, 8, 16))
        for module in (device_buffers, step_sampler):
            patch.setattr(module, "SLOTS", 16)
        found = [results(card, program, late=late, by_device=by_device, graphs=graphs) for late in (False, True)]
    assert found[1] == found[0]
