"""Copies between device blocks and the host cache: which ones the next step makes, and what their end means."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ppengine.common.tier_config import TierConfig
from ppengine.core.scheduler.block_pool import BlockPool, HostBlockPool
from ppengine.core.scheduler.host_cache import HostCache
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.step_log import LoadedBlock, StepLog, StepRecord
from ppengine.protocol.steps import MoveKind

_MIB = 2**20
_ON_CPUS, _ON_GPUS = (8.0, 16.0), (16.0, 128.0)
"""Most MiB that a step copies out and in: on a GPU, at some 50 GB/s, a third of a millisecond and two and a half."""
_ALONE = 4
"""Times so much is copied in by a step while no other request waits for its tokens: fewer steps have fewer turns."""
_BATCH = 32
"""Queued blocks that are worth the fixed cost of copies in a step: on CPUs, that of some blocks."""
_LOOKED_AT = 4
"""Queued blocks that a step looks at, as a multiple of those that it may copy."""


class HostLimits(NamedTuple):
    """Limits of the host cache."""

    out_blocks: int
    """Most blocks that a step copies to the host, beside as many as it fills."""
    in_blocks: int
    """Most blocks that a step copies from the host."""
    least_tokens: int
    """Shortest prefix that is loaded."""
    in_alone: int = 0
    """Most blocks that a step copies from the host while nothing else runs, if more than `in_blocks`."""


def host_limits(tiers: TierConfig, block_bytes: int, *, on_gpus: bool) -> HostLimits | None:
    """Return the limits of a profile, None without a host cache. `block_bytes`: of the place with most.

    Copies of a GPU run beside its kernels at some 50 GB/s, those of a CPU in place of them.
    """
    if not tiers.host:
        return None
    usual = _ON_GPUS if on_gpus else _ON_CPUS
    mibs = (own or most for own, most in zip((tiers.out_mib, tiers.in_mib), usual, strict=True))
    out, back = (max(1, int(mib * _MIB / block_bytes)) for mib in mibs)
    alone = _ALONE * back if tiers.in_mib is None else back
    return HostLimits(out, back, tiers.least_tokens, alone)


@dataclass(slots=True, eq=False)
class Load:
    """A starting request's blocks on their way from pinned slots."""

    slots: list[int]
    blocks: list[LoadedBlock]
    """The block of each slot. Loads of a common prefix share them."""
    begun: int = 0
    """Blocks at its beginning whose copies are in a step that the request waits for."""
    done: int = 0
    """Blocks at its beginning whose copies have retired."""


@dataclass(slots=True)
class StartTotals:
    """Tokens of all starts, by their source."""

    prompt: int = 0
    device: int = 0
    host: int = 0
    computed: int = 0
    backends: Counter[str] = field(default_factory=Counter)
    """By name; those of removed backends whose name is in use again are under an empty one."""

    def end_backend(self, name: str) -> None:
        """Count the tokens of a backend that was removed for no backend: its name gets another one."""
        self.backends[""] += self.backends.pop(name, 0)


class CacheCopies:
    """Fills the host cache with full blocks, and starting requests from it.

    The queue of blocks to copy out holds no reference, only digests. A block that is evicted before
    its turn is dropped and counted, so that the queue takes no memory from requests.
    """

    def __init__(
        self, steps: StepLog, device: BlockPool, host: HostBlockPool, *, block_size: int, limits: HostLimits,
        pin: Callable[[int], None],
    ) -> None:  # fmt: skip
        """`pin` keeps a device block until the next step has retired."""
        self.cache = HostCache(host)
        self.totals = StartTotals()
        self.loads: dict[Request, Load] = {}
        """Loads of the host cache that have not ended, in the order of their starts."""
        self._coming: dict[bytes, LoadedBlock] = {}
        """Their blocks that have not come, by digest; one of several blocks with the same digest."""
        self.out_total = 0
        """Blocks copied to the host cache."""
        self.in_total = 0
        """Blocks loaded from it."""
        self.dropped_total = 0
        """Blocks that left the device before they were copied."""
        self._steps = steps
        self._device = device
        self._block_size = block_size
        self._limits = limits
        self._pin = pin
        # A plain dict is read from its beginning over all that were removed there.
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._left_some = False
        """Whether a request has left queued blocks since the last copies: they may be evicted soon."""
        self._under_way: set[bytes] = set()
        """Digests of the blocks that unretired steps copy out."""

    # --- out ------------------------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether a step should copy blocks: a batch of them waits, or some may be evicted soon."""
        waiting = len(self._queue)
        return self._left_some or waiting >= min(_BATCH, self._limits.out_blocks)

    def queue(self, digests: Iterable[bytes]) -> None:
        """Queue full blocks that are in the prefix cache, except those that the host has."""
        cache, queue, under_way = self.cache, self._queue, self._under_way
        for digest in digests:
            if digest not in cache and digest not in under_way:
                queue[digest] = None
        while len(queue) > self._device.size:
            queue.popitem(last=False)
            self.dropped_total += 1

    def left(self, digests: Sequence[bytes]) -> None:
        """Note that a request leaves the device blocks of a prefix: its end may be evicted first, there and here."""
        self.cache.touch(digests)
        queue = self._queue
        if queue:
            for digest in reversed(digests):
                if digest in queue:
                    queue.move_to_end(digest)
                    self._left_some = True

    def add_out(self, floor: int, tokens: int) -> None:
        """Add the copies of queued blocks to the draft, as many as a step of `tokens` may have.

        So copies keep up with prompts: a token takes far longer to compute than to copy. A block without
        references waits while fewer than `floor` blocks are available: a copy would keep it from a
        running request.
        """
        self._left_some = False
        chosen = self._next_out(floor, self._limits.out_blocks + tokens // self._block_size)
        slots = self.cache.reserve(min(len(chosen), self.cache.room)) if chosen else None
        queue, under_way, draft = self._queue, self._under_way, self._steps.draft
        for slot, (digest, block) in zip(slots or (), chosen, strict=False):
            del queue[digest]
            under_way.add(digest)
            self._pin(block)
            self._steps.copy(MoveKind.OUT, block, slot)
            draft.entering.append((slot, digest))

    def _next_out(self, floor: int, most: int) -> list[tuple[bytes, int]]:
        """Return the next queued blocks that may be copied; drop those that need not or cannot be."""
        queue, device, cache = self._queue, self._device, self.cache
        spare = device.available - floor
        chosen: list[tuple[bytes, int]] = []
        looked_at = most * _LOOKED_AT if cache.room else _BATCH
        for digest in list(islice(queue, looked_at)):
            block = device.find(digest)
            if digest in cache or digest in self._under_way:
                del queue[digest]
            elif block is None:
                del queue[digest]
                self.dropped_total += 1
            elif self._steps.fills(block):
                continue  # Another request has begun with it meanwhile.
            elif not device.is_cached(block) or spare > 0:
                spare -= device.is_cached(block)
                chosen.append((digest, block))
                if len(chosen) == most:
                    break
        return chosen

    # --- in -------------------------------------------------------------------------------------------------

    def find(self, digests: Sequence[bytes]) -> list[int]:
        """Return the slots of the longest known prefix of `digests`; none if it is too short to be loaded."""
        slots = self.cache.lookup(digests)
        return slots if len(slots) * self._block_size >= self._limits.least_tokens else []

    def coming(self, digests: Sequence[bytes]) -> list[int]:
        """Return the device blocks of the longest prefix of `digests` that loads of other requests bring."""
        blocks = []
        for digest in digests:
            known = self._coming.get(digest)
            if known is None:
                break
            blocks.append(known.block)
        return blocks

    def start(self, request: Request, slots: list[int], shared: int) -> None:
        """Begin the load of a starting request behind its computed blocks; the first `shared` ones are coming."""
        self.cache.pin(slots)
        first = request.num_computed // self._block_size
        blocks = []
        for index, digest in enumerate(request.digests[first : first + len(slots)], first):
            block = self._coming[digest] if index - first < shared else LoadedBlock(digest, index)
            self._coming.setdefault(digest, block)
            block.users[request] = None
            blocks.append(block)
        self.loads[request] = Load(slots, blocks)
        request.state = "loading"

    def add_in(self, alone: bool) -> None:
        """Add the next copies of loads to the draft, as many as a step may have; the first load comes first.

        `alone`: no other request runs, whose tokens would wait for the step.

        A block is copied once, and all its users wait for that step. Fenced requests get no copies:
        their loads end with the fence.
        """
        steps, limits = self._steps, self._limits
        left = max(limits.in_blocks, limits.in_alone) if alone else limits.in_blocks
        for request, load in self.loads.items():
            if request.fence is not None:
                continue
            begun, count, waited = load.begun, len(load.blocks), 0
            while begun < count:
                block = load.blocks[begun]
                if not block.step:
                    if not left:
                        break
                    left -= 1
                    block.step = steps.draft.number
                    steps.copy(MoveKind.LOAD, load.slots[begun], request.blocks[block.index])
                    steps.draft.filling.append(block)
                if block.step != waited:
                    waited = block.step
                    steps.wait_for(request, waited)
                begun += 1
            self._advance(request, load, begun)

    def _advance(self, request: Request, load: Load, begun: int) -> None:
        """Count the blocks of a load that have begun as computed."""
        request.num_computed += (begun - load.begun) * self._block_size
        load.begun = begun

    def end(self, request: Request) -> None:
        """End the load of a request, all of it or what a fence leaves with nothing of it in flight."""
        load = self.loads.pop(request, None)
        if load is not None:
            self.cache.unpin(load.slots)
            for block in load.blocks:
                del block.users[request]
                if not block.users and self._coming.get(block.digest) is block:
                    del self._coming[block.digest]

    # --- for the store desk ---------------------------------------------------------------------------------

    def keep_for(self, request: Request, slots: Sequence[int], backend: str) -> None:
        """Pin slots that were fetched for a request that has not started, and count them for `backend`.

        The pins end when the request starts, ends or is held, and with the generation.
        """
        self.cache.pin(slots)
        kept = request.fetched = request.fetched or []
        kept += [(slot, backend) for slot in slots]

    def let_go(self, request: Request) -> None:
        """End the pins of slots that were fetched for a request."""
        if request.fetched:
            self.cache.unpin([slot for slot, _ in request.fetched])
            request.fetched = None

    # --- steps ----------------------------------------------------------------------------------------------

    def retired(self, record: StepRecord) -> list[Request]:
        """Enter the blocks that a retired step copied, here and there; return the requests whose loads it completed."""
        for slot, digest in record.entering:
            self._under_way.discard(digest)
            self.cache.enter(slot, digest)
        self.out_total += len(record.entering)
        self.in_total += len(record.filling)
        for block in record.filling:
            block.done = True
            self._device.enter(block.block, block.digest)
            if self._coming.get(block.digest) is block:
                del self._coming[block.digest]
        return self._loaded() if record.filling else []

    def _loaded(self) -> list[Request]:
        """End the loads whose blocks have all come, and return their requests."""
        loaded = []
        for request, load in list(self.loads.items()):
            done, count = load.done, len(load.blocks)
            while done < count and load.blocks[done].done:
                done += 1
            load.done = done
            self._advance(request, load, max(load.begun, done))
            if done == count:
                self.end(request)
                loaded.append(request)
        return loaded

    def void(self, record: StepRecord) -> None:
        """Free the slots that a step of a lost generation would have filled."""
        self.cache.release(slot for slot, _ in record.entering)

    def reset(self) -> None:
        """Forget all content and what waits to be copied; all loads have ended."""
        self._queue.clear()
        self._left_some = False
        self._under_way.clear()
        self.cache.forget_all()
