"""`LLM` and `LLMEngine`, with the names that vLLM users know. Unknown arguments are refused by name."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ppengine.common.config import Profile
from ppengine.offline.arguments import profile_of
from ppengine.offline.conversations import Conversation, ConversationRenderer, chats_of
from ppengine.offline.launch import EngineError, LocalEngine
from ppengine.offline.prompts import Prompt, Submission, TokensPrompt, portions, prompts_of, submissions_of
from ppengine.offline.request_output import RequestOutput, from_wire
from ppengine.offline.request_seeds import checked_seed, seeded
from ppengine.offline.vllm_arguments import check_others
from ppengine.offline.waves import Waves, most_values
from ppengine.protocol import offline as wire
from ppengine.protocol.chat_messages import Chat
from ppengine.protocol.sampling import SamplingParams

COLLECT_MS = 1000


class LLMEngine:
    """An engine driven step by step: `add_request`, `step`, `abort_request`. Close it, or use it in a `with`.

    `seed`: requests without a seed of their own get one that follows from it and from their number.
    """

    _renderer: ConversationRenderer | None = None
    """Made by the first chat."""
    _seed: int | None = None
    _count = 0
    """Requests so far."""
    _tokenizes = True

    def __init__(self, model: str | Profile, *, seed: int | None = None, **arguments: Any) -> None:
        profile = profile_of(model, arguments)
        self._seed = checked_seed(seed)
        self._tokenizes = not profile.model.skip_tokenizer
        self._engine = LocalEngine(profile)
        self._session = f"offline-{secrets.token_hex(4)}"
        self._cursor = 0
        self._open: dict[str, str | None] = {}

    @property
    def engine_id(self) -> str:
        """Id by which `ppconsole attach` finds this engine."""
        return self._engine.id

    @property
    def run_dir(self) -> str:
        """Folder of the engine's sockets, logs and `engine.json`, gone with it."""
        return self._engine.run_dir

    @property
    def supervisor_pid(self) -> int:
        """Process id of the engine's supervisor, the parent of all its processes."""
        return self._engine.pid

    @property
    def num_blocks(self) -> int:
        """KV blocks that all stages agreed on at start, the null block included."""
        return self._engine.state.num_blocks

    def add_request(self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0) -> None:
        """Queue one request. Raises ValueError if it can never fit or its id is in use."""
        self.add_many([prompt], [params], [request_id], [priority])

    def add_many(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], ids: Sequence[str] = (),
        priority: Sequence[int] | None = None,
    ) -> list[str]:  # fmt: skip
        """Queue several requests, all or none, and return their ids. Raises ValueError or EngineError.

        If a large batch is refused, part of it may have been queued already; those ids are in use until they end.
        """
        count = len(prompts)
        if len(params) != count or len(ids) not in (0, count):
            raise ValueError(f"{count} prompts, {len(params)} sampling params and {len(ids)} request ids")
        first = self._count
        submissions = submissions_of(prompts, seeded(params, self._seed, first), ids, priority)
        names: list[str] = []
        try:
            for requests in self._send(submissions):
                names += requests
        except BaseException:
            if names:
                self._engine.send(wire.AbortMany(session=self._session, requests=names))
            raise
        self._open.update((name, each.text) for name, each in zip(names, submissions, strict=True))
        self._count = first + count
        return names

    def check_many(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], priority: Sequence[int] | None = None
    ) -> None:
        """Queue nothing, but raise ValueError for the first prompt that `add_many` would refuse, or EngineError."""
        for _ in self._send(submissions_of(prompts, params, (), priority), check=True):
            pass

    def chat_prompts(self, chats: Sequence[Chat]) -> list[TokensPrompt]:
        """Return chats as prompts, by the checkpoint's template. Raises ValueError for one that fails, EngineError."""
        self._engine.check_alive()
        if not self._tokenizes:
            raise ValueError("a chat needs a tokenizer; this engine was started without one: give prompt_token_ids")
        if self._renderer is None:
            self._renderer = ConversationRenderer(self.run_dir)
        return self._renderer.prompts(chats)

    def abort_request(self, request_id: str) -> None:
        """End a request; one that has ended already is fine."""
        self._engine.send(wire.AbortMany(session=self._session, requests=[request_id]))

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to wait for."""
        return bool(self._open)

    def step(self, *, finished_only: bool = False) -> list[RequestOutput]:
        """Wait for news (at most a second) and return the requests that changed. Raises EngineError."""
        question = wire.Collect(
            nonce=self._engine.nonce(), session=self._session, since=self._cursor, finished_only=finished_only,
            wait_ms=COLLECT_MS,
        )  # fmt: skip
        answer = self._engine.ask(question, wire.Collected)
        if answer.error and self._open:
            raise EngineError(answer.error)
        self._cursor = answer.cursor
        # Others were refused as a whole after some of them had been taken.
        known = [output for output in answer.outputs if output.request in self._open]
        outputs = [from_wire(output, self._open[output.request]) for output in known]
        finished = [output.request for output in answer.outputs if output.finished]
        for name in finished:
            self._open.pop(name, None)
        if finished:
            self._engine.send(wire.ForgetMany(session=self._session, requests=finished))
        return outputs

    def close(self) -> None:
        """Stop the engine; repeated calls are fine."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._engine.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, submissions: list[Submission], *, check: bool = False) -> Iterator[list[str]]:
        """Send submissions in portions; yield the ids of each. Raises ValueError or EngineError if one is refused."""
        for begin, end in portions(submissions):
            verbs, tokens, _ = zip(*submissions[begin:end], strict=True)
            message = wire.AddMany(
                nonce=self._engine.nonce(), session=self._session, submissions=list(verbs), first=begin, check=check,
                tokens=list(tokens) if any(tokens) else [],
            )  # fmt: skip
            answer = self._engine.ask(message, wire.Added)
            if answer.error:
                raise EngineError(answer.error) if answer.lost else ValueError(answer.error)
            yield answer.requests


class LLM:
    """Generate for many prompts at once; a context manager with `close()`.

    Takes the arguments of `arguments.make_profile`, or one `Profile`, and `seed`, as `LLMEngine`. Raises TypeError for
    an unknown argument (it names the nearest known one), ConfigError for a value that cannot be, EngineError when
    the engine cannot start.
    """

    def __init__(self, model: str | Profile, **arguments: Any) -> None:
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
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = (
            [sampling_params] * len(several) if isinstance(sampling_params, SamplingParams) else list(sampling_params)
        )
        if len(params) != len(several):
            raise ValueError(f"{len(several)} prompts and {len(params)} sampling params; give one, or one a prompt")
        if not several:
            return []
        if priority is not None and len(priority) != len(several):
            raise ValueError(f"{len(several)} prompts and {len(priority)} priorities; give one a prompt")
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
        return self.generate(self.llm_engine.chat_prompts(chats), sampling_params, use_tqdm, priority=priority)

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
                for name in places:
                    engine.abort_request(name)
            raise
        finally:
            if progress is not None:
                progress.close()
        return [done[place] for place in range(len(prompts))]

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
