"""Stacks of many stages as few: a thread that stands at the same place in several of them is told once."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.protocol.inspection import StacksDetail, ThreadStack

from ppconsole.model.safe import clean

_MAIN = "MainThread"


class Group(NamedTuple):
    """Threads of one name with the same frames, the newest first."""

    stages: tuple[int, ...]
    thread: str
    owns_gil: bool
    frames: tuple[str, ...]

    @property
    def title(self) -> str:
        """`stages 0, 1, 3: MainThread`."""
        word = "stage" if len(self.stages) == 1 else "stages"
        name = f" {clean(self.thread)}" if self.thread else ""
        return f"{word} {', '.join(map(str, self.stages))}:{name}{' (holds the GIL)' if self.owns_gil else ''}"


def grouped(detail: StacksDetail) -> list[Group]:
    """Return the groups: main threads first, and of those the outlier first: it is where to look."""
    found: dict[tuple[str, bool, tuple[str, ...]], list[int]] = {}
    for stage in detail.stages:
        plain = [ThreadStack(name="", frames=stage.text.splitlines())] if stage.text else []
        for thread in stage.threads or plain:
            key = thread.name, thread.owns_gil, tuple(clean(frame) for frame in thread.frames)
            stages = found.setdefault(key, [])
            if stage.stage not in stages:
                stages.append(stage.stage)
    groups = [Group(tuple(stages), *key) for key, stages in found.items()]
    return sorted(groups, key=lambda group: (group.thread not in (_MAIN, ""), group.thread, len(group.stages)))


def notes(detail: StacksDetail) -> list[str]:
    """Return what is to be said about how the stacks were taken."""
    lines = [f"stage {stage.stage}: {clean(stage.error)}" for stage in detail.stages if stage.error]
    incomplete = detail.ability and not all(stage.native for stage in detail.stages)
    return lines + ([clean(detail.ability)] if incomplete else [])
