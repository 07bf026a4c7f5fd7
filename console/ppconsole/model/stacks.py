"""Stacks of many stages as few: threads of several stages with the same frames make one group."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.protocol.inspection import StacksDetail, StageStacks, ThreadStack
from ppengine.protocol.place import Place

from ppconsole.model.ranks import short, words
from ppconsole.model.safe import clean

_MAIN = "MainThread"


class Group(NamedTuple):
    """Threads of one name with the same frames, the newest first. Without a stage it is the engine core's."""

    stages: tuple[str, ...]
    thread: str
    owns_gil: bool
    frames: tuple[str, ...]

    @property
    def title(self) -> str:
        """`stages 0, 1, 3: MainThread`."""
        word = "core" if not self.stages else "stage " if len(self.stages) == 1 else "stages "
        name = f" {clean(self.thread)}" if self.thread else ""
        return f"{word}{', '.join(self.stages)}:{name}{' (holds the GIL)' if self.owns_gil else ''}"


def grouped(detail: StacksDetail) -> list[Group]:
    """Return the groups: the core's behind the stages', of these main threads first, and the outlier of those first.

    It is where to look.
    """
    found: dict[tuple[str, bool, tuple[str, ...]], list[str]] = {}
    ranked = _ranked(detail)
    for stack in detail.stages:
        for key in _threads(stack):
            stages = found.setdefault(key, [])
            if stack.stage is not None and (name := short(Place(stack.stage, stack.rank), ranked)) not in stages:
                stages.append(name)
    groups = [Group(tuple(stages), *key) for key, stages in found.items()]
    groups.sort(key=lambda group: (group.thread not in (_MAIN, ""), group.thread, len(group.stages)))
    return groups + [Group((), *key) for key in (_threads(detail.core) if detail.core is not None else [])]


def notes(detail: StacksDetail) -> list[str]:
    """Return remarks on how the stacks were taken."""
    ranked = _ranked(detail)
    lines = [f"{_who(stack, ranked)}: {clean(stack.error)}" for stack in detail.all if stack.error]
    incomplete = detail.ability and not all(stage.native for stage in detail.stages)
    return lines + ([clean(detail.ability)] if incomplete else [])


def pids(detail: StacksDetail) -> list[tuple[str, int | None]]:
    """Return `stage 3`, `stage 3 rank 0` or `core`, and the pid of each process."""
    ranked = _ranked(detail)
    return [(_who(stack, ranked), stack.pid) for stack in detail.all]


def _ranked(detail: StacksDetail) -> bool:
    return any(stack.rank for stack in detail.stages)


def _who(stack: StageStacks, ranked: bool) -> str:
    return "core" if stack.stage is None else words(stack.stage, stack.rank if ranked else None)


def _threads(stack: StageStacks) -> list[tuple[str, bool, tuple[str, ...]]]:
    plain = [ThreadStack(name="", frames=stack.text.splitlines())] if stack.text else []
    return [
        (thread.name, thread.owns_gil, tuple(clean(frame) for frame in thread.frames))
        for thread in stack.threads or plain
    ]
