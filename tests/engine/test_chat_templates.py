"""A bad chat template is one refused chat, and the core goes on."""

from __future__ import annotations

import os
import signal
import time

import pytest
from chat_world import ChatWorld, renderers
from core_world import CoreWorld
from engines import wait_until
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common import template_process
from ppengine.common.config import profiles_dir
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.control import Accepted, Deferred, Outcome, Refused
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.reports import ProcessInfo, ProcessReport
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Drain, RestartStage, Submit

GOOD = "{{ messages[0]['content'] }}!"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MIXED = (
    "{% set text = messages[0]['content'] %}"
    "{% if text == 'loop' %}" + LOOP + "{% endif %}"
    "{% if text == 'power' %}{{ (text | length) ** (10 ** 9) }}{% endif %}"
    "{% if text == 'memory' %}{{ text * 10**9 }}{% endif %}"
    "{% if text == 'output' %}{{ text * 10**7 }}{% endif %}"
    "{% if text == 'raise' %}{{ raise_exception('no\x1b[2J') }}{% endif %}{{ text }}!"
)
"""A template of which the prompt decides what it does."""


@pytest.fixture
def world(request, tmp_path, monkeypatch):
    """A core whose template is the test's parameter. One that loops is ended after a second."""
    monkeypatch.setattr(template_process, "CPU_S", 1)
    monkeypatch.setattr(template_process, "RENDER_S", 60.0)  # The machine may be busy.
    made = ChatWorld(tmp_path, getattr(request, "param", MIXED))
    yield made
    made.close()
    wait_until(lambda: not renderers(), "the process of chat templates has ended")


def tokens_of(text):
    return [ord(letter) % 100 for letter in text]


def ends_of(world):
    """Return the events about ends of the process."""
    return [event.text for event in world.events if event.kind == "templates.ended"]


def serves(world):
    """Check that the core still writes."""
    name = world.submit(max_tokens=3)[0].request
    world.run()
    assert len(world.tokens(name)) == 3


def test_a_chat_is_queued_by_the_tokens_of_its_template(world):
    name = world.chat("hi")
    assert [type(answer) for answer in world.answers_to(name)] == [Accepted], "the core does not wait for the process"
    end = world.end_of(name)
    assert (end.state, end.text) == ("applied", "3 prompt tokens queued")
    assert world.engine.outputs.get(end.request).prompt_ids.tolist() == tokens_of("hi!"), (
        "no token of its own before the text"
    )
    world.run()
    assert len(world.tokens(end.request)) == 2
    first = renderers()
    assert world.end_of(world.chat("again")).state == "applied"
    assert renderers() == first and len(first) == 1, "one process serves many chats"


BAD = {
    "loops": ("{% for a in [1] %}" * 21 + "x" + "{% endfor %}" * 21, "SyntaxError: too many statically nested blocks"),
    "ifs": ("{% if 1 %}" * 101 + "x" + "{% endif %}" * 101, "IndentationError: too many levels of indentation"),
    "brackets": ("{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}", "RecursionError: "),
    "jinja": ("a\n{% for %}", "line 2: "),
    "unknown": ("{{ nothing.more }}", "'nothing' is undefined"),
    "sandbox": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "access to attribute '__class__'"),
    "type": ("{{ 1 + 'a' }}", "TypeError: unsupported operand"),
    "memory": ("{{ 'x' * 10**10 }}", "it needs more memory than its process may take"),
    "doubled": ("{% set n = namespace(t='x') %}{% for a in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
                "it needs more memory than its process may take"),
    "escapes": ("{{ raise_exception('\\x1b[2J\\x07 no\\n\\u202eevil') }}", "\\x1b[2J\\x07 no \\u202eevil"),
    "long": ("{{ raise_exception(('\\x1b' ~ messages[0]['content'][:0]) * 10**7) }}", "\\x1b" * 70),
    "half": ("{{ '\\ud800' }}", "UnicodeEncodeError: "),
}  # fmt: skip


@pytest.mark.parametrize(("world", "text"), BAD.values(), ids=BAD, indirect=["world"])
def test_a_bad_template_refuses_its_chat_and_nothing_else(world, text):
    name = world.chat("hi")
    end = world.end_of(name)
    assert isinstance(end, Refused) and end.code == "INVALID", end
    assert end.text.startswith(f"chat template: {text}"), end.text
    assert len(end.text) <= 300 and end.text.isprintable()
    assert [info.state for info in world.engine.operations.infos()][:1] == ["failed"]
    serves(world)
    assert world.end_of(world.chat("hi")).text == end.text, "the next chat has the same end"


@pytest.mark.parametrize(
    "world",
    [
        "{{ messages[0]['content'] * 10**8 }}",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 65 }}",
    ],
    indirect=True, ids=["one", "many", "next"],
)  # fmt: skip
def test_a_text_that_cannot_fit_is_refused_in_its_process(world):
    end = world.end_of(world.chat("hi"))
    assert (end.code, end.text) == (
        "DOES_NOT_FIT", "chat template: its text has more than 64 characters; at most 64 would fit"
    )  # fmt: skip
    serves(world)


@pytest.mark.parametrize(
    ("world", "text"),
    [
        (None, "this model has no chat template; send the prompt as plain text"),
        (b"\xff\xfe", "chat_template.jinja: 'utf-8' codec can't decode byte 0xff"),
    ],
    indirect=["world"],
)
def test_a_template_that_cannot_be_read_refuses_chats(world, text):
    end = world.end_of(world.chat("hi"))
    assert isinstance(end, Refused) and text in end.text
    serves(world)


def test_a_chat_that_ends_two_processes_is_refused_alone(world, monkeypatch):
    monkeypatch.setattr(template_process, "CPU_S", 60)  # Each is killed, however late.
    bad, good = world.chat("loop"), world.chat("hi")
    for _ in range(2):
        world.until(lambda: renderers() and world.engine.templates._ready, "a process has the chat")
        pid = renderers()[0]
        os.kill(pid, signal.SIGKILL)
        world.until(lambda pid=pid: world.engine.templates._child.pid != pid, "another process has its place")
    assert world.end_of(bad).text == "chat template: its process has ended: killed by SIGKILL"
    assert [text.partition("; ")[2] for text in ends_of(world)] == [
        "another one renders its chat",
        "its chat is refused",
    ]
    assert world.end_of(good).state == "applied"


@pytest.mark.parametrize("idle", [True, False])
def test_a_process_that_is_killed_by_others_refuses_nothing(world, idle):
    assert world.end_of(world.chat("one")).state == "applied"
    pid = renderers()[0]
    os.kill(pid, signal.SIGKILL if idle else signal.SIGSTOP)
    name = world.chat("two")
    os.kill(pid, signal.SIGKILL)
    assert world.end_of(name).state == "applied"
    assert len(world.processes) == 2
    assert [
        text.startswith(f"the process of chat templates (pid {pid}) has ended, killed by SIGKILL; ")
        for text in ends_of(world)
    ] == [True]


@pytest.mark.parametrize("ready", [False, True])
def test_a_chat_that_no_message_has_is_refused_alone(world, ready):
    if ready:
        world.end_of(world.chat("hi"))
    deep = {}
    for _ in range(100_000):  # CPython's own limit is 1,000 levels, or since 3.12 some 10,000
        deep = {"a": deep}
    ends, world.now = [], time.monotonic()
    for options in ({"number": 2**70}, {"deep": deep}, {}, {"number": -(2**70)}, {}):
        chat = Chat(messages=[{"role": "user", "content": "yes"}], options=options)
        world.engine.templates.render(chat, 64, ends.append)
    world.until(lambda: len(ends) == 5, "all have their end", 20)
    assert [end.text for end in ends] == ["", "", "yes!", "", "yes!"]
    assert [bool(end.error) for end in ends] == [True, True, False, True, False]
    assert all(end.error.startswith("chat template: ") for end in ends if end.error)
    assert len(world.processes) == 1, "its process goes on"
    serves(world)


def test_the_end_of_an_idle_process_is_an_event(world):
    world.end_of(world.chat("one"))
    os.kill(renderers()[0], signal.SIGKILL)
    world.until(lambda: ends_of(world), "the end is noticed", 10.0)
    assert ends_of(world)[0].endswith("has ended, killed by SIGKILL; the next chat starts another one")


def test_a_stopped_process_is_replaced_at_the_deadline(world, monkeypatch):
    world.end_of(world.chat("one"))
    os.kill(renderers()[0], signal.SIGSTOP)
    with monkeypatch.context() as shorter:
        shorter.setattr(template_process, "RENDER_S", 1.0)
        assert world.end_of(world.chat("two")).text == "chat template: it runs longer than 1 s"
    assert world.end_of(world.chat("three")).state == "applied"


def test_a_process_that_cannot_start_refuses_each_chat(world, monkeypatch):
    monkeypatch.setattr(template_process, "MODULE", "ppengine.there_is_none")
    ends = [world.end_of(name) for name in [world.chat("a"), world.chat("b")]]
    assert all(end.text.startswith("chat template: its process has ended: ") for end in ends)
    assert "ppengine.there_is_none" in ends[0].text
    serves(world)


def test_a_host_without_room_for_a_process_refuses_each_chat(world, monkeypatch):
    def spawn(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(template_process, "spawn", spawn)
    for name in [world.chat("a"), world.chat("b")]:
        assert world.end_of(name).text == (
            "chat template: its process cannot start: [Errno 24] Too many open files"
        )  # fmt: skip
    serves(world)
    monkeypatch.undo()
    assert world.end_of(world.chat("c")).state == "applied"


def test_a_process_that_never_starts_is_given_up(world, monkeypatch):
    monkeypatch.setattr(template_process, "START_S", 0.0)
    assert world.end_of(world.chat("a")).text == "chat template: its process has not started within 0 s"


def test_of_a_hundred_chats_ten_are_bad_and_ninety_run(world):
    bad = ["loop", "memory", "output", "raise", "memory", "power", "output", "raise", "memory", "output"]
    texts = [bad[number // 10] if number % 10 == 5 else f"chat {number}" for number in range(100)]
    names = [world.chat(text) for text in texts]
    world.until(lambda: all(map(world.over, names)), "all chats end", 100.0)
    for name, text in zip(names, texts, strict=True):
        end = world.last(name)
        if text in bad:
            assert isinstance(end, Refused), text
            # Such a chat takes some seconds of a core, so these two alone check its limit.
            slow = end.text == "chat template: it takes more than 1 s of processor time"
            assert slow == (text in ("loop", "power")), end
        else:
            assert isinstance(end, Outcome) and end.state == "applied", end
            assert world.engine.outputs.get(end.request).prompt_ids.tolist() == tokens_of(f"{text}!")
    assert sum(isinstance(world.last(name), Refused) for name in names) == 10
    assert len(world.processes) == 3, "two were ended, for they took too long"


def stop_process(world):
    """Stop the process, which has served a chat; it costs no core as one that loops would."""
    world.end_of(world.chat("one"))
    (pid,) = renderers()
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_the_core_goes_on_and_shows_the_wait_while_a_chat_is_with_its_process(world):
    pid = stop_process(world)
    name, longest, deferred = world.chat("hi"), 0.0, False
    while not world.over(name):
        began = time.thread_time()
        world.turn()
        longest = max(longest, time.thread_time() - began)
        if Deferred in [type(answer) for answer in world.answers_to(name)] and not deferred:
            deferred = True
            operation = world.engine.reporter.build().operations[0]
            assert (operation.verb, operation.state) == ("submit", "deferred")
            assert operation.progress == "waits for its chat template"
            serves(world)
            os.kill(pid, signal.SIGCONT)
    assert [type(answer) for answer in world.answers_to(name)] == [Accepted, Deferred, Outcome], "one progress, one end"
    assert longest < 0.5


def test_a_dry_run_renders_and_queues_nothing(world):
    end = world.end_of(world.chat("hi", dry_run=True))
    assert (end.state, end.text) == ("planned", "queue 1 sample(s) of 3 prompt tokens")
    assert isinstance(world.end_of(world.chat("output", dry_run=True)), Refused)
    assert world.engine.requests.live() == []


def test_what_has_changed_meanwhile_counts(world):
    name = world.chat("hi")
    world.say(Drain())
    end = world.end_of(name)
    assert isinstance(end, Refused) and end.code == "BUSY" and "draining" in end.text


def test_a_chat_that_was_reported_as_failed_is_not_queued(tmp_path):
    """Serving was blocked, so all operations ended; the stages were back before the chat was rendered."""
    world = ChatWorld(tmp_path, GOOD, restart="never")
    try:
        name = world.chat("hi")
        ended = ProcessInfo(role="stage", stage=1, rank=0, pid=1, exit_code=-9, detail="killed", generation=1)
        world.engine.on_processes(ProcessReport(mono_ns=0, processes=[ended]))
        world.engine.advance()
        assert world.last(name).state == "failed"
        world.say(RestartStage(stage=1))
        world.engine.advance()
        world.steps.clear()
        world.drained(0, 1)
        world.ready()
        world.run()
        assert world.engine.health.state == "serving"
        world.until(lambda: world.engine.templates._chat is None, "the chat is rendered")
        assert not world.engine.requests.live() and not list(world.engine.outputs) and world.over(name)
        assert world.end_of(world.chat("again")).state == "applied"
    finally:
        world.close()


def test_too_many_waiting_chats_are_refused_at_once(world, monkeypatch):
    monkeypatch.setattr(template_process, "WAITING_MOST", 2)
    names = [world.chat(f"{number}") for number in range(4)]
    assert (world.last(names[3]).code, world.last(names[3]).text) == (
        "BUSY", "2 chats wait for the chat template; submit it again later"
    )  # fmt: skip
    assert [world.end_of(name).state for name in names[:3]] == ["applied"] * 3


def test_a_core_that_leaves_answers_the_chats_that_wait(world):
    names = [world.chat("loop"), world.chat("hi")]
    world.engine.templates.close()
    assert [world.last(name).text for name in names] == ["the engine stops"] * 2


def test_answers_of_an_earlier_process_and_of_no_protocol_are_dropped(world):
    pid, name = stop_process(world), world.chat("hi")
    number = world.engine.templates._chat.message.number
    world.engine.templates.take(b"t0", template_process.Rendered(number=number, text="forged"))
    world.engine.templates.take(b"t0", template_process.RendererReady())
    assert not world.over(name)
    os.kill(pid, signal.SIGCONT)
    end = world.end_of(name)
    assert world.engine.outputs.get(end.request).prompt_ids.tolist() == tokens_of("hi!")


@pytest.mark.parametrize(
    ("verb", "field"),
    [
        (Submit(prompt="hi"), "prompt"),
        (Submit(prompt="hi", chat=True), "prompt"),
        (Submit(prompt_token_ids=[1], sampling=SamplingParams(stop=["x"])), "stop"),
        (Submit(prompt_token_ids=[1], sampling=SamplingParams(bad_words=["x"])), "bad_words"),
    ],
)
def test_a_session_has_no_texts(verb, field):
    """Programs make their tokens and texts themselves."""
    world = CoreWorld(tokenizer=Tokenizer.load(profiles_dir() / "models" / "tiny"))
    good = Submit(prompt_token_ids=[1])
    world.engine.offline.add_many(b"c", AddMany(nonce=1, session="s", submissions=[good, verb], first=4))
    error = f"prompt 5: {field} is a text; a session has token ids alone"
    assert world.answers[-1][1] == Added(nonce=1, requests=[], error=error)
    assert not world.engine.requests.live()


def test_a_chat_that_cannot_fit_or_has_no_tokenizer_is_refused_before_it_is_rendered(world):
    assert world.last(world.chat("x" * 65)).code == "DOES_NOT_FIT"
    assert renderers() == []
    refused = CoreWorld().say(Submit(prompt="hi", chat=True))[0]
    assert refused.text == "this engine was started without a tokenizer: give prompt_token_ids"
