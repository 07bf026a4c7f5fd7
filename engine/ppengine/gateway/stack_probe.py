"""Takes the stacks for verdicts, once and in the background, when a verdict needs the hanging line of code."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ppengine.diagnosis import STACKS_WANTED
from ppengine.diagnosis.evidence import Key, Stack
from ppengine.protocol import frames
from ppengine.protocol.control import Failed, Inspect, Inspected
from ppengine.protocol.inspection import MAIN_THREAD, StacksDetail, StageStacks
from ppengine.protocol.snapshot import Verdict

Process = tuple[int | None, int]
"""Stage (None: the core) and pid: processes of two nodes may have the same pid."""
NONCE = -1
"""Nonce of the gateway's own questions; those of consoles count from 1."""
_AGAIN_S = 1.0
_LOOKS_MOST = 6
"""Looks for frames, of which none came in time, and for the holder of a GIL that is free for a part of the time."""
_LOST_S = 10.0
"""Time limit in seconds per process: the agent needs at most half of it, one process after the other."""


class StackProbe:
    """Asks the agent once per fault, again if no answer comes; the stacks are evidence until the fault is gone."""

    def __init__(self, ask: Callable[[Inspect], str]) -> None:
        """`ask` sends a question to the agent and returns the obstacle, empty without one."""
        self._ask = ask
        self._requested: dict[Process, float] = {}
        """Time of the last question, by stage (None: the core) and pid."""
        self._asked: Counter[Process] = Counter()
        self._looks: Counter[Process] = Counter()
        """Questions and answers by process."""
        self._not_before: dict[Process, float] = {}
        """Time before which the agent of a process is not asked again: it could not be."""
        self.stacks: Mapping[Process, Stack] = {}
        """The newest stacks by process."""

    def look(self, verdicts: list[Verdict], pids: Mapping[Key | None, int], sharers: Collection[Key] = ()) -> None:
        """Request the stacks that `verdicts` lack. `pids`: of each place and (None) the core.

        `sharers`: places whose GIL is held for a part of the time; one look may miss the thread that holds it.
        """
        wanted: set[Process] = set()
        for verdict in verdicts:
            of_one = verdict.stage is not None or verdict.cause == "core"
            if verdict.root and of_one and verdict.cause in STACKS_WANTED:
                # A deadlock is only understood with the stacks of all stages.
                wanted |= {
                    (None if key is None else key[0], pid)
                    for key, pid in pids.items()
                    if (verdict.cause == "deadlock" and key is not None) or _is_of(verdict, key)
                }
        if not wanted:
            self._requested, self.stacks, self._not_before = {}, {}, {}
            self._asked, self._looks = Counter(), Counter()
            return
        now, lost_s = time.monotonic(), _LOST_S * len(wanted)
        sharing = {(key[0], pids[key]) for key in sharers if key in pids}
        asked: set[int | None] = set()
        for stage, pid in sorted(wanted, key=lambda one: one[1]):
            requested = self._requested.get((stage, pid))
            lacks = self._lacks_frames((stage, pid)) or ((stage, pid) in sharing and self._lacks_holder((stage, pid)))
            again = lacks and now - (requested or 0.0) >= _AGAIN_S
            if requested is not None and not again and ((stage, pid) in self.stacks or now - requested < lost_s):
                continue
            if again and (stage, pid) not in self.stacks and requested is not None and now - requested < lost_s:
                continue  # The answer to the last question is still to come.
            if now < self._not_before.get((stage, pid), 0.0):
                continue
            # The answer has all ranks of the stage.
            if stage not in asked and self._ask(Inspect(nonce=NONCE, what="stacks", stage=stage, core=stage is None)):
                self._not_before[stage, pid] = now + _AGAIN_S
                continue
            asked.add(stage)
            self._requested[stage, pid] = now
            self._asked[stage, pid] += 1

    def take(self, answer: Inspected | Failed) -> StacksDetail | None:
        """Keep the requested stacks of the agent's answer; return it, None for a failure."""
        if isinstance(answer, Failed):
            return None
        detail = frames.decode_as(StacksDetail, bytes(answer.data))
        known = {(stage.stage, stage.pid): newest(stage) for stage in detail.all if stage.pid is not None}
        taken = known.keys() & self._requested.keys()
        self._looks.update(taken)
        kept = {process for process, stack in self.stacks.items() if _is_holder(stack)}
        self.stacks = {**self.stacks, **{process: known[process] for process in taken - kept}}
        return detail

    def _lacks_frames(self, process: Process) -> bool:
        """Return whether another look may show frames: on a crowded host none may come in time."""
        stack, looks = self.stacks.get(process), self._looks[process]
        return stack is not None and not stack.main and self._asked[process] <= looks < _LOOKS_MOST

    def _lacks_holder(self, process: Process) -> bool:
        """Return whether another look may show a thread that holds the GIL, other than the main one."""
        stack = self.stacks.get(process)
        return self._looks[process] < _LOOKS_MOST and (stack is None or not _is_holder(stack))


def _is_of(verdict: Verdict, key: Key | None) -> bool:
    """Return whether a verdict is about the process of a place, or (None) of the core."""
    if key is None or verdict.stage is None:
        return key is None and verdict.stage is None
    return key[0] == verdict.stage and verdict.rank in (None, key[1])


def _is_holder(stack: Stack) -> bool:
    """Return whether a stack shows a GIL held by a thread that has no reason to: the main thread always has one."""
    return bool(stack.gil_owner) and not stack.gil_owner.startswith(MAIN_THREAD)


def newest(found: StageStacks) -> Stack:
    """Return the stack for a verdict: the frames of the main thread, and the holder of the GIL."""
    main = next((thread for thread in found.threads if thread.name == MAIN_THREAD), None)
    owner = next((thread for thread in found.threads if thread.owns_gil), None)
    return Stack(
        pid=found.pid or 0,
        main=() if main is None else _top(main.frames),
        gil_owner="" if owner is None else f"{owner.name} at {' < '.join(_top(owner.frames))}",
        error=found.error,
    )


def _top(frames: list[str], python: int = 3) -> tuple[str, ...]:
    """Return the innermost frame that has a name, and the innermost Python ones."""
    named = [frame for frame in frames if not frame.startswith("? ")]
    inner = [frame for frame in named if ".py:" in frame or "<string>:" in frame][:python]
    return tuple(inner if not named or named[0] in inner else [named[0], *inner])
