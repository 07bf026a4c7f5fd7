"""Reports of the parts of the core to its journal, as records of the present turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ppengine.core.journal import Journal, State
from ppengine.core.journal_records import (
    Added,
    Answered,
    Began,
    Changed,
    Dropped,
    Ended,
    Entered,
    Noticed,
    Opened,
    Record,
    Settings,
    Stated,
    Tokens,
    Watched,
)
from ppengine.core.operations import Operation
from ppengine.core.scheduler import Retirement
from ppengine.core.scheduler.request import Request
from ppengine.protocol.control import Logprob, Reply
from ppengine.protocol.facts import Fact
from ppengine.protocol.reports import Attended
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Event
from ppengine.protocol.token_ids import compact

SETTINGS_S = 1.0
"""Most seconds between two records of the settings: they have the totals."""


class JournalWriter:
    """Makes records. Without `full` it keeps the ids of requests alone, for a core that reports them as lost."""

    def __init__(self, journal: Journal, *, full: bool) -> None:
        self.full = full
        self._journal = journal
        self._rare = False
        """Whether the turn has more than tokens: the settings may have changed."""
        self._settings: Settings | None = None
        self._settings_due = 0.0

    def begin(self, state: State) -> None:
        """Write the live state into a file that replaces all others."""
        self._journal.begin(state)

    def commit(self, settings: Callable[[], Settings], state: State, now: float) -> None:
        """Write the records of the turn, and the settings behind them if they have changed."""
        if self._rare or now >= self._settings_due:
            present = settings()
            if present != self._settings:
                self._settings = present
                self._journal.note(present)
            self._rare, self._settings_due = False, now + SETTINGS_S
        self._journal.commit(state, now)

    def take_failure(self) -> str:
        """Return, once, why nothing is kept any more; empty if nothing has failed since the last call."""
        return self._journal.take_failure()

    def close(self) -> None:
        """Close the file."""
        self._journal.close()

    # --- requests -------------------------------------------------------------------------------------------

    def entered(self, requests: Sequence[Request], session: str) -> None:
        """Note a submission, which was admitted."""
        leader = requests[0]
        record = Entered(
            name=leader.group, session=session, first=leader.arrival, prompt_ids=leader.prompt_ids,
            sampling=leader.sampling, seed=leader.seed, owner=leader.owner, arrival=leader.arrival_time,
            priority=leader.priority, principal=leader.principal, client=leader.client,
            queued=leader.queued_time, cache_salt=leader.cache_salt,
        )  # fmt: skip
        if not self.full:
            record.prompt_ids, record.sampling = compact(), SamplingParams(n=leader.sampling.n)
            record.cache_salt = ""
        self._note(record)

    def tokens(self, retirement: Retirement, step: int, now: float) -> None:
        """Note the tokens of a retired step. `step`: the number of the newest one that was sent."""
        if not self.full or not retirement.tokens:
            return
        requests, tokens, logprobs, tops = zip(*retirement.tokens, strict=True)
        wanted = [place for place, one in enumerate(requests) if one.sampling.logprobs is not None]
        self._journal.note(
            Tokens(
                now, step, [one.arrival for one in requests], list(tokens),
                [(place, Logprob(logprobs[place], tops[place])) for place in wanted],
            )
        )  # fmt: skip

    def began(self, names: list[str]) -> None:
        """Note that the stages get work for samples."""
        self._journal.note(Began(names))

    def ended(self, request: Request) -> None:
        """Note the end of a sample; its event follows."""
        self._note(Ended(request.arrival))

    def changed(self, request: Request) -> None:
        """Note the priority and the hold of a sample."""
        self._note(Changed(request.arrival, request.priority, request.held_by))

    def dropped(self, names: list[str]) -> None:
        """Note outputs that are no longer kept."""
        self._note(Dropped(names))

    def watched(self, attended: Attended) -> None:
        """Note that a request ends with its console."""
        self._note(Watched(attended))

    def added(self, session: str, nonce: int, names: list[str]) -> None:
        """Note that the prompts of a message have become requests."""
        if self.full:
            self._note(Added(session, nonce, names))

    # --- commands, events -----------------------------------------------------------------------------------

    def answered(self, reply: Reply) -> None:
        """Note an answer to a command."""
        if self.full:
            self._note(Answered(reply))

    def opened(self, operation: Operation) -> None:
        """Note a command that has no end yet."""
        if self.full:
            self._note(Opened(operation.id, operation.client, operation.command))

    def noticed(self, number: int, event: Event) -> None:
        """Note an event under its number."""
        self._note(Noticed(number, event))

    def stated(self, fact: Fact) -> None:
        """Note a fact."""
        self._note(Stated(fact))

    def _note(self, record: Record) -> None:
        self._rare = True
        self._journal.note(record)
