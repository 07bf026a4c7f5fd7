"""Chats of the offline API: the real process of chat templates, and what a program gives as messages."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chat_world import renderers
from engines import wait_until
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import build_profile, profiles_dir
from ppengine.offline import conversations
from ppengine.offline.conversations import ConversationRenderer, chats_of
from ppengine.offline.program_texts import ProgramTexts
from ppengine.supervisor.boot import engine_config
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

TINY = profiles_dir() / "models" / "tiny"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "Hi"}]
Rendering = Callable[..., list[Any]]


@pytest.fixture
def rendering(tmp_path: Path) -> Iterator[Rendering]:
    """Render conversations by a template, with one renderer for a test."""
    folder, run_dir = tmp_path / "model", tmp_path / "run"
    folder.mkdir()
    run_dir.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder)
    backend = Backend.from_file(str(TINY / "tokenizer.json"))
    first = "<|endoftext|>"
    backend.post_processor = TemplateProcessing(f"{first} $A", special_tokens=[(first, backend.token_to_id(first))])
    backend.save(str(folder / "tokenizer.json"))
    profile = build_profile({"name": "x", "model": {"path": str(folder), "load_format": "dummy"}}, tmp_path)
    config = msgspec.structs.replace(engine_config(profile, "x"), run_dir=str(run_dir))
    (run_dir / "engine.json").write_bytes(msgspec.json.encode(config))
    made, texts = ConversationRenderer(str(run_dir)), ProgramTexts(folder, 1024, absent=False)

    def render(template: str, messages: Any, tools: Any = None, begins: bool = True, **options: Any) -> list[Any]:
        (folder / "chat_template.jinja").write_text(template)
        chats = chats_of(messages, tools, add_generation_prompt=begins, options=options)
        return list(map(texts.chat_prompt, made.texts(chats)))

    yield render
    made.close()
    assert renderers() == []


def test_tools_and_options_reach_the_template_and_special_tokens_are_its_own(
    rendering: Rendering, tmp_path: Path
) -> None:
    template = (
        "<|user|>{{ messages[0]['content'] }}{% if tools %} {{ tools[0].function.name }}{% endif %}"
        "{{ mood }}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (plain,) = rendering(template, ASK)
    (full,) = rendering(template, ASK, [TOOL], begins=False, mood=" glad")
    assert plain["prompt"] == "<|user|>Hi<|assistant|>" and full["prompt"] == "<|user|>Hi weather glad"
    tokenizer = Tokenizer.load(TINY)
    assert Tokenizer.load(tmp_path / "model").encode("Hi") != tokenizer.encode_chat("Hi"), "prompts get another one"
    assert [one["prompt_token_ids"] for one in (plain, full)] == [
        tokenizer.encode_chat(one["prompt"]) for one in (plain, full)
    ]


def test_many_conversations_keep_their_order_in_small_portions(
    rendering: Rendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "WAITING_MOST", 5)
    texts = [f"story {number}" for number in range(13)]
    prompts = rendering("{{ messages[0]['content'] }}", [[{"role": "user", "content": text}] for text in texts])
    assert [one["prompt"] for one in prompts] == texts
    assert len({tuple(one["prompt_token_ids"]) for one in prompts}) == 13


def test_a_template_that_does_not_end_is_refused_by_its_conversation_and_the_next_call_goes_on(
    rendering: Rendering,
) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% if messages[0]['content'] == 'x' %}" + loops + "{% endif %}{{ messages[0]['content'] }}"
    bad = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=r"conversation 1: chat template: it takes more than 2 s of processor time"):
        rendering(template, [ASK, bad, ASK])
    assert [one["prompt"] for one in rendering(template, [ASK, ASK])] == ["Hi", "Hi"]


def test_a_refused_call_leaves_no_chats_to_the_next_one(rendering: Rendering) -> None:
    template = "{% if messages[0].content == 'x' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    with pytest.raises(ValueError, match="conversation 0: chat template: no"):
        rendering(template, [[{"role": "user", "content": "x"}], *[ASK] * 60])
    wait_until(lambda: renderers() == [], "the process with the others has ended")
    assert [one["prompt"] for one in rendering(template, ASK)] == ["Hi"]


@pytest.mark.parametrize(
    ("messages", "tools", "says"),
    [
        ([[{"role": "user", "content": "a"}], []], None, "conversation 1 is empty; give at least one message"),
        ([ASK, [{"role": "king", "content": "a"}]], None, "conversation 1: Invalid enum value 'king'"),
        ("text", None, r"messages is 'text'; a conversation is a list of messages, such as {\"role\""),
        (None, None, "messages is None; a conversation is a list of messages"),
        ({"role": "user", "content": "Hi"}, None, "messages is {'role': 'user', 'content': 'Hi'}; a conversation is"),
        ([ASK, "text"], None, "conversation 1 is 'text'; a conversation is a list of messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], None, "conversation 0: a message has a part of type"),
        (ASK, [{"type": "function"}], r"tools\[0\].function is missing"),
        (ASK, [{"type": "retrieval"}], r"tools\[0\] is of type retrieval; give a function"),
        (ASK, "weather", "tools: Expected `array`, got `str`"),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_by_its_number(messages: Any, tools: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        chats_of(messages, tools, add_generation_prompt=True, options=None)


def test_one_conversation_needs_no_list_of_its_own_and_none_is_fine() -> None:
    (one,) = chats_of(ASK, None, add_generation_prompt=True, options={"enable_thinking": False})
    assert (one.messages, one.tools, one.options) == (ASK, None, {"enable_thinking": False})
    assert chats_of([], None, add_generation_prompt=True, options=None) == []
