"""A core that takes whatever a console, or a program with the offline API, may send; stages answer in between."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
from core_world import VOCAB, CoreWorld
from ppengine.protocol import frames, offline
from ppengine.protocol.control import Command, Fetch, Inspect
from ppengine.protocol.text_messages import ReadOutput
from ppengine.protocol.verbs import Many, RequestVerb, SetCheck, Stop, Verb
from values import TEXTS, value_of

INPUTS_MOST = 500
"""Inputs that one core takes: then the next begins, so that all starts are seen."""
ADJUSTED = {"min_p": 0.1, "presence_penalty": -1.0, "logit_bias": {5: 2.0}, "bad_words_ids": [[1, 2]]}


def make(chance: Random) -> bytes:
    """Return a command, or now and then another message: most submit a request that fits, or act on one of them."""
    if chance.random() < 0.15:
        return msgspec.msgpack.encode(value_of(offline.ToFront, chance))
    command = value_of(Command, chance) | {"epoch": "epoch", "verb": _verb(chance), "dry_run": chance.random() < 0.1}
    if chance.random() < 0.8:
        command.pop("if_rev", None)
    return msgspec.msgpack.encode(command)


def _verb(chance: Random) -> Any:
    draw = chance.random()
    if draw < 0.5:
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 40))]
        sampling = {"max_tokens": chance.randint(1, 20), "n": chance.choice([1, 1, 1, 3])}
        sampling |= chance.choice(
            [{}, {"temperature": 0.0}, {"logprobs": 2}, {"ignore_eos": True}, {"seed": 7}, ADJUSTED]
        )
        name = {"request": chance.choice(TEXTS)} if chance.random() < 0.7 else {}
        return {"type": "submit", "prompt_token_ids": prompt, "sampling": sampling, **name}
    verb = value_of(chance.choice([RequestVerb, RequestVerb, RequestVerb, Many, Verb]), chance)
    rare = verb["type"] == Stop.__struct_config__.tag and chance.random() < 0.9
    return {"type": "resume"} if rare else verb


class CoreCommands:
    """Feeds messages to one `CoreWorld` after the other; an exception or a broken invariant leaves `take`."""

    def __init__(self) -> None:
        self._codec = frames.Codec(offline.ToFront)
        self._count = 0
        self._world = CoreWorld(serve=False)

    def take(self, data: bytes) -> None:
        """Decode one input and let the core act on it. Raises ProtocolError, and what a defect raises."""
        message = self._codec.decode(data)
        if self._count % INPUTS_MOST == 0 or self._world.engine.health.leaving:
            self._world = CoreWorld(max_num_seqs=4)
        self._count += 1
        try:
            self._act(message)
        except BaseException:
            self._count = 0
            raise

    def _act(self, message: object) -> None:
        world = self._world
        engine = world.engine
        match message:
            case Command(verb=SetCheck(check="shadow")):
                return  # It starts a process, which has tests of its own.
            case Command():
                # An id is carried out once.
                engine.commands.handle(b"c", msgspec.structs.replace(message, id=f"c{self._count}"))
            case Fetch() | ReadOutput():
                engine.outputs.fetch(b"c", message)
            case Inspect():
                engine.details.answer(message)
            case offline.AddMany():
                engine.offline.add_many(b"c", message)
            case offline.Follow():
                engine.outputs.follow(b"c", message)
            case offline.AbortMany():
                engine.requests.abort_many(message.requests)
            case offline.EndSamples():
                engine.requests.end_samples(message.samples, message.numbers)
            case offline.ForgetMany():
                engine.outputs.forget(message.requests)
        world.now += 0.01
        engine.advance()
        for _ in range(3):
            if world.steps:
                world.retire()
        if world.changing is not None and self._count % 3 == 0:
            world.answer()
        engine.outputs.serve_waiters()
        if self._count % 20 == 0:
            engine.reporter.build(0)
            if engine.health.serving is not None and not world.steps:
                world.check()
        world.answers.clear()
        world.events.clear()
