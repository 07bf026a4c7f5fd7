"""Long texts are tokenized in the process of chat templates, short ones in that of texts."""

from __future__ import annotations

import os
import signal

import chat_world
import pytest
from chat_world import ChatWorld, renderers
from engines import wait_until
from ppengine.common import template_process
from ppengine.texts import submission_encoder
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

LONG = "a text of some length"


def write_tokenizer(folder):
    """Write a tokenizer whose ids are not those that those of `Letters` are."""
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
    monkeypatch.setattr(submission_encoder, "INLINE_CHARACTERS", 8)
    made = ChatWorld(tmp_path, "{{ messages[0]['content'] }}!")
    made.begin = write_tokenizer(tmp_path)
    yield made
    made.close()
    wait_until(lambda: not renderers(), "the process has ended")


def test_a_long_prompt_comes_back_as_tokens_and_a_short_one_never_leaves(world):
    assert world.ids_of(world.text("short")) == [1, *(ord(letter) % 100 for letter in "short")]
    assert renderers() == []
    name = world.text(LONG)
    assert not world.over(name), "the encoder does not wait"
    assert world.ids_of(name) == [world.begin, *ids_of(LONG)]


def test_a_long_chat_has_the_special_tokens_of_its_template_alone(world):
    assert world.ids_of(world.text(LONG, chat=True)) == ids_of(f"{LONG}!")


def test_a_process_that_is_killed_loses_no_prompt(world):
    world.ids_of(world.text(LONG))
    pid = renderers()[0]
    os.kill(pid, signal.SIGSTOP)
    name = world.text(LONG)
    os.kill(pid, signal.SIGKILL)
    assert world.ids_of(name) == [world.begin, *ids_of(LONG)]


def test_a_prompt_that_cannot_be_tokenized_is_refused_in_one_line(world, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    end = world.end_of(world.text(LONG))
    assert end.submit is None and "tokenizer.json" in end.error and "\n" not in end.error
    assert world.last(world.text("x" * 65)).code == "DOES_NOT_FIT", "refused before it is sent"


@pytest.mark.parametrize("chat", [False, True])
def test_too_much_text_is_refused_at_once(world, monkeypatch, chat):
    monkeypatch.setattr(template_process, "WAITING_CHARACTERS", 30)
    names = [world.text(LONG, chat=chat) for _ in range(4)]
    assert world.last(names[3]).code == "BUSY" and "wait for the tokenizer" in world.last(names[3]).error
    assert len(world.ids_of(names[2])) == 1 + len(LONG)


def test_a_long_prompt_that_cannot_fit_is_refused_without_its_tokens(world):
    """The answer with them may be larger than a message: the gateway would never get it, and ask again for ever."""
    text = "x" * (chat_world.MAX_MODEL_LEN - 2)
    assert len(world.ids_of(world.text(text))) == chat_world.MAX_MODEL_LEN - 1
    for chat in (False, True):
        end = world.end_of(world.text(text + "x", chat=chat))
        assert end.submit is None and end.code == "DOES_NOT_FIT"
        assert end.error == "the prompt has 64 tokens, max_model_len is 64; at most 63 would fit"
