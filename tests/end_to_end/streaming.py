"""A stream that is read to its end, by offset, over as many connections as it takes."""

from __future__ import annotations

from collections.abc import Callable

from ppconsole.link.engine_link import EngineLink
from ppconsole.link.source import LinkLost
from ppengine.protocol.control import Outcome
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit


async def stream(find: Callable[[], EngineRecord], prompt: list[int], steps: int, back_s: float = 60.0) -> list[int]:
    """Submit on a link of its own and return `steps` tokens. A lost link has `back_s` seconds to come back."""
    link = EngineLink(find(), find=find, user="streams", slow=True, passing=True)
    await link.start(lambda update: None)
    try:
        await link.attached(60)
        sampling = SamplingParams(temperature=0.0, max_tokens=steps, ignore_eos=True)
        answer = await link.command(Submit(prompt_token_ids=prompt, sampling=sampling), timeout=60)
        assert isinstance(answer, Outcome) and answer.state == "applied", answer
        tokens: list[int] = []
        while True:
            try:
                part = await link.fetch(answer.request or "", offset=len(tokens))
            except LinkLost:
                await link.attached(back_s)
                continue
            tokens += part.token_ids
            if part.finished:
                assert part.finish_reason == "length", part
                return tokens
    finally:
        await link.close()
