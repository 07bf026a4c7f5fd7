"""A checkpoint's chat template may be bad: its chats are refused, the others get their tokens, the core stays."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path

from engines import alive, wait_until
from exhausted import renderer
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import load_profile, profiles_dir
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.control import Outcome, Refused
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit
from reference import greedy_aside
from serving import Served

STEPS = 16
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MEMORY = "{% if messages[0]['content'] == 'memory' %}{{ messages[0]['content'] * 10**9 }}{% endif %}"
CHATS = ["hello", "loop", "a dog", "memory", "the river"]
LIMITS = {"loop": "", "memory": "needs more memory than its process may take"}
"""Words of the refusals: a loop ends at its processor time, on a busy machine at its deadline."""
PROMPT = "The old house by the river was"


def model_with(folder: Path, template: str, *, after: bool = False) -> Path:
    """Return a copy of the bundled model with that template, or with it in front of the model's own."""
    model = Path(shutil.copytree(profiles_dir() / "models" / "tiny", folder / "model"))
    path = model / "chat_template.jinja"
    path.write_text(template + (path.read_text() if after else ""))
    return model


def served(model: Path) -> Served:
    return Served(load_profile("tiny", ["threads_per_stage=1", f"model.path={model}", "model.dtype=float64"]))


def test_a_template_that_cannot_be_compiled_ends_no_engine(tmp_path: Path) -> None:
    """Other such templates are refused the same way, as `test_chat_templates` shows."""
    template = "{% for a in [1] %}" * 21 + "x" + "{% endfor %}" * 21
    text = "SyntaxError: too many statically nested blocks"
    with served(model_with(tmp_path, template)) as engine:
        ran = engine.cli("submit", PROMPT, "--chat")
        assert (ran.code, ran.error) == (2, f"error: submit refused: chat template: {text} (INVALID)")
        ran = engine.cli("submit", PROMPT, "--max-tokens", "4", "--temperature", "0", "--ignore-eos", "--json")
        assert ran.code == 0, ran
        assert sum(len(json.loads(line).get("token_ids", [])) for line in ran.out.splitlines()) == 4
        assert alive(engine.pids["core"])


async def test_endless_templates_and_kills_cost_no_other_request(tmp_path: Path) -> None:
    """Chats and texts at once: those beyond a limit are refused, everything else has the right tokens."""
    loop = "{% if messages[0]['content'] == 'loop' %}" + LOOP + "{% endif %}"
    model = model_with(tmp_path, loop + MEMORY, after=True)
    tokenizer, template = Tokenizer.load(model), ChatTemplate.load(model)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=STEPS)
    with served(model) as engine:
        core = engine.pids["core"]
        async with engine.operator() as op:
            verbs = [Submit(prompt=text, chat=True, sampling=greedy) for text in CHATS]
            ends = [asyncio.create_task(op.link.command(verb, timeout=60)) for verb in verbs]
            texts = [await op.submit(PROMPT, max_tokens=STEPS) for _ in range(3)]
            expected = await greedy_aside(model, tokenizer.encode(PROMPT), STEPS)
            assert await op.all_tokens(texts) == [expected] * 3
            for text, end in zip(CHATS, await asyncio.gather(*ends), strict=True):
                if text in LIMITS:
                    assert isinstance(end, Refused) and end.text.startswith(f"chat template: it {LIMITS[text]}"), end
                    continue
                assert isinstance(end, Outcome) and end.state == "applied", end
                ids = tokenizer.encode_chat(template.render(Chat(messages=[{"role": "user", "content": text}]), 1000))
                assert await op.tokens(end.request) == await greedy_aside(model, ids, STEPS)
            os.kill(pid := renderer(engine), signal.SIGKILL)
            end = await op.do(Submit(prompt="hello", chat=True, sampling=greedy))
            assert end.request and renderer(engine) != pid
            await op.tokens(end.request)
        engine.find_pids()
        assert engine.pids["core"] == core
        last = renderer(engine)
    wait_until(lambda: not alive(last), "the process of chat templates has ended with its core")
