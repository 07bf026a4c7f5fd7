"""Long texts are tokenized in the process of chat templates, short ones in the core."""

from __future__ import annotations

import os
import signal
import time

import pytest
from chat_world import ChatWorld, renderers
from engines import wait_until
from ppengine.common import template_process
from ppengine.core import submission_steps, submissions
from ppengine.protocol.control import Accepted, Refused
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

LONG = "a text of some length"
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=2)


def write_tokenizer(folder):
    """Write a tokenizer whose ids are not those that the core's own would give."""
    made = Tokenizer(models.WordLevel({chr(code): code - 31 for code in range(32, 127)} | {"?": 96}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.add_special_tokens(["<s>"])
    begin = made.token_to_id("<s>")
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    made.save(str(folder / "tokenizer.json"))
    return begin


def ids_of(text):
    return [ord(letter) - 31 if letter != "?" else 96 for letter in text]


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "INLINE_CHARACTERS", 8)
    monkeypatch.setattr(submission_steps, "INLINE_CHARACTERS", 8)
    made = ChatWorld(tmp_path, "{{ messages[0]['content'] }}!")
    made.begin = write_tokenizer(tmp_path)
    yield made
    made.close()
    wait_until(lambda: not renderers(), "the process has ended")


def submit(world, text, **fields):
    world.now = time.monotonic()
    world.say(Submit(prompt=text, sampling=SAMPLING, **fields))
    return f"c{world._count}"


def prompt_of(world, name):
    end = world.end_of(name)
    assert end.state == "applied", end
    return world.engine.outputs.get(end.request).prompt_ids.tolist()


def test_a_long_prompt_comes_back_as_tokens_and_a_short_one_never_leaves(world):
    assert prompt_of(world, submit(world, "short")) == [1, *(ord(letter) % 100 for letter in "short")]
    assert renderers() == []
    name = submit(world, LONG)
    assert [type(answer) for answer in world.answers_to(name)] == [Accepted], "the core does not wait"
    assert prompt_of(world, name) == [world.begin, *ids_of(LONG)]


def test_a_long_chat_has_the_special_tokens_of_its_template_alone(world):
    assert prompt_of(world, submit(world, LONG, chat=True)) == ids_of(f"{LONG}!")


def test_a_dry_run_counts_the_tokens(world):
    world.now = time.monotonic()
    world.say(Submit(prompt=LONG, sampling=SAMPLING), dry_run=True)
    end = world.end_of(f"c{world._count}")
    assert end.text == f"queue 1 sample(s) of {1 + len(LONG)} prompt tokens"


def test_a_process_that_is_killed_loses_no_prompt(world):
    prompt_of(world, submit(world, LONG))
    pid = renderers()[0]
    os.kill(pid, signal.SIGSTOP)
    name = submit(world, LONG)
    os.kill(pid, signal.SIGKILL)
    assert prompt_of(world, name) == [world.begin, *ids_of(LONG)]


def test_a_prompt_that_cannot_be_tokenized_is_refused_in_one_line(world, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    end = world.end_of(submit(world, LONG))
    assert isinstance(end, Refused) and "tokenizer.json" in end.text and "\n" not in end.text
    assert world.last(submit(world, "x" * 65)).code == "DOES_NOT_FIT", "refused before it is sent"


def test_too_much_text_is_refused_at_once(world, monkeypatch):
    monkeypatch.setattr(template_process, "WAITING_CHARACTERS", 30)
    names = [submit(world, LONG) for _ in range(4)]
    assert world.last(names[3]).code == "BUSY" and "wait for the tokenizer" in world.last(names[3]).text
    assert len(prompt_of(world, names[2])) == 1 + len(LONG)
