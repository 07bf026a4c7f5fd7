"""Snapshots of stages with several tensor ranks: healthy, one rank dead, one late."""

from __future__ import annotations

import msgspec
import snapshots
from ppengine.protocol.gpu import GpuInfo, GpuPeer
from ppengine.protocol.inspection import FaultDetail
from ppengine.protocol.snapshot import Snapshot, Verdict, WaitInfo
from ppengine.protocol.stage_info import DeviceInfo, StageInfo, StepMs, StreamInfo, SumRoute, SumsInfo, SumTime, Waiting


def ranks(stages: int = 2, tensor: int = 2, requests: int = 8) -> Snapshot:
    """A healthy engine on CPUs, with `tensor` ranks a stage."""
    picture = snapshots.snapshot(stages, requests)
    picture.engine.tensor_parallel_size = tensor
    picture.stages = [_rank(index, rank, stages, tensor) for index in range(stages) for rank in range(tensor)]
    for number, each in enumerate(picture.stages if tensor > 1 else []):
        each.sums = SumsInfo(
            routes=[
                SumRoute(most_bytes=2**20, way="shared memory, one round"),
                SumRoute(most_bytes=None, way="shared memory, rounds of 1.0 MiB"),
            ],
            times=[
                SumTime(bytes=2**13, us=80.0 + number, way="shared memory"),
                SumTime(bytes=2**20, us=1000.0 - number, way="shared memory"),
            ],
        )
    return picture


def _rank(index: int, rank: int, stages: int, tensor: int) -> StageInfo:
    return snapshots.stage(
        index, stages, tensor_rank=rank, pid=41200 + tensor * index + rank, host="n0", rank_wait=0.04 + rank / 100,
        device=DeviceInfo(kind="cpu", name="cpu"), retired_step=18408,
    )  # fmt: skip


def of(picture: Snapshot, stage: int, rank: int) -> StageInfo:
    """One process of a snapshot."""
    return next(each for each in picture.stages if (each.index, each.tensor_rank) == (stage, rank))


def dead(stages: int = 2, tensor: int = 2, at: tuple[int, int] = (1, 1)) -> Snapshot:
    """One rank was killed; the others of its stage wait for it in a collective, the stages before are blocked."""
    picture, (stage, rank) = ranks(stages, tensor), at
    picture.engine.state = "degraded"
    picture.engine.message = f"stage {stage} rank {rank} is lost"
    for each in picture.stages:
        each.progress_age_ms = 2300.0
        if (each.index, each.tensor_rank) == at:
            each.state, each.op, each.streams, each.micro_batches = "dead", None, [], []
            each.memory = type(each.memory)()
            each.kv_blocks = type(each.kv_blocks)()
            each.rank_wait = each.idle_fraction = each.inbox = each.outbox = None
            each.step_ms, each.waiting_on = StepMs(), None
        elif each.index == stage:
            each.state, each.rank_wait, each.op = "starved", 1.0, f"all_reduce<{rank} m18411"
            each.waiting_on = Waiting(stage=stage, rank=rank, what="collective", since_ms=2200.0)
            each.streams = [
                StreamInfo(name="main", owner="main", op=f"all_reduce<{rank} m18411", age_ms=2200.0, pending=1)
            ]
        else:
            each.state = "blocked"
            each.waiting_on = Waiting(stage=stage, what="send", since_ms=2100.0)
    name = f"stage {stage} rank {rank}"
    picture.verdicts = [
        Verdict(
            stage=stage, rank=rank, cause="dead", since_s=2.3, summary=f"{name} was killed by SIGKILL",
            evidence=["the supervisor saw it end with SIGKILL"], suggest=f"restart-stage {stage}",
        )
    ]  # fmt: skip
    others = [other for other in range(tensor) if other != rank]
    picture.waits = [
        *(WaitInfo(waiter=f"stage {stage} rank {other}", on=name, what="its part of m18411", since_s=2.2)
          for other in others),
        *(WaitInfo(waiter=f"stage {stage - 1} rank {each}", on=f"stage {stage} rank {each}",
                   what="m18412, which is not received", since_s=2.1) for each in range(tensor) if stage),
    ]  # fmt: skip
    return picture


def late(stages: int = 2, tensor: int = 2, at: tuple[int, int] = (0, 1)) -> Snapshot:
    """One rank comes late: the others of its stage wait for it."""
    picture = ranks(stages, tensor)
    for each in picture.stages:
        if each.index == at[0]:
            each.rank_wait = 0.02 if each.tensor_rank == at[1] else 0.46
            each.idle_fraction = 0.05 if each.tensor_rank == at[1] else 0.5
    return picture


def on_cards(stages: int = 2, tensor: int = 2) -> Snapshot:
    """A healthy engine with a card a place, joined by NVLink through switches."""
    picture = ranks(stages, tensor)
    uuids = [f"GPU-{number:08x}" for number in range(len(picture.stages))]
    for number, (each, uuid) in enumerate(zip(picture.stages, uuids, strict=True)):
        each.sums = SumsInfo(
            routes=[
                SumRoute(most_bytes=2**19, way="one shot, data is its own flag; float32 has flags"),
                SumRoute(most_bytes=2**24 - 1, way="one shot, flags"),
                SumRoute(most_bytes=None, way="copies beside products, above 4,096 tokens, from 16.0 MiB on"),
                SumRoute(most_bytes=None, way="two shots, flags"),
            ],
            times=[
                SumTime(bytes=2**13, us=6.25 - number / 100, way="one shot"),
                SumTime(bytes=2**22, us=38.0 + number, way="one shot"),
                SumTime(bytes=2**24, us=70.0, way="copies"),
            ],
        )
        each.device = DeviceInfo(kind="cuda", name="NVIDIA H100 80GB HBM3", uuid=uuid)
        peers = [
            GpuPeer(uuid=other, nvlink=True, links=0, reaches=True, path="other NUMA node")
            for other in uuids
            if other != uuid
        ]
        each.gpu = GpuInfo(
            uuid=uuid, name="NVIDIA H100 80GB HBM3", age_ms=200.0, bus_id=f"0000:{each.pid or 0:02x}:00.0"[:12],
            pcie_generation=5, pcie_generation_most=5, pcie_width=16, pcie_width_most=16, nvlinks=18,
            nvlinks_active=18, peers=peers,
        )  # fmt: skip
    return picture


def fault(picture: Snapshot, at: tuple[int, int] = (1, 1)) -> FaultDetail:
    """The record of a fault at one rank, with the last steps of all ranks."""
    found = snapshots.rings(2, at[0])
    both = [
        msgspec.structs.replace(each, rank=rank, pid=41200 + 2 * each.stage + rank)
        for each in found.stages
        for rank in (0, 1)
    ]
    rings = msgspec.structs.replace(found, stages=both)
    return snapshots.fault(picture, at[0], rings=rings, retired=[18410, 18410, 18409, 18409], stacks=None)
