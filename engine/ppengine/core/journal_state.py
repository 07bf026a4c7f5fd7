"""The state that a journal describes: its records, applied in order."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ppengine.core import journal
from ppengine.core.journal_records import (
    Added,
    Answered,
    Began,
    Changed,
    Dropped,
    Ended,
    Entered,
    Moved,
    Noticed,
    Opened,
    Record,
    SampleState,
    Settings,
    Stated,
    Tokens,
    Watched,
)
from ppengine.protocol.control import Outcome, Refused, Reply
from ppengine.protocol.facts import Fact
from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.snapshot import Event

_COMPLETE = ("stop", "length")
"""Reasons of samples that have all their tokens."""


@dataclass(eq=False)
class Restored:
    """Everything that the core before this one has left."""

    settings: Settings | None = None
    requests: OrderedDict[str, Entered] = field(default_factory=OrderedDict)
    """Submissions by name, in order of arrival."""
    events: dict[int, Event] = field(default_factory=dict)
    facts: list[Fact] = field(default_factory=list)
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    """Answers by the id of their command."""
    opened: dict[str, Opened] = field(default_factory=dict)
    """Commands without an end, by id."""
    added: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """Prompts of offline sessions by session and number of the message."""
    step: int = 0
    damage: list[str] = field(default_factory=list)
    """Parts of the journal that could not be read."""
    _samples: dict[int, tuple[Entered, int]] = field(default_factory=dict)
    """Submission and place of each sample, by number."""
    _append: dict[int, Callable[[int], None]] = field(default_factory=dict)
    """Adds a token to a sample, by its number. A sample whose tokens may lack some is not here."""
    _damaged: int = 0
    """Parts that could not be read, up to the newest record."""
    _silent: set[int] = field(default_factory=set)
    """Numbers of samples that have had no token, or none since the end of a core."""
    _ending: dict[str, tuple[SampleState, bool]] = field(default_factory=dict)
    """Samples that have ended, by id, until the event with their figures comes; and whether no token is missing."""

    @property
    def next_number(self) -> int:
        """One above the number of the newest sample."""
        return max(self._samples, default=-1) + 1

    @property
    def finished(self) -> list[FinishedInfo]:
        """Figures of the requests that have ended, the oldest first."""
        events = (event for _, event in sorted(self.events.items()))
        return [event.finished for event in events if event.finished is not None]

    def apply(self, records: Iterable[Record]) -> None:
        """Take records in the order in which they were written."""
        for record in records:
            if len(self.damage) > self._damaged:
                # Tokens behind such a part may follow others than those before it: they are computed again.
                self._damaged = len(self.damage)
                self._append.clear()
            match record:
                case Tokens():
                    self._take_tokens(record)
                case Entered():
                    self._enter(record)
                case Noticed():
                    self._notice(record)
                case Answered():
                    self._answer(record.reply)
                case Began():
                    for name in record.requests:
                        self._begin(name)
                case Ended():
                    self._end(record.number)
                case Changed():
                    self._change(record)
                case Dropped():
                    self._drop(record.requests)
                case Settings():
                    self.settings, self.step = record, max(self.step, record.step)
                case Opened():
                    self.opened.setdefault(record.command.id, record)
                case Added():
                    self.added[record.session, record.nonce] = record.requests
                case Stated():
                    if record.fact not in self.facts:
                        self.facts.append(record.fact)
                case Watched():
                    if (known := self.requests.get(record.attended.request)) is not None:
                        known.attended = record.attended
                case Moved():
                    pass

    def _enter(self, entered: Entered) -> None:
        self.requests[entered.name] = entered
        entered.samples += [
            SampleState(priority=entered.priority) for _ in range(entered.sampling.n - len(entered.samples))
        ]
        for index in range(entered.sampling.n):
            number, sample = entered.first + index, entered.samples[index]
            self._samples[number], self._append[number] = (entered, index), sample.tokens.append
            if sample.first_token is None or entered.deaths:
                self._silent.add(number)

    def _take_tokens(self, record: Tokens) -> None:
        self.step = max(self.step, record.step)
        if self._silent:
            for number in self._silent.intersection(record.numbers):
                entered, index = self._samples[number]
                entered.samples[index].first_token = entered.samples[index].first_token or record.at
                entered.deaths = 0
                self._silent.discard(number)
        # There may be millions of tokens. One of no request had its output dropped, or its full state follows.
        append = self._append.get
        for number, token in zip(record.numbers, record.tokens, strict=False):
            if (add := append(number)) is not None:
                add(token)
        for place, logprob in record.logprobs:
            number = record.numbers[place]
            if number in self._append and (known := self._samples.get(number)) is not None:
                known[0].samples[known[1]].logprobs.append(logprob)

    def _begin(self, name: str) -> None:
        entered = self.requests.get(name) or self.requests.get(name.rpartition(".")[0])
        if entered is not None:
            entered.begun = True

    def _end(self, number: int) -> None:
        known = self._samples.get(number)
        if known is not None:
            whole = number in self._append or not known[0].prompt_ids
            self._ending[sample_id(known[0].name, known[1])] = known[0].samples[known[1]], whole

    def _notice(self, record: Noticed) -> None:
        self.events[record.number] = record.event
        info = record.event.finished
        known = None if info is None else self._ending.pop(info.id, None)
        if info is None or known is None:
            return
        sample, whole = known
        if whole or info.reason not in _COMPLETE or len(sample.tokens) >= info.output_tokens:
            sample.finished = info

    def _answer(self, reply: Reply) -> None:
        known = self.replies.setdefault(reply.id, [])
        if reply not in known:
            known.append(reply)
        if isinstance(reply, Outcome | Refused):
            self.opened.pop(reply.id, None)

    def _change(self, record: Changed) -> None:
        known = self._samples.get(record.number)
        if known is not None:
            sample = known[0].samples[known[1]]
            sample.priority, sample.held_by = record.priority, record.held_by

    def _drop(self, names: list[str]) -> None:
        for name in names:
            entered = self.requests.pop(name, None)
            if entered is None:
                continue
            for number in range(entered.first, entered.first + entered.sampling.n):
                self._samples.pop(number, None)
                self._append.pop(number, None)
                self._silent.discard(number)


def restore(folder: Path) -> Restored | None:
    """Return the state that a core of this engine has left in the run folder; None if there was none."""
    if not journal.exists(folder):
        return None
    restored = Restored()
    gc.disable()  # It would look at millions of new tokens again and again, none of which goes.
    try:
        restored.apply(journal.read(folder, restored.damage.append))
    finally:
        gc.enable()
    return restored


def sample_id(name: str, index: int) -> str:
    """Return the id of a sample of the request `name`."""
    return name if index == 0 else f"{name}.{index}"
