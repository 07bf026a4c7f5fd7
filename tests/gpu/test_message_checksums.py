"""Checksums that devices make: the sum itself, and on a stage's own runner each overwritten message is one finding."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppengine.drills.fault_points import Fault, StageParts
from ppengine.drills.number_faults import overwrite_in_flight, overwrite_received
from ppengine.protocol.reports import Finding
from ppengine.protocol.steps import Check
from ppkernels import weighted_sum as sums
from standin_card import Device, Pair, StandInStage, decode, prompt, request

PROMPT = 6
"""Tokens of the prompt, which is the first step."""


def reference(values: torch.Tensor) -> int:
    """The sum in numpy, by its definition, as a header carries it."""
    halves = np.frombuffer(values.contiguous().view(torch.int16).cpu().numpy().tobytes(), np.uint16).astype(np.uint64)
    weights = (2 * np.arange(len(halves), dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    weights = (weights ^ (weights >> np.uint64(32))) | np.uint64(1)
    low = int((halves * weights).sum(dtype=np.uint64)) & (2**63 - 1)
    return (low or 1) | 2**63


def sum_of(values: torch.Tensor) -> int:
    result, scratch = (torch.zeros(size, dtype=torch.int64, device=values.device) for size in (1, 2))
    sums.weighted_sum(values, result, scratch)
    assert scratch.tolist() == [0, 0], "the next sum begins with what this one leaves"
    return int(result) & 2**64 - 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 4096), (5, 4099), (130, 512)], ids=str)
def test_sum_is_that_of_the_definition(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    values = torch.randn(shape, dtype=torch.float32).to(device, dtype)
    assert sum_of(values) == reference(values)
    assert sum_of(values) == sum_of(values.clone()), "in any order of its programs"


def test_more_tiles_than_programs(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from ppkernels.gpu import weighted_sum as kernel

    monkeypatch.setattr(kernel, "MOST_PROGRAMS", 3)
    values = torch.randn(9, 5001).to(device, torch.float16)
    assert sum_of(values) == reference(values)


def test_zeros_have_a_sum(device: torch.device) -> None:
    assert sum_of(torch.zeros(2, 8, device=device)) == 2**63 | 1, "no sum is taken for none"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_overwritten_swapped_and_shifted_values_change_it(dtype: torch.dtype, device: torch.device) -> None:
    values = torch.randn(4, 2049).to(device, dtype)
    flat, seen = values.view(-1), {sum_of(values)}
    for place in (0, 1, 2048, 2049, len(flat) - 1):
        other = flat.clone()
        other.view(torch.int16)[place] ^= 1
        seen.add(sum_of(other))
    swapped = flat.clone()
    swapped[3], swapped[5000] = flat[5000], flat[3]
    seen |= {sum_of(swapped), sum_of(flat.roll(1)), sum_of(values.flip(0)), sum_of(flat[:-1].contiguous())}
    assert len(seen) == 10


# --- on a stage's own runner, with a device that is this process ------------------------------------------------


@pytest.fixture
def device_log(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def pair_of(device: Device, folder: Path, by_device: bool) -> Pair:
    pair = Pair(device, folder, by_device)
    pair.step(prompt(tokens=PROMPT), **request(tokens=PROMPT))
    return pair


def findings(pair: Pair) -> list[Finding]:
    assert pair.first.checks.news() == []
    return [finding for news in pair.last.checks.news() for finding in news.findings]  # type: ignore[union-attr]


def fault_at(number: int, stage: StandInStage) -> Fault:
    nothing: Any = None
    return Fault(nothing, StageParts(number, 2, stage.main, nothing, buffers=stage.buffers), number)


@pytest.mark.parametrize("by_device", [False, True])
def test_clean_messages_are_compared_and_no_finding(
    by_device: bool, device_log: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, compared = Pair(device_log, tmp_path, by_device), []
    compare = pair.last.checks.compare_sums

    def keep(arrival: Any, sent: int, arrived: int) -> None:
        compared.append((arrival.step, sent, arrived))
        compare(arrival, sent, arrived)

    monkeypatch.setattr(pair.last.checks, "compare_sums", keep)
    pair.launch(prompt(tokens=PROMPT), **request(tokens=PROMPT))[1].finish()
    # Several under way at once: each is compared with its own.
    kept = [pair.launch(decode(position, token=position)) for position in range(PROMPT, PROMPT + 6)]
    for _, last in kept:
        last.finish()
    assert [step for step, _, _ in compared] == list(range(1, 8))
    assert all(sent == arrived and sent >> 63 for _, sent, arrived in compared)
    assert len({sent for _, sent, _ in compared}) == 7, "different messages"
    assert findings(pair) == []


@pytest.mark.parametrize("by_device", [False, True])
def test_receive_buffer_that_is_overwritten_is_a_finding_with_edge_and_step(
    by_device: bool, device_log: Device, tmp_path: Path
) -> None:
    pair = pair_of(device_log, tmp_path, by_device)
    receiver = pair.last.runner._receiver
    take = receiver.take
    fault = fault_at(1, pair.last)
    pair.step(decode(PROMPT))
    assert findings(pair) == []
    receiver.take = lambda step: overwrite_received(fault, take, step)
    pair.step(decode(PROMPT + 1))
    pair.step(decode(PROMPT + 2))
    (finding,) = findings(pair)
    assert (finding.stage, finding.cause) == (0, "corrupted")
    assert finding.summary == "edge stage 0 -> stage 1: the hidden states of m3 changed on their way"
    assert finding.evidence[0].startswith("message 3 (m3, 1 tokens of 8 values, 32 B): checksum ")
    assert not pair.last.checks.compares_checksums, "what follows is wrong, too"


@pytest.mark.parametrize("by_device", [False, True])
def test_send_buffer_that_is_overwritten_is_a_finding(by_device: bool, device_log: Device, tmp_path: Path) -> None:
    pair = pair_of(device_log, tmp_path, by_device)
    sender = pair.first.runner._sender
    put = sender.put
    fault = fault_at(0, pair.first)
    sender.put = lambda step, tensor: overwrite_in_flight(fault, put, step, tensor)
    for position in range(PROMPT, PROMPT + 7):
        pair.step(decode(position))
    assert findings(pair) == []
    pair.step(decode(PROMPT + 7))
    assert [finding.summary for finding in findings(pair)] == [
        "edge stage 0 -> stage 1: the hidden states of m9 changed on their way"
    ]


def test_slot_that_is_overwritten_between_two_cards_is_a_finding(device_log: Device, tmp_path: Path) -> None:
    pair = pair_of(device_log, tmp_path, True)
    pair.step(decode(PROMPT))
    pair.first.step(decode(PROMPT + 1)).finish()
    landing = pair.last.buffers.landing
    offer = landing.memory.offer
    # Message 3 is in its slot, and the receiver has not taken it.
    ctypes.c_uint8.from_address(landing.memory.address + offer.offset(3) + 5).value ^= 1
    pair.last.step(decode(PROMPT + 1)).finish()
    (finding,) = findings(pair)
    assert finding.summary == "edge stage 0 -> stage 1: the hidden states of m3 changed on their way"


@pytest.mark.parametrize("by_device", [False, True])
def test_switched_off_no_sum_is_made_or_carried(by_device: bool, device_log: Device, tmp_path: Path) -> None:
    pair = pair_of(device_log, tmp_path, by_device)
    edge = pair.last.runner._receiver.edge
    assert edge.checksum >> 63
    pair.step([], checks=Check.NO_CHECKSUM)
    for stage in (pair.first, pair.last):
        stage.buffers.sums._compute = None  # a launch would raise
    pair.step(decode(PROMPT))
    assert edge.checksum == 0
    # One end alone is on: a message without a sum says so.
    pair.last.checks.apply(0)
    pair.step(decode(PROMPT + 1))
    assert edge.checksum == 0 and findings(pair) == []


def test_checksum_of_a_cpu_is_not_compared_with_that_of_a_device(device_log: Device, tmp_path: Path) -> None:
    pair = pair_of(device_log, tmp_path, False)
    sender = pair.first.runner._sender
    put = sender.put

    def put_with_crc(step: int, tensor: torch.Tensor) -> None:
        sender.checksum = 1 << 32 | 7
        put(step, tensor)

    sender.put = put_with_crc
    pair.step(decode(PROMPT))
    assert pair.last.runner._receiver.edge.checksum == 1 << 32 | 7 and findings(pair) == []
