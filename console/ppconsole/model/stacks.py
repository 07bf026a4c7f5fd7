"""Stacks of many stages as few: threads of several stages with the same frames make one group."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.protocol.inspection import StacksDetail, StageStacks, ThreadStack

from ppconsole.model.safe import clean

_MAIN = "MainThread"


class Group(NamedTuple):
    """Threads of one name with the same frames, the newest first. Without a stage it is the engine core's."""

    stages: tuple[int, ...]
    thread: str
    owns_gil: bool
    frames: tuple[str, ...]

    @property
    def title(self) -> str:
        """`stages 0, 1, 3: MainThread`."""
        word = "core" if not self.stages else "stage " if len(self.stages) == 1 else "stages "
        name = f" {clean(self.thread)}" if self.thread else ""
        return f"{word}{', '.join(map(str, self.stages))}:{name}{' (holds the GIL)' if self.owns_gil else ''}"


def grouped(detail: StacksDetail) -> list[Group]:
    """Return the groups: the core's behind the stages', of these main threads first, and the outlier of those first.

    It is where to look.
    """
    found: dict[tuple[str, bool, tuple[str, ...]], list[int]] = {}
    for stack in detail.stages:
        for key in _threads(stack):
            stages = found.setdefault(key, [])
            if stack.stage is not None and stack.stage not in stages:
                stages.append(stack.stage)
    groups = [Group(tuple(stages), *key) for key, stages in found.items()]
    groups.sort(key=lambda group: (group.thread not in (_MAIN, ""), group.thread, len(group.stages)))
    return groups + [Group((), *key) for key in (_threads(detail.core) if detail.core is not None else [])]


def notes(detail: StacksDetail) -> list[str]:
    """Return remarks on how the stacks were taken."""
    lines = [f"{who(stack)}: {clean(stack.error)}" for stack in detail.all if stack.error]
    incomplete = detail.ability and not all(stage.native for stage in detail.stages)
    return lines + ([clean(detail.ability)] if incomplete else [])


def who(stack: StageStacks) -> str:
    """Return `stage 3`, or `core`."""
    return "core" if stack.stage is None else f"stage {stack.stage}"


def _threads(stack: StageStacks) -> list[tuple[str, bool, tuple[str, ...]]]:
    plain = [ThreadStack(name="", frames=stack.text.splitlines())] if stack.text else []
    return [
        (thread.name, thread.owns_gil, tuple(clean(frame) for frame in thread.frames))
        for thread in stack.threads or plain
    ]
