"""Evidence of pipelines in every kind of trouble, message by message, for the tests of the diagnosis."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from monitor_helpers import stage
from ppengine.common.ring import shape_code
from ppengine.diagnosis.evidence import Evidence, StageEvidence
from ppengine.protocol.stage_samples import CpuShares, EdgeSample, Message

PLACES = [(2, 0), (2, 1), (3, 1), (4, 0), (4, 1), (4, 2), (4, 3)]
CODE = shape_code("float32", 64)
SLEEPS = CpuShares(user=0.01, system=0.0, main_user=0.0, main_system=0.0, main_waited=0.0)
SPINS = CpuShares(user=1.0, system=0.0, main_user=0.99, main_system=0.0, main_waited=0.0)
FUTEX = "futex_do_wait"
POLL = "poll_schedule_timeout.constprop.0"


class Chance(Random):
    """Draws of evidence from a seed. Drawing by hypothesis took a hundred times as long as the diagnosis."""

    def age(self, most: float) -> float | None:
        """Return seconds, often few or none."""
        return self.choice((None, 0.0, self.uniform(0, 3), self.uniform(0, most), self.uniform(0, most)))

    def maybe(self, value: Any) -> Any:
        """Return `value` or None."""
        return self.choice((None, value))


def evidence(stages: list[StageEvidence], **changes: Any) -> Evidence:
    """Return evidence of these stages."""
    return Evidence(stages=tuple(stages), **changes)


def healthy(count: int) -> list[StageEvidence]:
    """Return stages that wait for a step."""
    return [stage(k) for k in range(count)]


def with_stage(stages: list[StageEvidence], k: int, **changes: Any) -> list[StageEvidence]:
    """Return the stages with one changed."""
    return [msgspec.structs.replace(one, **changes) if one.stage == k else one for one in stages]


def message(number: int, state: int = 2, age_s: float = 0.1, **changes: Any) -> Message:
    """Return message `number`, which is of step `number + 1`: the first step has no rows."""
    fields = {"step": number + 1, "size": 256, "code": CODE} | changes
    return Message(number=number, state=state, age_ms=age_s * 1e3, **fields)


def edge(kind: Any, peer: int, *messages: Message, generation: int = 1) -> EdgeSample:
    """Return one side of an edge."""
    return EdgeSample(kind=kind, peer=peer, generation=generation, messages=messages)


def edges_of(count: int, k: int, sent: int, received: int, posted: int, seconds: float) -> tuple[EdgeSample, ...]:
    """Return both edges of stage `k`: numbers up to `sent` and `received` are done, up to `posted` are open."""
    found = []
    if k > 0:
        done = [message(n) for n in range(max(1, received - 3), received + 1)]
        found.append(edge("receive", k - 1, *done, *(message(n, 1, seconds) for n in range(received + 1, posted + 1))))
    if k < count - 1:
        found.append(edge("send", k + 1, *(message(n) for n in range(max(1, sent - 3), sent + 1))))
    return tuple(found)


def pipeline_held_at(count: int, k: int, seconds: float = 6.0) -> list[StageEvidence]:
    """Step 8 (message 7) is at stage `k`; the ones behind wait for it, the ones before have sent it and are idle."""
    stages = []
    for index in range(count):
        common = {"process_state": "S", "main_state": "S", "wchan": FUTEX, "cpu": SLEEPS, "tick_age_s": 0.05}
        held = {"unretired_age_s": seconds, "unretired_tokens": 1, "op_age_s": seconds, "progress_age_s": seconds}
        if index < k:
            edges = edges_of(count, index, 7, 7, 7, seconds)
            idle = {"wchan": "ep_poll", "op_age_s": seconds, "retired_step": 8, "finished_step": 8}
            stages.append(stage(index, edges=edges, outbox=0, **common | idle))
        elif index == k:
            edges = edges_of(count, index, 6, 7, 7, seconds)
            work = {"op": "forward", "op_step": 8, "wchan": "", "retired_step": 7}
            stages.append(stage(index, edges=edges, outbox=0, **common | held | work))
        else:
            edges = edges_of(count, index, 6, 6, 7, seconds)
            waits = {"op": "receive", "op_step": 8, "op_peer": index - 1, "retired_step": 7, "wchan": POLL}
            stages.append(stage(index, edges=edges, outbox=0, **common | held | waits))
    return stages


def stuck(stages: list[StageEvidence], seconds: float = 6.0, **changes: Any) -> Evidence:
    """Return evidence in which step 8 has been in flight for a while and nothing retired since."""
    return evidence(stages, **{"steps_in_flight": (8,), "since_retired_s": seconds} | changes)
