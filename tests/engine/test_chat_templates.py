"""A bad chat template is one refused chat, and other texts get their tokens."""

from __future__ import annotations

import os
import signal

import pytest
from chat_world import ChatWorld, renderers
from core_world import CoreWorld
from engines import wait_until
from ppengine.common import helper_child, template_process
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.offline import Added, AddMany
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.text_messages import Encode
from ppengine.protocol.verbs import Submit

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
    return [text for kind, text in world.events if kind == "templates.ended"]


def serves(world):
    """Check that other texts still get their tokens, at once."""
    name = world.text("abc")
    assert world.last(name).submit.prompt_token_ids == [1, *tokens_of("abc")]


def test_a_chat_gets_the_tokens_of_its_template(world):
    name = world.chat("hi")
    assert not world.over(name), "the encoder does not wait for the process"
    assert world.ids_of(name) == tokens_of("hi!"), "no token of its own before the text"
    first = renderers()
    assert world.ids_of(world.chat("again")) == tokens_of("again!")
    assert renderers() == first and len(first) == 1, "one process serves many chats"


def test_a_submission_that_is_sent_again_is_answered_once(world):
    submit = Submit(prompt="hi", chat=True)
    for _ in range(3):
        world.encoder.take(Encode(id="c", submit=submit))
    world.ids_of("c")
    world.ids_of(world.chat("another"))
    assert world.over("c")


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
    "no text": ("{{ raise_exception(5) }}", "5"),
    "encoder": ("{{ 5 | tojson(cls=namespace, encode=raise_exception) }}", "TypeError: "),
    "default": ("{{ raise_exception | tojson(default=raise_exception) }}", "TypeError: "),
    "half": ("{{ '\\ud800' }}", "UnicodeEncodeError: "),
}  # fmt: skip


@pytest.mark.parametrize(("world", "text"), BAD.values(), ids=BAD, indirect=["world"])
def test_a_bad_template_refuses_its_chat_and_nothing_else(world, text):
    name = world.chat("hi")
    end = world.end_of(name)
    assert end.submit is None and end.code == "INVALID", end
    assert end.error.startswith(f"chat template: {text}"), end.error
    assert len(end.error) <= 300 and end.error.isprintable()
    serves(world)
    assert world.end_of(world.chat("hi")).error == end.error, "the next chat has the same end"


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
    assert (end.code, end.error) == (
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
    assert end.submit is None and text in end.error
    serves(world)


def test_a_chat_that_ends_two_processes_is_refused_alone(world, monkeypatch):
    monkeypatch.setattr(template_process, "CPU_S", 60)  # Each is killed, however late.
    bad, good = world.chat("loop"), world.chat("hi")
    for _ in range(2):
        world.until(lambda: renderers() and world.templates.child.ready, "a process has the chat")
        pid = renderers()[0]
        os.kill(pid, signal.SIGKILL)
        world.until(lambda pid=pid: world.templates.child.process.pid != pid, "another process has its place")
    assert world.end_of(bad).error == "chat template: its process has ended: killed by SIGKILL"
    assert [text.partition("; ")[2] for text in ends_of(world)] == [
        "another one renders its chat",
        "its chat is refused",
    ]
    assert world.ids_of(good)


@pytest.mark.parametrize("idle", [True, False])
def test_a_process_that_is_killed_by_others_refuses_nothing(world, idle):
    assert world.ids_of(world.chat("one"))
    pid = renderers()[0]
    os.kill(pid, signal.SIGKILL if idle else signal.SIGSTOP)
    name = world.chat("two")
    os.kill(pid, signal.SIGKILL)
    assert world.ids_of(name)
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
    ends = []
    for options in ({"number": 2**70}, {"deep": deep}, {}, {"number": -(2**70)}, {}):
        chat = Chat(messages=[{"role": "user", "content": "yes"}], options=options)
        world.templates.render(chat, 64, ends.append)
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
        assert world.end_of(world.chat("two")).error == "chat template: it runs longer than 1 s"
    assert world.ids_of(world.chat("three"))


def test_a_process_that_cannot_start_refuses_each_chat(world, monkeypatch):
    monkeypatch.setattr(template_process, "MODULE", "ppengine.there_is_none")
    ends = [world.end_of(name) for name in [world.chat("a"), world.chat("b")]]
    assert all(end.error.startswith("chat template: its process has ended: ") for end in ends)
    assert "ppengine.there_is_none" in ends[0].error
    serves(world)


def test_a_host_without_room_for_a_process_refuses_each_chat(world, monkeypatch):
    def spawn(*_, **__):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(helper_child, "spawn", spawn)
    for name in [world.chat("a"), world.chat("b")]:
        assert world.end_of(name).error == (
            "chat template: its process cannot start: [Errno 24] Too many open files"
        )  # fmt: skip
    serves(world)
    monkeypatch.undo()
    assert world.ids_of(world.chat("c"))


def test_a_process_that_never_starts_is_given_up(world, monkeypatch):
    monkeypatch.setattr(template_process, "START_S", 0.0)
    assert world.end_of(world.chat("a")).error == "chat template: its process has not started within 0 s"


def test_of_a_hundred_chats_ten_are_bad_and_ninety_run(world):
    bad = ["loop", "memory", "output", "raise", "memory", "power", "output", "raise", "memory", "output"]
    texts = [bad[number // 10] if number % 10 == 5 else f"chat {number}" for number in range(100)]
    names = [world.chat(text) for text in texts]
    world.until(lambda: all(map(world.over, names)), "all chats end", 100.0)
    for name, text in zip(names, texts, strict=True):
        end = world.last(name)
        if text in bad:
            assert end.submit is None, text
            # Such a chat takes some seconds of a core, so these two alone check its limit.
            slow = end.error == "chat template: it takes more than 1 s of processor time"
            assert slow == (text in ("loop", "power")), end
        else:
            assert world.ids_of(name) == tokens_of(f"{text}!")
    assert sum(world.last(name).submit is None for name in names) == 10
    assert len(world.processes) == 3, "two were ended, for they took too long"


def stop_process(world):
    """Stop the process, which has served a chat; it costs no core as one that loops would."""
    world.end_of(world.chat("one"))
    (pid,) = renderers()
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_other_texts_get_their_tokens_while_a_chat_is_with_its_process(world):
    pid = stop_process(world)
    name = world.chat("hi")
    for _ in range(30):
        world.turn()
        serves(world)
    assert not world.over(name)
    os.kill(pid, signal.SIGCONT)
    assert world.ids_of(name) == tokens_of("hi!")


def test_too_many_waiting_chats_are_refused_at_once(world, monkeypatch):
    monkeypatch.setattr(template_process, "WAITING_MOST", 2)
    names = [world.chat(f"{number}") for number in range(4)]
    assert (world.last(names[3]).code, world.last(names[3]).error) == (
        "BUSY", "2 chats wait for the chat template; submit it again later"
    )  # fmt: skip
    assert all(world.ids_of(name) for name in names[:3])


def test_a_process_that_leaves_answers_the_chats_that_wait(world):
    names = [world.chat("loop"), world.chat("hi")]
    world.templates.close()
    assert [world.last(name).error for name in names] == ["the engine stops"] * 2


def test_answers_of_an_earlier_process_and_of_no_protocol_are_dropped(world):
    pid, name = stop_process(world), world.chat("hi")
    number = world.templates._chat.message.number
    world.templates.take(b"t0", template_process.Rendered(number=number, text="forged"))
    world.templates.take(b"t0", template_process.RendererReady())
    assert not world.over(name)
    os.kill(pid, signal.SIGCONT)
    assert world.ids_of(name) == tokens_of("hi!")


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
    world = CoreWorld(has_tokenizer=True)
    good = Submit(prompt_token_ids=[1])
    world.engine.offline.add_many(b"c", AddMany(nonce=1, session="s", submissions=[good, verb], first=4))
    error = f"prompt 5: {field} is a text; a session has token ids alone"
    assert world.answers[-1][1] == Added(nonce=1, requests=[], error=error)
    assert not world.engine.requests.live()


@pytest.mark.parametrize(
    ("verb", "field"),
    [
        (Submit(prompt="hi"), "prompt"),
        (Submit(prompt="hi", chat=True), "prompt"),
        (Submit(prompt_token_ids=[1], sampling=SamplingParams(bad_words=["x"])), "bad_words"),
    ],
)
def test_the_core_takes_no_texts_of_consoles_either(verb, field):
    """The gateway has their tokens made before."""
    world = CoreWorld(has_tokenizer=True)
    (refused,) = world.say(verb)
    assert (refused.code, refused.text) == ("INVALID", f"{field} is a text; the core has token ids alone")
    assert not world.engine.requests.live()


def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered(world):
    assert world.last(world.chat("x" * 65)).code == "DOES_NOT_FIT"
    assert renderers() == []


@pytest.mark.parametrize(
    ("submit", "error"),
    [
        (Submit(chat=True), "a chat is a prompt text, without prompt_token_ids"),
        (Submit(prompt="a", chat=True, prompt_token_ids=[1]), "a chat is a prompt text, without prompt_token_ids"),
        (Submit(prompt="a", prompt_token_ids=[1]), "give either a prompt text or prompt_token_ids"),
    ],
)
def test_a_text_beside_tokens_is_refused(world, submit, error):
    world.encoder.take(Encode(id="c", submit=submit))
    assert (world.last("c").code, world.last("c").error) == ("INVALID", error)


@pytest.mark.parametrize("chat", [False, True])
def test_a_text_at_which_the_tokenizer_fails_is_refused(world, chat):
    refused = world.end_of(world.text("a~b", chat=chat))
    assert refused.code == "INVALID" and refused.error == "a tilde has no token"
    assert world.end_of(world.text("ab", chat=chat)).submit is not None
