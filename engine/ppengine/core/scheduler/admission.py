"""New requests: what can never run here is refused at once, the rest joins the line."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.common.config import SchedulerConfig
from ppengine.core.scheduler.fences import Fences
from ppengine.core.scheduler.kv_allocation import KvBlocks
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import Lines
from ppengine.core.scheduler.results import DoesNotFit


class Intake:
    """Checks and queues the samples of a prompt, all or none."""

    def __init__(
        self, config: SchedulerConfig, kv: KvBlocks, lines: Lines, fences: Fences, *,
        max_model_len: int, eos_token_ids: frozenset[int],
    ) -> None:  # fmt: skip
        self._config = config
        self._kv = kv
        self._lines = lines
        self._fences = fences
        self._max_model_len = max_model_len
        self._eos = eos_token_ids
        self._arrivals = 0

    def add(self, requests: Sequence[Request]) -> None:
        """Put `requests` into the line. Raises DoesNotFit or ValueError before anything has changed."""
        self.check(requests)
        now = self._fences.now()
        for request in requests:
            request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
            request.arrival_time = request.arrival_time or now
            request.max_tokens = self._max_tokens(request)
            eos = frozenset() if request.sampling.ignore_eos else self._eos
            request.stops = eos.union(request.sampling.stop_token_ids)
            request.note(now, "submitted > waiting")
            self._fences.requests[request.id] = request
            if request.leader is None:
                self._lines.put_waiting(request)
            else:
                self._lines.park(request, request.leader)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise DoesNotFit or ValueError where `requests` can never be added; nothing changes."""
        for request in requests:
            if request.id in self._fences.requests:
                raise ValueError(f"request id {request.id!r} is in use; choose another")
            self._check_prompt(request)
            self._check_blocks(request)

    def _max_tokens(self, request: Request) -> int:
        room = self._max_model_len - request.num_prompt
        asked = request.sampling.max_tokens
        return room if asked is None else min(asked, room)

    def _check_prompt(self, request: Request) -> None:
        prompt, longest = request.num_prompt, self._max_model_len
        if prompt < 1:
            raise DoesNotFit("the prompt is empty; it needs at least 1 token", 1, 0)
        if prompt >= longest:
            text = f"the prompt has {prompt} tokens, max_model_len is {longest}; at most {longest - 1} would fit"
            raise DoesNotFit(text, prompt, longest - 1)
        budget = self._config.max_num_batched_tokens
        if not self._config.chunked_prefill and prompt > budget:
            text = (
                f"the prompt has {prompt} tokens and chunked prefill is off; max_num_batched_tokens "
                f"is {budget}, so at most {budget} would fit"
            )
            raise DoesNotFit(text, prompt, budget)

    def _check_blocks(self, request: Request) -> None:
        # The last token is returned and never computed, so it takes no room.
        tokens = request.num_prompt + self._max_tokens(request)
        need, have = self._kv.blocks_for(tokens - 1), self._kv.device.size - 1
        if need > have:
            fits = have * self._kv.block_size + 1
            text = f"prompt and output of {tokens} tokens need {need} blocks, {have} exist; {fits} tokens would fit"
            raise DoesNotFit(text, need, have)
