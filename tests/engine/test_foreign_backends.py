"""Backends of other packages that are wrong: each mistake is an error with its method, and the store goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from ppengine.protocol.store_messages import BackendFigures, Done, Find, Found, Put
from ppengine.protocol.store_messages import Test as Trial
from ppengine.store.backend import Usage
from ppengine.store.checked_backend import THREADS_MOST
from store_world import KEY, FakeBackend, World, fetch, put


def leave(*_: object) -> None:
    """Do as a package that ends its process."""
    sys.exit(3)


def mistake(*_: object) -> None:
    """Do as a package that needs a variable of the environment."""
    raise KeyError("NO_SUCH_VARIABLE")


def world_with(**methods: Any) -> tuple[World, FakeBackend]:
    """Return a store whose one backend has other methods."""
    backend = FakeBackend()
    for name, value in methods.items():
        setattr(backend, name, value)
    return World(lambda kind: backend).ready(), backend


def figures(world: World) -> BackendFigures:
    """Return the figures, as they come to the core."""
    message = world.store.figures()
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message)).backends[0]


@pytest.mark.parametrize("answer", [None, 5, Usage(1.5), Usage("many"), Usage(2**70), Usage(-2), Usage(1, None)])  # type: ignore[arg-type]
def test_a_usage_that_is_none_is_unknown_and_named(answer: object) -> None:
    world, _ = world_with(usage=lambda: answer)
    world.pass_s(3.0)
    world.work()
    found = figures(world)
    assert found.used_bytes == -1
    assert found.error.startswith("usage of FakeBackend returned ")
    assert put(world).error == "", "the store goes on"
    world.close()


@pytest.mark.parametrize("answer", [None, [], [True, False], 1])
def test_a_find_with_another_number_of_answers_is_a_failure(answer: object) -> None:
    world, _ = world_with(find=lambda keys: answer)
    found = world.ask(Find(1, [KEY], 1000))
    assert isinstance(found, Found)
    assert found.error.startswith("find of FakeBackend returned ")
    assert found.error.endswith("right is a list of 1 answer, one a key")
    assert figures(world).errors == 1
    world.close()


@pytest.mark.parametrize("answer", [None, -1, 2**80, "4096"])
def test_a_read_without_a_length_is_a_failure(answer: object) -> None:
    world, backend = world_with()
    stored = put(world)
    backend.read = lambda key, into: answer  # type: ignore[assignment,method-assign,return-value]
    fetched = world.ask(fetch(2, [KEY], [[4, 5]], [stored.sum]))
    assert fetched.error.startswith("read of FakeBackend returned ")  # type: ignore[attr-defined]
    assert (figures(world).errors, figures(world).corrupt) == (1, 0)
    world.close()


@pytest.mark.parametrize(
    ("fault", "text"),
    [(mistake, "write of FakeBackend raised KeyError: 'NO_SUCH_VARIABLE'"),
     (leave, "write of FakeBackend raised SystemExit: 3")],
)  # fmt: skip
def test_writes_that_raise_what_no_backend_raises_open_the_breaker(fault: Callable[..., None], text: str) -> None:
    world, _ = world_with(write=fault)
    errors = [world.ask(Put(job, 1, "m", KEY, [0, 1], 1000)).error for job in range(1, 6)]  # type: ignore[attr-defined]
    assert errors == [text] * 5
    assert (figures(world).errors, figures(world).write_breaker) == (5, "open")
    world.close()


@pytest.mark.parametrize("threads", [0, -1, "4", None, True, THREADS_MOST + 1])
def test_a_number_of_threads_that_is_none_keeps_it_closed(threads: object) -> None:
    world, backend = world_with(threads=threads)
    assert (figures(world).state, backend.opened) == ("broken", 0)
    right = f"it must be a whole number, 1 to {THREADS_MOST}"
    assert figures(world).error == f"threads of FakeBackend is {threads!r}; {right}"
    world.close()


def test_an_open_that_leaves_the_process_is_a_failure() -> None:
    world, _ = world_with(open=leave)
    assert (figures(world).state, figures(world).error) == ("broken", "open of FakeBackend raised SystemExit: 3")
    world.close()


def test_an_open_that_does_not_return_is_named() -> None:
    seen: list[tuple[str, str]] = []
    refused: list[str] = []
    world = World(lambda kind: backend)

    def hang(call: str) -> None:
        """Look at the figures from within `open`, while its time goes by."""
        if call != "open" or seen:
            return
        (lane,) = world.lanes
        seen.append((lane.figures().state, lane.figures().error))
        world.now += 25.0
        seen.append((lane.figures().state, lane.figures().error))
        refused.append(lane.not_open())

    backend = FakeBackend(hang)
    world.ready()
    why = "its open has not returned in 20 s"
    assert seen == [("opening", ""), ("broken", why)]
    assert refused == [f"m cannot be opened: {why}"]
    assert figures(world).state == "open", "it has returned since"
    world.close()


def test_a_test_names_the_call_that_takes_its_time() -> None:
    world, backend = world_with()
    answers: list[Any] = []

    def hang(call: str) -> None:
        if call == "find":
            backend.fault = lambda call: None
            world.pass_s(10.0)
            answers.extend(world.sent)

    backend.fault = hang
    world.store.take(Trial(1, "m"))
    world.work()
    assert [each.error for each in answers] == ["the find of the object has not ended in 7000 ms"]
    world.close()


def test_an_object_that_a_test_does_not_find_is_no_corrupt_shard() -> None:
    world, _ = world_with(find=lambda keys: [False] * len(keys))
    done = world.ask(Trial(1, "m"))
    assert isinstance(done, Done)
    assert done.error == "the object is not found after its write"
    assert (figures(world).corrupt, figures(world).errors) == (0, 1)
    world.close()


def lose_a_byte(backend: FakeBackend) -> dict[str, Any]:
    """Return a read that returns one byte less."""
    whole = backend.read
    return {"read": lambda key, into: whole(key, into) - 1}


def flip(backend: FakeBackend) -> dict[str, Any]:
    """Return a read that flips a bit."""
    whole = backend.read

    def read(key: str, into: memoryview) -> int:
        length = whole(key, into)
        into[7] ^= 1
        return length

    return {"read": read}


@pytest.mark.parametrize(
    ("wrong", "text", "corrupt"),
    [
        (lambda backend: {"find": lambda keys: [True] * len(keys)}, "an object is found that was never written", 0),
        (lambda backend: {"delete": lambda keys: None}, "the object is found after its delete", 0),
        (lose_a_byte, "the object has 4194304 bytes, and its read returned 4194303", 1),
        (flip, "the object came back with other bytes", 1),
    ],
)
def test_a_test_names_the_rule_that_a_backend_breaks(
    wrong: Callable[[FakeBackend], dict[str, Any]], text: str, corrupt: int
) -> None:
    world, backend = world_with()
    for name, method in wrong(backend).items():
        setattr(backend, name, method)
    done = world.ask(Trial(1, "m"))
    assert isinstance(done, Done)
    assert (done.error, figures(world).corrupt) == (text, corrupt)
    world.close()


def test_a_test_behind_calls_that_hang_names_their_number() -> None:
    world, backend = world_with()
    sent: list[Any] = []

    def hang(call: str) -> None:
        backend.fault = lambda call: None
        world.store.take(Trial(2, "m"))
        world.pass_s(0.9)
        world.store.tick()
        world.pass_s(6.5)
        sent.extend(each for each in world.sent if isinstance(each, Done))

    backend.fault = hang
    world.store.take(Put(1, 1, "m", KEY, [0, 1], 60_000))
    world.step()
    assert [each.error for each in sent] == ["no thread of m was free in 7000 ms, behind 1 call"]
    world.work()
    world.close()
