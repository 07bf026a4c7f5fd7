"""Faults of a GPU where there is none: who refuses them, where they strike, what they leave to the next start."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from monitor_helpers import make_config, remove
from ppengine.drills import start_faults
from ppengine.drills.fault_points import Fault, GraphsPoint, Points, StageParts
from ppengine.drills.registry import FaultError, find, kinds
from ppengine.drills.stage_faults import FaultThread, StageFaults
from ppengine.protocol.place import Place
from ppengine.protocol.steps import Row
from ppengine.stage.backends.cuda.decode_graphs import Launched
from ppengine.stage.build import _no_room
from ppengine.stage.rank_group import LoneRank

GPU_KINDS = [kind.name for kind in kinds().values() if kind.gpu]


class Streams:
    """A stream that knows whether it is the current one."""

    def __init__(self) -> None:
        self.current = False

    @contextmanager
    def use(self) -> Any:
        self.current = True
        yield
        self.current = False


class Graphs:
    """Layers that a step replays."""

    sizes = (1, 2)

    def __init__(self) -> None:
        self.compute = Streams()

    def run(self, plan: str, ids: str) -> tuple[str, str, bool]:
        return plan, ids, self.compute.current


def thread(card: object, points: Points | None = None, folder: Path = Path()) -> FaultThread:
    site = StageParts(0, 2, None, None, folder, buffers=card)  # type: ignore[arg-type]
    config = SimpleNamespace(endpoint=lambda name: f"inproc://{name}")
    return FaultThread(zmq.Context.instance(), config, points or Points(), site)  # type: ignore[arg-type]


def test_all_kinds_are_told_where_they_strike() -> None:
    assert GPU_KINDS == ["kernel-hang", "device-assert", "illegal-access", "profile-oom"]
    assert {kinds()[name].where_words() for name in GPU_KINDS} == {"any stage on a GPU"}


@pytest.mark.parametrize("name", GPU_KINDS)
def test_a_stage_on_a_cpu_refuses_them(name: str) -> None:
    with pytest.raises(FaultError, match=f"{name} strikes a GPU, and stage 0 has none"):
        thread(None)._inject("1", find(name), 0)


def test_what_a_kind_needs_is_made_ahead_of_its_strike(monkeypatch: pytest.MonkeyPatch) -> None:
    points, made, struck = Points(), [], []
    kind = find("kernel-hang")

    def prepare(parts: StageParts) -> str:
        made.append(parts.stage)
        return "a kernel"

    monkeypatch.setitem(vars(kind), "prepare", prepare)
    monkeypatch.setitem(vars(kind), "act", lambda fault, go, *args: struck.append(fault.tool))
    thread(object(), points)._inject("1", kind, 0)
    assert (made, struck) == ([0], [])
    points.through("forward", print)
    assert (made, struck) == ([0], ["a kernel"])


def test_a_replay_is_a_forward_on_the_stream_of_the_layers() -> None:
    points = Points()
    graphs = GraphsPoint(Graphs(), points)
    assert graphs.run("plan", "ids") == ("plan", "ids", True)
    assert graphs.sizes == (1, 2)


def test_nan_strikes_what_layers_give_and_what_a_replay_gives() -> None:
    replayed = Launched(torch.zeros(2, 3), torch.zeros(1), torch.zeros(1))
    fault = Fault(find("nan"), None, 0)  # type: ignore[arg-type]
    for answer, out in ((torch.zeros(2, 3), None), (replayed, replayed.out)):
        assert fault.strike(lambda answer=answer: answer) is answer
        assert torch.isnan(answer if out is None else out).sum() == 1


def test_graphs_are_wrapped_once_for_all_generations() -> None:
    config = make_config()
    try:
        card = SimpleNamespace(graphs=[Graphs(), Graphs()])
        with zmq.Context() as context:
            arms = StageFaults(config, Place(0, 0), context, None, None)  # type: ignore[arg-type]
            for _ in range(2):
                parts = dict.fromkeys(("_receiver", "outgoing", "_model", "cache", "_swap"))
                arms.runner(SimpleNamespace(buffers=card, _group=LoneRank(), **parts))
            assert [type(graphs) for graphs in card.graphs] == [GraphsPoint, GraphsPoint]
            assert [type(graphs._part) for graphs in card.graphs] == [Graphs, Graphs]
            arms._thread.close()
    finally:
        remove(config)


# --- no memory in the profile run ---------------------------------------------------------------------------


def test_no_room_is_asked_of_one_boot_of_one_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    taken: list[int] = []

    def empty(size: int, **_: object) -> int:
        if sum(taken) + size > 2**20 + 600:
            raise torch.OutOfMemoryError("no more")
        taken.append(size)
        return size

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 250)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append(share))
    monkeypatch.setattr(torch, "empty", empty)
    thread(object(), folder=tmp_path)._inject("1", find("profile-oom"), 0)
    start_faults.before_profile(tmp_path, 1, torch.device("cuda"))
    start_faults.before_profile(tmp_path, 0, torch.device("cpu"))
    assert not limits
    start_faults.before_profile(tmp_path, 0, torch.device("cuda"))
    assert limits == [0.25] and taken == [2**20, 512], "what the allocator had is taken"
    start_faults.before_profile(tmp_path, 0, torch.device("cuda"))
    assert limits == [0.25], "once"


def test_what_there_was_no_room_for_is_told_with_numbers() -> None:
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is "
        "free. If reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF"
    )
    text = _no_room([Row(0, 0, 100, True, 0), Row(0, 0, 28, True, 0)], 3 * 2**20, error)
    assert text.startswith("out of memory in the profile run of 128 tokens in 2 rows, beside weights of 3.0 MiB: CUDA")
    assert "Tried to allocate 2.00 MiB" in text and "1.00 GiB is free" in text
    assert "PYTORCH" not in text and "scheduler.max_num_batched_tokens" in text
