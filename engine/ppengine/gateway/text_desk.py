"""Submissions with texts: the process of texts makes their tokens, before the core gets their commands.

A command waits here while that process is restarted or has much to do, and its console hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ppengine.common.absent_texts import check_without_tokenizer
from ppengine.gateway.command_answers import Answers
from ppengine.gateway.command_checks import refused
from ppengine.gateway.kept_commands import Kept
from ppengine.protocol.control import Deferred
from ppengine.protocol.text_messages import Encode, Encoded
from ppengine.protocol.verbs import Submit

DEFER_S = 0.2
"""Seconds after which a command that still waits is reported as deferred."""
AGAIN_S = 10.0
"""Seconds after which an unanswered submission is sent again: its answer may be lost with a gateway."""
TRY_S = 0.25
"""Seconds between two tries to send what that process does not take: each makes a message of up to 16 MiB."""
AWAY_S = 30.0
"""Seconds for which a command waits for a process of texts that is restarted."""
SILENT_S = 10.0
"""Seconds without a sign of life after which that process counts as stopped, and its commands are refused."""
ENDS_MOST = 3
"""Processes to which a submission is sent without an answer: it may be the reason why they end."""


class TextsAccess(Protocol):
    """The parts of the gateway that the desk needs."""

    def send_texts(self, message: msgspec.Struct) -> bool:
        """Send to the process of texts; return whether it was taken."""

    def texts_away(self) -> str:
        """Return how that process ended that is being restarted; empty if it runs or is not known."""


@dataclass(slots=True)
class _Waiting:
    """One command whose submission is being encoded."""

    kept: Kept
    message: Encode
    since: float
    tried_at: float = 0.0
    """Time of the newest try to send it."""
    sent: bool = False
    """Whether that was taken; otherwise it waits for a process that takes it."""
    pid: int | None = None
    """Process that got it last; None: not known, or none."""
    ends: int = 0
    """Processes that ended after they had got it, and before they had answered."""
    deferred: bool = False


class TextDesk:
    """Has submissions encoded. `go_on` takes a command whose tokens are there."""

    def __init__(
        self, engine: TextsAccess, answers: Answers, go_on: Callable[[Kept], None], *, absent: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`absent`: the engine has no tokenizer, so texts are refused."""
        self._engine, self._answers, self._go_on, self._absent = engine, answers, go_on, absent
        self._clock = clock
        self._waiting: dict[str, _Waiting] = {}
        self._pid: int | None = None
        """The process that is there; None: none has reported to this gateway."""
        self._alive_at = clock()

    def needs(self, kept: Kept) -> bool:
        """Return whether a command has a text whose tokens are not there."""
        command = kept.command
        if command is None or kept.encoded is not None or not isinstance(verb := command.verb, Submit):
            return False
        if self._absent:
            return True
        return verb.prompt is not None or verb.chat or bool(verb.sampling.bad_words)

    def begin(self, kept: Kept) -> None:
        """Have a command encoded, or refuse it; `go_on` gets it then."""
        command = kept.command
        assert command is not None and isinstance(command.verb, Submit), "only such a command needs it"
        if self._absent:
            try:
                check_without_tokenizer(command.verb)
            except ValueError as problem:
                self._answers.give(kept, refused(command, "INVALID", str(problem)))
            else:
                kept.encoded = command
                self._go_on(kept)
            return
        one = self._waiting[command.id] = _Waiting(kept, Encode(id=command.id, submit=command.verb), self._clock())
        self._send(one)

    def has(self, kept: Kept) -> bool:
        """Return whether a command waits here: the core has not got it."""
        return kept.entry.id in self._waiting

    def take(self, answer: Encoded) -> None:
        """Take the tokens of a submission, or the reason why there are none."""
        one = self._waiting.pop(answer.id, None)
        self._alive_at = self._clock()
        if one is None or one.kept.over:
            return
        kept, command = one.kept, one.kept.command
        assert command is not None, "it has no end"
        if answer.submit is None:
            self._answers.give(kept, refused(command, answer.code, answer.error))
        else:
            kept.encoded = msgspec.structs.replace(command, verb=answer.submit)
            self._go_on(kept)

    def alive(self, pid: int) -> bool:
        """Note a sign of life; return whether it is another process than before.

        It gets everything that its predecessor has not answered.
        """
        before, self._pid, self._alive_at = self._pid, pid, self._clock()
        if before == pid:
            return False
        for one in list(self._waiting.values()):
            if one.pid is not None and one.pid != pid:
                one.ends += 1
            if one.ends >= ENDS_MOST:
                text = f"the process of texts ended {one.ends} times before it answered; it is not tried again"
                self._refuse(one, text, failed=True)
            else:
                self._send(one)
        return True

    def turn(self) -> None:
        """Send what waits, report long waits, and refuse what has waited for too long. The loop calls it each turn."""
        now = self._clock()
        for one in list(self._waiting.values()):
            if one.kept.over:
                del self._waiting[one.message.id]
                continue
            if now - one.tried_at > (AGAIN_S if one.sent else TRY_S):
                self._send(one)
            silent_s = now - max(self._alive_at, one.since)
            away = self._engine.texts_away()
            if (away or not one.sent) and now - one.since > AWAY_S and silent_s > SILENT_S:
                self._refuse(one, away or "the process of texts has not started")
            elif not away and one.sent and silent_s > SILENT_S:
                self._refuse(one, f"the process of texts{self._words()} has not answered for {silent_s:.0f} s")
            elif not one.deferred and now - one.since > DEFER_S:
                one.deferred = True
                self._answers.give(one.kept, Deferred(id=one.message.id, op=one.kept.op, text=self._wait_of(one, away)))

    @property
    def next_due(self) -> float | None:
        """Time of the clock at which a wait is reported; None if none is due."""
        return min((one.since + DEFER_S for one in self._waiting.values() if not one.deferred), default=None)

    def _wait_of(self, one: _Waiting, away: str) -> str:
        if away or not one.sent:
            return away or "waits for the process of texts, which starts"
        if self._clock() - self._alive_at > 2.0:
            return f"waits for the process of texts{self._words()}, which does not answer"
        return f"waits for its {'chat template' if one.message.submit.chat else 'tokenizer'}"

    def _words(self) -> str:
        return "" if self._pid is None else f" (pid {self._pid})"

    def _send(self, one: _Waiting) -> None:
        one.tried_at = self._clock()
        one.sent = not self._engine.texts_away() and self._engine.send_texts(one.message)
        if one.sent:
            one.pid = self._pid

    def _refuse(self, one: _Waiting, text: str, *, failed: bool = False) -> None:
        del self._waiting[one.message.id]
        command = one.kept.command
        if not one.kept.over and command is not None:
            self._answers.give(one.kept, refused(command, "FAILED" if failed else "BUSY", text))
