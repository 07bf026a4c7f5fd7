"""A stand-in of a card that samples as a card does, with graphs that run; and ranks on several such cards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ppengine.stage.backends.cuda import chunk_graphs, decode_graphs, device_buffers, step_sampler
from ppengine.stage.backends.cuda.card_group import CardGroup
from ppkernels.gpu import sampling
from standin_card import Device, StandInStage, _edge
from torch import Tensor


def sampling_card(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]) -> Device:
    """Return a stand-in whose sampling is the card's, and whose graphs run what they would hold.

    `sizes`: padded numbers of tokens of graphs for prompts.
    """

    outputs: list[Tensor] = []

    def captured(compute: object, pool: object, forward: Callable[[], Tensor]) -> tuple[Any, Tensor]:
        output = forward()
        outputs.append(output)

        def replay() -> None:
            device.log.append("replay")
            for other in outputs:
                other.fill_(-7)  # All graphs share the memory of a pool.
            output.copy_(forward())

        return SimpleNamespace(replay=replay), output

    device = Device(monkeypatch)
    device.prompt = True
    monkeypatch.setattr(device_buffers, "DeviceSampling", sampling.DeviceSampling)
    monkeypatch.setattr(step_sampler, "choose", sampling.choose)
    monkeypatch.setattr(chunk_graphs, "SIZES", sizes)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    for module in (chunk_graphs, decode_graphs):
        monkeypatch.setattr(module, "captured", captured)
    return device


def booted(*stages: StandInStage) -> None:
    """Do what a boot does behind the profile run."""
    for stage in stages:
        stage.buffers.warm_up()
        stage.buffers.capture(lambda done, total: None)
        stage.step(map_blocks=16).finish()


def join(groups: Sequence[CardGroup], generation: int) -> None:
    """Have both ranks join, each in a thread: they wait for each other."""
    wires = [end.wire for end in _edge(1, 0)]
    with ThreadPoolExecutor(2) as pool:
        joins = [
            pool.submit(group.join, generation, lambda rank=rank: {1 - rank: wires[rank]})  # type: ignore[misc]
            for rank, group in enumerate(groups)
        ]
    for each in joins:
        each.result()
