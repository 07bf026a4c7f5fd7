"""Sampling of the last stage on a GPU: launched behind a step's logits, read when the step is acknowledged."""

from __future__ import annotations

import zlib
from functools import partial

import numpy as np
from ppkernels.gpu.sampling import Parameters, choose, choose_adjusted, logprobs
from ppkernels.gpu.token_masks import masked
from ppkernels.sampling_inputs import Adjustment
from torch import Tensor

from ppengine.common.ring import Kind
from ppengine.protocol.steps import Register, Retired, Sampled, Step
from ppengine.stage.backends.cuda.decode_graphs import Launched
from ppengine.stage.backends.cuda.device_buffers import SLOTS, DeviceBuffers
from ppengine.stage.backends.cuda.split_sampling import BestTokens
from ppengine.stage.backends.cuda.streams import Stream
from ppengine.stage.pending_step import Pending
from ppengine.stage.runner import RunnerParts
from ppengine.stage.sampler import masks_by_slot
from ppengine.stage.token_history import adjustment_of


class StepSampler:
    """Samples for one runner. On stages without a head it does nothing."""

    def __init__(self, parts: RunnerParts, buffers: DeviceBuffers) -> None:
        self._buffers, self._model = buffers, parts.model
        self._rank, self._ranks = parts.rank, parts.group.size
        self._ring, self._sender = parts.ring, parts.ends.token_sender

    def register(self, registers: list[Register]) -> None:
        """Launch the entry of requests' parameters into the tables on the device. Raises ValueError for a slot too
        many.
        """
        sampling, adjustments, compute = self._buffers.sampling, self._buffers.adjustments, self._buffers.compute
        if sampling is None or adjustments is None or not registers:
            return
        if (most := max(register.slot for register in registers)) >= SLOTS:
            raise ValueError(f"slot {most}: a stage on a GPU knows {SLOTS} requests at most")
        with compute.doing("sampling parameters"), compute.use():
            slots = [one.slot for one in registers]
            sampling.set(slots, [_parameters(one) for one in registers])
            adjustments.set(slots, [_adjustment(one) for one in registers])

    def sample(
        self, step: Step, requests: list[Register], launched: Launched, best: BestTokens | None, pending: Pending,
        late: Stream | None = None,
    ) -> None:  # fmt: skip
        """Launch the sampling from whole logits, or from the `best` tokens of the ranks' columns of them.

        It is on the compute stream, or on `late`.
        """
        number, buffers = step.number, self._buffers
        stream = late or buffers.compute
        most = max(request.logprobs for request in requests)
        # A late one may be launched amid the next step, whose time it is.
        with self._ring.operation(Kind.SAMPLE, stream.order.step, size=len(requests)), stream.use():
            with stream.doing("sampling"):
                tokens = self._choose(step, requests, launched, best)
            if self._sender is not None:
                self._sender.sampled(number, tokens, late=late is not None)
            parts = [tokens]
            if most >= 0:
                assert buffers.sampling is not None
                logits, slots, _ = launched
                with stream.doing("log probabilities"):
                    shown = logprobs(logits, buffers.sampling, slots, tokens, min(max(most, 1), logits.shape[1]))
                parts += [shown.chosen, shown.tokens, shown.values]
            hosts = buffers.copies.launch(stream, *parts)
        # Without `pending` itself: a cycle would keep memory of the device until Python looks for cycles.
        pending.finally_do(partial(self._retire, number, requests, hosts, pending.retired))

    def _choose(self, step: Step, requests: list[Register], launched: Launched, best: BestTokens | None) -> Tensor:
        """Launch the choice of tokens [R]; they also become the newest of their slots."""
        buffers, (logits, slots, positions) = self._buffers, launched
        assert buffers.sampling is not None and buffers.adjustments is not None
        newest = None if self._sender is None else self._sender.newest
        if newest is None:
            newest = buffers.latest
        if best is not None:
            return best.choose(logits, self._model.shard, buffers.sampling, slots, positions, newest)
        masks = masks_by_slot(step.masks)
        rows = {row: masks[one.slot] for row, one in enumerate(requests) if one.slot in masks}
        allowed = masked(logits, rows) if rows else logits
        greedy = not any(request.temperature > 0 for request in requests)
        if any(request.adjustments is not None for request in requests):
            tables = buffers.sampling, buffers.adjustments
            return choose_adjusted(allowed, *tables, slots, positions, greedy=greedy, newest=newest)
        return choose(allowed, buffers.sampling, slots, positions, greedy=greedy, newest=newest)

    def _retire(self, number: int, requests: list[Register], hosts: list[Tensor], retired: Retired) -> None:
        """Put sampled tokens and log probabilities into the acknowledgement."""
        tokens = self._buffers.copies.read(hosts)[0]
        if self._ranks > 1:
            retired.digest = zlib.crc32(tokens.numpy().tobytes())
        if not self._rank:
            retired.sampled = _sampled(requests, tokens, hosts)
        if self._sender is not None:
            self._sender.retired(number, tokens)


def _sampled(requests: list[Register], tokens: Tensor, hosts: list[Tensor]) -> list[Sampled]:
    """Return what the core gets: tokens, with log probabilities for requests that want them."""
    found = list(map(Sampled, [one.slot for one in requests], tokens.tolist()))
    if len(hosts) > 1:
        chosen, ids, values = (part.tolist() for part in hosts[1:])
        for row, (request, sampled) in enumerate(zip(requests, found, strict=True)):
            if request.logprobs >= 0:
                sampled.logprob = chosen[row]
                sampled.top = list(zip(ids[row], values[row], strict=True))[: request.logprobs]
    return found


def _parameters(register: Register) -> Parameters:
    return Parameters(
        temperature=register.temperature,
        top_p=register.top_p,
        top_k=register.top_k,
        seed=register.seed,
        sample=register.sample,
        logprobs=register.logprobs,
        banned=register.stop_token_ids,
        banned_until=register.prompt_len + register.min_tokens if register.min_tokens else 0,
    )


def _adjustment(register: Register) -> Adjustment | None:
    if register.adjustments is None:
        return None
    return adjustment_of(register, np.array(register.tokens, np.int64))
