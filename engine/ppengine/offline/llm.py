"""`LLM`, with the names that vLLM users know. Unknown arguments are refused by name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import Profile
from ppengine.offline.conversations import Conversation, chats_of
from ppengine.offline.launch import EngineError
from ppengine.offline.llm_engine import LLMEngine
from ppengine.offline.prompts import Prompt, check_priority, params_of, prompts_of
from ppengine.offline.request_output import RequestOutput
from ppengine.offline.vllm_arguments import check_others
from ppengine.offline.waves import Waves, most_values
from ppengine.protocol.sampling import SamplingParams


class LLM:
    """Generate for many prompts at once; a context manager with `close()`. Calls of several threads take turns.

    Takes the arguments of `arguments.make_profile`, or one `Profile`, and `seed`, as `LLMEngine`. Raises TypeError for
    an unknown argument (it names the nearest known one), ConfigError for a value that cannot be, EngineError when
    the engine cannot start.
    """

    def __init__(self, model: str | Profile, **arguments: Any) -> None:
        self._turn = threading.RLock()
        self.llm_engine = LLMEngine(model, **arguments)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return one output a prompt, in order. Raises ValueError (a prompt that cannot fit) or EngineError.

        `priority` is one number a prompt: the smaller starts first, then the earlier prompt. `others` are arguments
        that only vLLM has: they are refused unless they change nothing.
        """
        check_others("generate", others)
        several = prompts_of(prompts)
        params = params_of(sampling_params, len(several))
        if not several:
            return []
        check_priority(priority, len(several))
        with self._turn:
            return self._run(several, params, priority, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Return one output a conversation, in order; `messages` is one of them or several.

        The checkpoint's chat template makes the prompts. `tools` are functions in OpenAI's form; the template alone
        reads them, and calls are left in the text. Raises ValueError or EngineError, as `generate`.
        """
        check_others("chat", others)
        chats = chats_of(messages, tools, add_generation_prompt=add_generation_prompt, options=chat_template_kwargs)
        with self._turn:
            prompts = self.llm_engine.chat_prompts(chats)
        return self.generate(prompts, sampling_params, use_tqdm, priority=priority)

    def _run(
        self, prompts: list[Prompt], params: list[SamplingParams], priority: Sequence[int] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        engine, progress = self.llm_engine, None
        waves = Waves([most_values(prompt, one) for prompt, one in zip(prompts, params, strict=True)], priority)
        if waves.several:
            # Others would have run for minutes before one is refused.
            engine.check_many(prompts, params, priority)
        places: dict[str, int] = {}
        done: dict[int, RequestOutput] = {}
        try:
            while len(done) < len(prompts):
                if wave := waves.next():
                    own = [priority[place] for place in wave] if priority is not None else None
                    names = engine.add_many(
                        [prompts[place] for place in wave], [params[place] for place in wave], priority=own
                    )
                    places.update(zip(names, wave, strict=True))
                if use_tqdm and progress is None:
                    progress = _progress(len(prompts))
                # A call that was interrupted has left requests behind, whose end comes in this one.
                fresh = [output for output in engine.step(finished_only=True) if output.request_id in places]
                for output in fresh:
                    place = places.pop(output.request_id)
                    done[place] = output
                    waves.end(place)
                if progress is not None and fresh:
                    progress.update(len(fresh))
        except BaseException:
            with contextlib.suppress(EngineError):  # closed meanwhile: nothing runs that could be aborted
                engine.abort_request(places)
            raise
        finally:
            if progress is not None:
                progress.close()
        return [done[place] for place in range(len(prompts))]

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the checkpoint: `encode` and `decode`. Raises ValueError if the engine has none."""
        return self.llm_engine.get_tokenizer()

    def close(self) -> None:
        """Stop the engine; repeated calls are fine."""
        self.llm_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _progress(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="requests", unit="req")
