"""Memory of a process of chat templates: an untrusted template has its limit, however many texts come between."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.protocol.chat_messages import Chat, Render, Tokenize
from ppengine.templates import __main__ as templates

MIB = 2**20


def test_the_limit_of_a_template_moves_with_the_tokenizer_and_not_with_each_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    have, limits = [50 * MIB], list[int]()
    monkeypatch.setattr(templates.Renderer, "_address_bytes", lambda self: have[0])
    monkeypatch.setattr(
        templates, "limit", lambda kind, most: limits.append(most) if kind == resource.RLIMIT_AS else None
    )  # fmt: skip
    renderer: Any = templates.Renderer(Path("no folder"))
    renderer._template = ChatTemplate("{{ messages[0]['content'] }}", {})

    def encode(text: str) -> list[int]:
        have[0] += 300 * MIB
        return [1]

    def render() -> int:
        chat = Chat(messages=[{"role": "user", "content": "hi"}])
        assert renderer.answer(Render(number=1, chat=chat, most=99, cpu_s=5)).text == "hi"
        return limits[-1] - templates.MEMORY_BYTES

    assert render() == 0
    have[0] += 100 * MIB  # The tokenizer is loaded.
    renderer._tokenizer = SimpleNamespace(encode=encode)
    for _ in range(5):
        renderer.answer(Tokenize(number=1, texts=["long"], special=True, cpu_s=5))
        have[0] -= 300 * MIB  # The answer is freed once it is sent.
        assert render() == 100 * MIB
