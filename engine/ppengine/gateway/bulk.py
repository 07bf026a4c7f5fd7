"""Answers questions on `bulk`: events and some details from this process, outputs and details of requests from `texts`,
other details from the core, stacks and rings from the agent. A forwarded question gets a new number, because two
consoles may use the same."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from ppengine.gateway.event_log import EventLog
from ppengine.protocol import frames
from ppengine.protocol.control import ErrorCode, Failed, Fetch, Fetched, Inspect, Inspected, Replay
from ppengine.protocol.inspection import FaultsDetail

OPEN_MOST = 10_000
WAIT_MOST_MS = 60_000
CORE_FULL_S = 1.0
"""Seconds for which a question waits for a core that takes no message: its end may be reported a moment later."""
CORE_ANSWER_S, STACKS_ANSWER_S = 10.0, 20.0
TEXTS_ANSWER_S = 8.0
"""Seconds for the process of texts: consoles wait for 10, and are to hear which process gives no answer."""
TEXTS = "process of texts"
"""The answerer that makes the text of outputs."""
NO_FAULTS = "this engine takes no faults on demand; start one that does: ppconsole serve PROFILE --allow-faults"


class Open(msgspec.Struct):
    """A question forwarded to core or agent, under its own number. `key` is that of its console."""

    question: Fetch | Inspect
    client: bytes
    key: str
    nonce: int
    deadline: float
    answerer: str
    unsent_since: float | None = None
    """Time since which it waits for a core that takes messages; None: it was sent."""


class BulkDesk:
    """Takes the questions of consoles, and the answers of core and agent."""

    def __init__(
        self,
        events: EventLog,
        local: Callable[[Inspect], Inspected | Failed | None],
        answer: Callable[[bytes, msgspec.Struct], None],
        ask_core: Callable[[Fetch | Inspect], tuple[bool, str]],
        ask_agent: Callable[[Inspect], str],
        faults: Callable[[], FaultsDetail | None] = lambda: None,
        core_awaited: Callable[[], bool] = lambda: False,
        ask_texts: Callable[[Fetch | Inspect], tuple[bool, str]] | None = None,
    ) -> None:
        """`local` answers questions from this process and returns None for others.

        `ask_agent` sends a question and returns the obstacle, empty without one. `ask_core` returns before that
        whether it was sent: a core that is restarted gets it later. So does `ask_texts`; None: the engine has no
        tokenizer, and the core answers. `faults` returns None in an engine without faults on demand.
        """
        self._events, self._local, self._answer = events, local, answer
        self._ask_agent, self._faults, self._core_awaited = ask_agent, faults, core_awaited
        self._asks = {"core": ask_core, TEXTS: ask_texts or ask_core}
        self._texts = "core" if ask_texts is None else TEXTS
        self._answer_s = CORE_ANSWER_S if ask_texts is None else TEXTS_ANSWER_S
        self._open: OrderedDict[int, Open] = OrderedDict()
        # Answers to the questions of a gateway before this one must match none of its own.
        self._next = secrets.randbits(48)

    def handle(self, client: bytes, question: Replay | Fetch | Inspect, key: str = "") -> None:
        """Answer one question, or pass it on."""
        if isinstance(question, Replay):
            self._answer(client, self._events.replay(question))
        elif isinstance(question, Fetch):
            question.wait_ms = max(0, min(question.wait_ms, WAIT_MOST_MS))
            self._pass_on(client, question, self._texts, self._answer_s + question.wait_ms / 1e3, key)
        elif question.what == "faults":
            self._list_faults(client, question.nonce)
        elif (here := self._local(question)) is not None:
            self._answer(client, here)
        elif question.what in ("stacks", "rings"):
            self._pass_on(client, question, "agent", STACKS_ANSWER_S, key)
        else:
            self._pass_on(client, question, self._texts if question.what == "request" else "core", self._answer_s, key)

    def on_answer(self, answer: Fetched | Inspected | Failed) -> bool:
        """Forward an answer to its console; return False if no console waits for it."""
        known = self._open.pop(answer.nonce, None)
        if known is None:
            return False
        answer.nonce = known.nonce
        self._answer(known.client, answer)
        return True

    def core_back(self) -> None:
        """Ask another core what the one before it has not answered."""
        self._again("core")

    def texts_back(self) -> None:
        """Ask another process of texts what the one before it has not answered."""
        self._again(TEXTS)

    def _again(self, answerer: str) -> None:
        for known in [known for known in self._open.values() if known.answerer == answerer]:
            sent, _ = self._asks[answerer](known.question)
            known.unsent_since = None if sent else time.monotonic()

    def expire(self, now: float) -> None:
        """Ask unsent questions again; fail overdue ones, and those that a core without a fault does not take."""
        for number, known in list(self._open.items()):
            if known.deadline < now:
                del self._open[number]
                self._fail(known.client, known.nonce, "EXPIRED", f"the {known.answerer} gave no answer in time")
            elif known.unsent_since is not None:
                sent, _ = self._asks[known.answerer](known.question)
                if sent:
                    known.unsent_since = None
                elif known.answerer == "core" and now - known.unsent_since > CORE_FULL_S and not self._core_awaited():
                    del self._open[number]
                    self._fail(known.client, known.nonce, "NO_CORE", "the engine core takes no more questions now")

    def drop_revoked(self, allowed: Callable[[str], bool]) -> None:
        """Drop the open questions of keys that are not allowed any more: their answers are dropped."""
        for number, known in list(self._open.items()):
            if not allowed(known.key):
                del self._open[number]

    def _list_faults(self, client: bytes, nonce: int) -> None:
        listing = self._faults()
        if listing is None:
            self._fail(client, nonce, "DENIED", NO_FAULTS)
            return
        data = msgspec.Raw(frames.encode(listing))
        self._answer(client, Inspected(nonce=nonce, what="faults", data=data))

    def _pass_on(self, client: bytes, question: Fetch | Inspect, answerer: str, wait_s: float, key: str) -> None:
        nonce, number = question.nonce, self._next
        self._next += 1
        question.nonce = number
        sent = True
        if answerer == "agent" and isinstance(question, Inspect):
            why = self._ask_agent(question)
        else:
            sent, why = self._asks[answerer](question)
        if why:
            self._fail(client, nonce, "FAILED" if answerer == "agent" else "NO_CORE", why)
            return
        now = time.monotonic()
        self._open[number] = Open(question, client, key, nonce, now + wait_s, answerer, None if sent else now)
        while len(self._open) > OPEN_MOST:
            self._open.popitem(last=False)

    def _fail(self, client: bytes, nonce: int, code: ErrorCode, text: str) -> None:
        self._answer(client, Failed(nonce=nonce, code=code, text=text))
