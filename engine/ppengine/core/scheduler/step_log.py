"""The draft of the next step, the unretired steps and the slots."""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ppengine.core.scheduler.request import Request
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.steps import Adjustments, Mask, Move, MoveKind, Register, Row, Sampled, Step
from ppengine.protocol.token_ids import compact


@dataclass(slots=True, eq=False)
class LoadedBlock:
    """One device block that is loaded from the host cache, once for all requests that wait for it."""

    digest: bytes
    index: int
    """Its entry in the block tables of all its users."""
    users: dict[Request, None] = field(default_factory=dict)
    """Requests with a load that has it."""
    step: int = 0
    """Number of the step that loads it; 0: none does so far."""
    done: bool = False
    """Whether that step has retired."""

    @property
    def block(self) -> int:
        """The device block, which may move meanwhile."""
        return next(iter(self.users)).blocks[self.index]


@dataclass(slots=True, eq=False)
class StepRecord:
    """Requests and blocks that wait for one step, the draft included."""

    number: int
    rows: list[tuple[Request, int, bool]] = field(default_factory=list)
    """(request, computed tokens after the step, whether it samples)."""
    touched: list[Request] = field(default_factory=list)
    """Requests whose blocks it copies."""
    outs: list[Request] = field(default_factory=list)
    """Requests that it copies to the host."""
    loads: list[Request] = field(default_factory=list)
    """Requests that it copies to the device."""
    pinned: list[int] = field(default_factory=list)
    """Source blocks of device copies, with one reference each until the step has retired."""
    fills: set[int] = field(default_factory=set)
    """Blocks of prompts that its rows fill."""
    entering: list[tuple[int, bytes]] = field(default_factory=list)
    """(host slot, digest) of the blocks that it copies to the host cache."""
    filling: list[LoadedBlock] = field(default_factory=list)
    """Blocks that it loads from the host cache."""
    slots: list[int] = field(default_factory=list)
    """Slots that it releases."""
    masks: dict[int, Mask] = field(default_factory=dict)
    """Masks of its rows that sample and are constrained, by the identity of their bits."""
    late: dict[Request, int] = field(default_factory=dict)
    """Slots of such rows whose masks have not come."""
    late_masks: dict[int, Mask] = field(default_factory=dict)
    """Masks of such rows that came after it was sent, by the identity of their bits."""
    dropped: dict[Request, bool] = field(default_factory=dict)
    """Requests whose sample is dropped, and whether the token before it must be computed again."""
    given: list[list[int]] = field(default_factory=list)
    """Input tokens of its rows that the stages do not know, in row order."""
    prefill_tokens: int = 0
    """Number of tokens of its rows that are not decodes."""


class StepLog:
    """Numbers steps, collects the draft and keeps the unretired steps in order."""

    def __init__(self) -> None:
        self.generation = 0
        """Generation of the stages that steps carry; the core sets it."""
        self.revision = 0
        """Revision of the memory that steps carry; the core sets it."""
        self.number = 0
        """Number of the last step that was sent."""
        self.unretired: deque[StepRecord] = deque()
        self.micro_batches = 0
        """Number of unretired steps with rows."""
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._begin()

    def _begin(self) -> None:
        self.draft = StepRecord(self.number + 1)
        self._release: list[int] = []
        self._register: list[Register] = []
        self._dirty: dict[Request, int] = {}
        self._moves: list[Move] = []

    @property
    def urgent(self) -> bool:
        """Whether the draft must go out without rows, for its copies or its released slots."""
        return bool(self._moves) or (bool(self._release) and not self.unretired)

    def take_slot(self) -> int:
        """Return the lowest slot whose release has retired."""
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1

    def release_slot(self, request: Request) -> None:
        """Release the request's slot on the stages; it is free when that step has retired.

        A slot that no stage knows yet is free at once: the draft still has its registration, of a
        load that was ended before its first copy.
        """
        slot, request.slot = request.slot, None
        if slot is None:
            return
        self._dirty.pop(request, None)
        known = [entry for entry in self._register if entry.slot != slot]
        if len(known) < len(self._register):
            self._register = known
            heapq.heappush(self._free_slots, slot)
            return
        self._release.append(slot)
        self.draft.slots.append(slot)

    def register(self, request: Request) -> None:
        """Give the request a slot and send its tokens and sampling parameters to the stages."""
        request.slot = self.take_slot()
        request.registered = request.num_tokens
        sampling = request.sampling
        self._register.append(
            Register(
                slot=request.slot,
                request=request.id,
                tokens=request.prompt_ids + compact(request.output_ids) if request.output_ids else request.prompt_ids,
                prompt_len=request.num_prompt,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=max(sampling.top_k, 0),
                seed=request.seed,
                sample=request.sample,
                # Masks know it: a stage might ban the only token that a grammar allows.
                min_tokens=0 if request.constrained else sampling.min_tokens,
                stop_token_ids=sorted(request.stops),
                logprobs=-1 if sampling.logprobs is None else sampling.logprobs,
                adjustments=_adjustments(sampling) if sampling.adjusts else None,
                prompt_logprobs=sampling.prompt_logprobs or 0 if request.scores_prompt else -1,
            )
        )

    def table_changed(self, request: Request, first: int) -> None:
        """Send the request's block table with the next step, from entry `first` on."""
        known = self._dirty.get(request)
        if known is None or first < known:
            self._dirty[request] = first

    def copy(self, kind: MoveKind, source: int, target: int) -> None:
        """Add one block copy to the draft; stages copy in this order, before the rows.

        Raises ValueError for a copy that would read a block before the rows of its own step fill it.
        """
        if source in self.draft.fills and kind in (MoveKind.OUT, MoveKind.DEVICE):
            raise ValueError(f"block {source} is copied by step {self.draft.number}, whose rows fill it")
        self._moves.append(Move(kind, source, target))

    def touch(self, request: Request) -> None:
        """Let the request wait for the draft."""
        number = self.draft.number
        if not request.in_flight or request.in_flight[-1] != number:
            request.in_flight.append(number)
            self.draft.touched.append(request)

    def wait_for(self, request: Request, number: int) -> None:
        """Let the request wait for a step that copies its blocks, the draft included, unless it has retired."""
        if number in request.in_flight:
            return
        record = next((record for record in [self.draft, *self.unretired] if record.number == number), None)
        if record is not None:
            insort(request.in_flight, number)
            record.touched.append(request)

    def fills(self, block: int) -> bool:
        """Return whether a step that has not retired, or the draft, fills a block of a prompt."""
        return block in self.draft.fills or any(block in record.fills for record in self.unretired)

    def emit(self, rows: list[Row], map_blocks: int | None = None, checks: int | None = None) -> Step:
        """Return the draft as a step and begin the next one."""
        tables = [
            (request.slot, first, request.blocks[first:])
            for request, first in self._dirty.items()
            if request.slot is not None and request.blocks
        ]
        self.number = self.draft.number
        step = Step(
            generation=self.generation,
            number=self.number,
            revision=self.revision,
            release=self._release,
            register=self._register,
            tables=tables,
            map_blocks=map_blocks,
            moves=self._moves,
            rows=rows,
            checks=checks,
            masks=list(self.draft.masks.values()),
            late=list(self.draft.late.values()),
            given=self.draft.given,
        )
        self.unretired.append(self.draft)
        self.micro_batches += bool(rows)
        self._begin()
        return step

    def go_on_from(self, number: int) -> None:
        """Number steps from `number` on; those before are of a core before this one."""
        self.number = number
        self._begin()

    def reset(self) -> None:
        """Drop the draft, all unretired steps and all slots; step numbers go on."""
        self.unretired.clear()
        self.micro_batches = 0
        self._free_slots, self._num_slots = [], 0
        self._begin()

    def retire(self, number: int, sampled: Sequence[Sampled]) -> StepRecord:
        """Remove and return the oldest unretired step.

        Raises ValueError if it is not `number`, or if `sampled` does not match its sampling rows.
        """
        record = self.unretired[0] if self.unretired else None
        if record is None or record.number != number:
            oldest = None if record is None else record.number
            raise ValueError(f"step {number} retires; the oldest unretired step is {oldest}")
        expected = [request.slot for request, _, samples in record.rows if samples]
        found = [answer.slot for answer in sampled]
        if expected != found:
            raise ValueError(f"step {number} sampled slots {found}, expected {expected}")
        self.unretired.popleft()
        self.micro_batches -= bool(record.rows)
        for slot in record.slots:
            heapq.heappush(self._free_slots, slot)
        return record

    def pins(self) -> Counter[int]:
        """Return the number of references that copies in unretired steps keep on each block."""
        return Counter(block for record in [*self.unretired, self.draft] for block in record.pinned)


def _adjustments(sampling: SamplingParams) -> Adjustments:
    return Adjustments(
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias or {},
        bad_words_ids=sampling.bad_words_ids,
        allowed_token_ids=sampling.allowed_token_ids,
    )
