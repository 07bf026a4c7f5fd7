"""New requests: refuse one that can never run here, resolve the limits of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ppengine.common.profile_sections import SchedulerConfig
from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.request_queues import RequestQueues
from ppengine.core.scheduler.results import DoesNotFit

ARRIVAL_MOST_S = 600.0
"""Most seconds between the arrival of a request at the engine and the queue."""


@dataclass(eq=False)
class Admission:
    """Checks new requests and fills in the fields that the scheduler decides."""

    _config: SchedulerConfig
    _blocks: BlockTables
    _queues: RequestQueues
    _clock: Callable[[], float]
    _max_model_len: int
    _eos: frozenset[int]
    _arrivals: int = field(init=False, default=0)

    def check(self, requests: Sequence[Request]) -> None:
        """Raise DoesNotFit if a request can never run here, ValueError for an id in use."""
        for request in requests:
            if request.id in self._queues.requests:
                raise ValueError(f"request id {request.id!r} is in use; choose another")
            self._check_prompt(request)
            self._check_blocks(request)

    def resolve(self, request: Request) -> None:
        """Set the arrival, token limit and stop tokens of a request that was checked.

        Times of arrival come from other processes; 0 is not known. Such a request arrives now, as one with a time in
        the future, or more than `ARRIVAL_MOST_S` ago: no client can make a latency negative or absurd.
        """
        now = self._clock()
        request.arrival, self._arrivals = self._arrivals, self._arrivals + 1
        request.queued_time = now
        arrived = request.arrival_time
        # The clock may count from the boot of the host, which may be seconds ago.
        if not (arrived and 0.0 <= now - arrived <= ARRIVAL_MOST_S):
            request.arrival_time = now
        self.limit(request)
        request.note(now, "submitted > waiting")

    def limit(self, request: Request) -> None:
        """Set the token limit and the stop tokens of a request."""
        request.max_tokens = self._max_tokens(request)
        # A grammar that must end has no other token, so its masks keep the others apart.
        eos = frozenset() if request.sampling.ignore_eos and not request.constrained else self._eos
        request.stops = eos.union(request.sampling.stop_token_ids)

    def number_from(self, number: int) -> None:
        """Number requests from `number` on; those before are of a core before this one."""
        self._arrivals = number

    def _max_tokens(self, request: Request) -> int:
        room = self._max_model_len - request.num_prompt
        limit = request.sampling.max_tokens
        return room if limit is None else min(limit, room)

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
        need, have = self._blocks.blocks_for(tokens - 1), self._blocks.device.size - 1
        if need > have:
            fits = have * self._blocks.block_size + 1
            text = f"prompt and output of {tokens} tokens need {need} blocks, {have} exist; {fits} tokens would fit"
            raise DoesNotFit(text, need, have)
