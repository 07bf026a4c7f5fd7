"""Outputs of a core and the process of texts beside it, without sockets: messages wait in two lists."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
from ppengine.core.outputs import OutputHub
from ppengine.protocol.control import Failed, Fetch, Fetched, Inspected
from ppengine.protocol.frames import Codec, encode
from ppengine.protocol.offline import EndSamples, Follow, FromFront, News, ToFront
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.text_messages import OutputPart, ReadOutput
from ppengine.protocol.token_ids import compact
from ppengine.texts.core_questions import CoreQuestions
from ppengine.texts.output_reader import OutputReader
from ppengine.texts.stop_finder import StopFinder
from ppengine.texts.text_store import TextStore
from pushed_tokens import push

EOS = 2


class Letters:
    """A tokenizer whose token ids are characters."""

    def stream(self, _prompt: list[int]) -> Letters:
        return self

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


class TextWorld:
    """A core with requests, and the parts of the process of texts. `replace` is the kill of that process."""

    def __init__(self, tokenizer: Any = None) -> None:
        self.now, self.failure = 1000.0, ""
        self.tokenizer = tokenizer or Letters()
        self.answers: list[msgspec.Struct] = []
        self.ended: list[tuple[str, int]] = []
        """Samples that the process of texts has ended, each time."""
        self.obeys = True
        """Whether the core ends them."""
        self.asked: list[msgspec.Struct] = []
        """Questions to the core, the newest last."""
        self.scored = 0
        """Log-probabilities that the core has sent for stop texts."""
        self._count = 0
        self.new_hub()
        self.replace()

    def new_hub(self) -> None:
        self._to_texts: deque[bytes] = deque()
        self.hub = OutputHub(
            lambda _client, answer: self._to_texts.append(encode(answer)), lambda: self.now, lambda: self.failure
        )  # fmt: skip

    def replace(self) -> None:
        """Let another process of texts take the place of this one."""
        self._to_core: deque[bytes] = deque()
        self._to_texts.clear()
        self.core = CoreQuestions(lambda message: self._to_core.append(encode(message)), lambda: self.now)
        self.store = TextStore(self.tokenizer, [EOS])
        self.stops = StopFinder(self.store, self.core, lambda: self.now)
        self.reader = OutputReader(self.store, self.core, self.answers.append, self.stops.end, lambda: self.now)

    # --- the core -------------------------------------------------------------------------------------------

    def open(self, name: str = "r-1", session: str = "", **sampling: Any) -> None:
        self._count += 1
        self.hub.open(name, session, compact([1, 2, 3]), SamplingParams(**sampling), self._count)

    def say(self, text: str, index: int = 0, name: str = "r-1") -> None:
        """Let a request write, all of it in one turn of the core."""
        for letter in text:
            push(self.hub, name, index, ord(letter))

    def token(self, token: int, index: int = 0) -> None:
        push(self.hub, "r-1", index, token)

    # --- messages -------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Exchange messages until there are none."""
        back = Codec(FromFront)
        for _ in range(1000):
            self.stops.turn()
            self.reader.turn()
            self.core.turn()
            self.on_core()
            self.hub.serve_waiters()
            if not self._to_texts:
                return
            while self._to_texts:
                message = back.decode(self._to_texts.popleft())
                if isinstance(message, News):
                    self.scored += sum(len(piece.logprobs) for piece in message.pieces)
                    self.stops.take(message)
                elif isinstance(message, OutputPart | Inspected | Failed):
                    self.core.take(message)
        raise AssertionError("messages without an end")

    def on_core(self) -> None:
        """Let the core take its messages."""
        while self._to_core:
            self._on_core(Codec(ToFront).decode(self._to_core.popleft()))

    def _on_core(self, message: object) -> None:
        if isinstance(message, EndSamples):
            assert message.session == ""
            for (name, index), number in zip(message.samples, message.numbers, strict=True):
                output = self.hub.get(name)
                if output is None or output.number != number:
                    continue
                self.ended.append((name, index))
                if self.obeys:
                    self.hub.finish(name, index, "stop")
            return
        assert isinstance(message, ReadOutput | Follow)
        self.asked.append(message)
        if isinstance(message, ReadOutput):
            self.hub.fetch(b"t", message)
        else:
            self.hub.follow(b"t", message)

    def lose(self, chance: random.Random) -> None:
        """Lose the messages that wait, as a kill of the core does."""
        if chance.random() < 0.5:
            self._to_core.clear()
        self._to_texts.clear()

    # --- a console ------------------------------------------------------------------------------------------

    def ask(self, name: str = "r-1", **fields: Any) -> None:
        """Send a question of a console, and exchange messages."""
        self.reader.fetch(Fetch(nonce=7, request=name, **{"wait_ms": 0, **fields}))
        self.turn()

    def fetch(self, name: str = "r-1", **fields: Any) -> Fetched:
        """Return the answer to a question of a console that waits for nothing."""
        self.ask(name, **fields)
        answer = self.answers.pop()
        assert isinstance(answer, Fetched) and answer.nonce == 7, answer
        return answer
