"""Questions on `bulk`: events from the ring here, some details from this process, outputs and others from the core,
stacks and rings from the agent. Questions to others get a number of ours, so that two consoles may use the same."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from ppengine.gateway.events import EventLog
from ppengine.protocol import frames
from ppengine.protocol.control import ErrorCode, Failed, Fetch, Fetched, Inspect, Inspected, Replay
from ppengine.protocol.inspection import FaultsDetail

OPEN_MOST = 10_000
WAIT_MOST_MS = 60_000
CORE_ANSWER_S, STACKS_ANSWER_S = 10.0, 20.0
NO_FAULTS = "this engine takes no faults on demand; start one that does: ppconsole serve PROFILE --allow-faults"


class Open(msgspec.Struct):
    """A question that somebody else answers."""

    client: bytes
    nonce: int
    deadline: float
    whom: str


class BulkDesk:
    """Takes questions of consoles and answers of core and agent."""

    def __init__(
        self,
        events: EventLog,
        local: Callable[[Inspect], Inspected | Failed | None],
        answer: Callable[[bytes, msgspec.Struct], None],
        ask_core: Callable[[Fetch | Inspect], str],
        ask_agent: Callable[[Inspect], str],
        faults: Callable[[], FaultsDetail | None] = lambda: None,
    ) -> None:
        """`local` answers what is known here, else None.

        `ask_core` and `ask_agent` send a question and return why that is not possible, empty when it is. `faults`
        returns None in an engine that cannot be broken on demand.
        """
        self._events, self._local, self._answer = events, local, answer
        self._ask_core, self._ask_agent, self._faults = ask_core, ask_agent, faults
        self._open: OrderedDict[int, Open] = OrderedDict()
        self._next = 1

    def handle(self, client: bytes, question: Replay | Fetch | Inspect) -> None:
        """Answer one question, or pass it on."""
        if isinstance(question, Replay):
            self._answer(client, self._events.replay(question))
        elif isinstance(question, Fetch):
            question.wait_ms = max(0, min(question.wait_ms, WAIT_MOST_MS))
            self._pass_on(client, question, "core", CORE_ANSWER_S + question.wait_ms / 1e3)
        elif question.what == "faults":
            self._list_faults(client, question.nonce)
        elif (here := self._local(question)) is not None:
            self._answer(client, here)
        elif question.what in ("stacks", "rings"):
            self._pass_on(client, question, "agent", STACKS_ANSWER_S)
        else:
            self._pass_on(client, question, "core", CORE_ANSWER_S)

    def on_answer(self, answer: Fetched | Inspected | Failed) -> bool:
        """Hand an answer to who asked; return False when nobody did, or nobody waits any more."""
        known = self._open.pop(answer.nonce, None)
        if known is None:
            return False
        answer.nonce = known.nonce
        self._answer(known.client, answer)
        return True

    def expire(self, now: float) -> None:
        """Tell who waits for an answer that does not come."""
        for number, known in [(number, known) for number, known in self._open.items() if known.deadline < now]:
            del self._open[number]
            self._fail(known.client, known.nonce, "FAILED", f"the {known.whom} gave no answer")

    def _list_faults(self, client: bytes, nonce: int) -> None:
        listing = self._faults()
        if listing is None:
            self._fail(client, nonce, "DENIED", NO_FAULTS)
            return
        data = msgspec.Raw(frames.encode(listing))
        self._answer(client, Inspected(nonce=nonce, what="faults", data=data))

    def _pass_on(self, client: bytes, question: Fetch | Inspect, whom: str, wait_s: float) -> None:
        nonce, number = question.nonce, self._next
        self._next += 1
        question.nonce = number
        if whom == "agent" and isinstance(question, Inspect):
            why = self._ask_agent(question)
        else:
            why = self._ask_core(question)
        if why:
            self._fail(client, nonce, "NO_CORE" if whom == "core" else "FAILED", why)
            return
        self._open[number] = Open(client, nonce, time.monotonic() + wait_s, whom)
        while len(self._open) > OPEN_MOST:
            self._open.popitem(last=False)

    def _fail(self, client: bytes, nonce: int, code: ErrorCode, text: str) -> None:
        self._answer(client, Failed(nonce=nonce, code=code, text=text))
