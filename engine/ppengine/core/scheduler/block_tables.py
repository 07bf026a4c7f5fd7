"""Block tables of requests: allocation with prefix hits and forks, growth, swap copies, release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ppengine.core.scheduler.block_pool import BlockPool, HostBlockPool
from ppengine.core.scheduler.cache_copies import CacheCopies, HostLimits
from ppengine.core.scheduler.request import Request
from ppengine.core.scheduler.shared_digests import SharedDigests
from ppengine.core.scheduler.step_log import StepLog, StepRecord
from ppengine.protocol.steps import MoveKind
from ppengine.protocol.tiers import PromptSources

HASHED_FIRST = 64
"""Blocks of a prompt whose digests are looked up first; twice as many follow while all are known."""


@dataclass(slots=True)
class Fit:
    """Source of a request's blocks: `shared`, a copy of `copied`, `coming`, and `fresh` new ones.

    `coming` and the first of the new ones are loaded from `host` slots.
    """

    need: int
    """Blocks that must be available, the watermark included."""
    have: int
    shared: list[int] = field(default_factory=list)
    copied: int | None = None
    fresh: int = 0
    computed: int = 0
    """Tokens that need not be computed, those on the host included."""
    host: list[int] = field(default_factory=list)
    coming: list[int] = field(default_factory=list)
    """Blocks that the loads of other requests bring."""

    @property
    def fits(self) -> bool:
        """Whether the blocks are available."""
        return self.need <= self.have


class BlockTables:
    """Assigns device and host blocks to requests. Copies go into the step log's draft."""

    def __init__(
        self, steps: StepLog, *, block_size: int, num_blocks: int, num_host_blocks: int,
        watermark: float, prefix_caching: bool, host_cache: HostLimits | None = None,
    ) -> None:  # fmt: skip
        """`host_cache`: limits of the host cache; None: there is none."""
        self.device = BlockPool(num_blocks)
        self.host = HostBlockPool(num_host_blocks)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.hit_tokens_total = 0
        """Tokens that starting requests found computed, since boot."""
        self._digests = SharedDigests(block_size)
        self._watermark = watermark
        self._steps = steps
        self._pins = 0
        self.copies: CacheCopies | None = None
        """Copies from and to the host cache; None without one."""
        if host_cache is not None and prefix_caching:
            self.copies = CacheCopies(
                steps, self.device, self.host, block_size=block_size, limits=host_cache, pin=self._pin
            )  # fmt: skip

    @property
    def watermark(self) -> int:
        """Blocks that a starting request must leave to running ones."""
        return int(self._watermark * self.device.limit)

    @property
    def pinned(self) -> int:
        """Number of block references that copies in unretired steps keep."""
        return self._pins

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    # --- allocation -----------------------------------------------------------------------------------------

    def fit(self, request: Request) -> Fit:
        """Return the blocks that the known tokens of `request` would get now, without taking them.

        All known tokens get their blocks at once, so a prefill never lacks them. At least one token
        is left to compute, for its logits.
        """
        known = request.num_tokens
        source = self._source(request, known)
        most = (known - 1) // self.block_size
        whole = min(len(source), most)
        rest = known - 1 - whole * self.block_size
        copied = source[whole] if len(source) > whole and rest else None
        if copied in self._steps.draft.fills:
            copied = None  # Copies of a step come before its rows.
        plan = self._fit(known, source[:whole], copied, rest)
        if copied is not None and not plan.fits:
            plan = self._fit(known, source[:whole], None, 0)
        # Positions that are loaded have no logits, as those of cached blocks.
        loads = self.copies is not None and not request.scores_prompt and whole < most and len(source) == whole
        if self.copies is not None and loads:
            digests = request.full_digests(most, self.block_size)[whole:]
            plan.host = self.copies.find(digests)
            plan.computed += len(plan.host) * self.block_size
            plan.coming = self.copies.coming(digests[: len(plan.host)])
            plan.fresh -= len(plan.coming)
            plan.need -= len(plan.coming)
        return plan

    def _fit(self, known: int, shared: list[int], copied: int | None, rest: int) -> Fit:
        device = self.device
        fresh = self.blocks_for(known) - len(shared)
        kept = device.count_cached(shared)
        kept += copied is not None and device.is_cached(copied)
        # A request alone may have the last block: the watermark protects running ones.
        spare = self.watermark if device.used else 0
        computed = len(shared) * self.block_size + (rest if copied is not None else 0)
        return Fit(fresh + spare, device.available - kept, shared, copied, fresh, computed)

    def _source(self, request: Request, known: int) -> list[int]:
        """Return the blocks, in order, that already hold the KV of a prefix of the known tokens."""
        leader = request.leader
        if leader is not None and not request.output_ids and self.can_fork(leader):
            return leader.blocks[: self.blocks_for(known)]
        if not self.prefix_caching or request.scores_prompt:
            return []  # Positions whose blocks are cached have no logits.
        self._digests.take(request)
        most = known // self.block_size
        count = min(HASHED_FIRST, most)
        # A long prompt that begins like no other is not hashed at once: its other blocks follow with its chunks.
        while len(found := self.device.lookup(request.full_digests(count, self.block_size))) == count < most:
            count = min(2 * count, most)
        return found

    def can_fork(self, leader: Request) -> bool:
        """Return whether a step that was sent computes the leader's prompt.

        The draft does not count: its copies come before its rows, so they would read blocks not yet
        written.
        """
        computed = leader.num_computed >= leader.num_prompt and leader.prompt_step < self._steps.draft.number
        return leader.state == "running" and leader.fence is None and computed

    def allocate(self, request: Request, plan: Fit) -> None:
        """Give `request` the blocks of `plan`, and begin its load from the host."""
        self.device.share_all(plan.shared + plan.coming)
        if plan.copied is not None:
            self._pin(plan.copied)
        fresh = [self.device.allocate() for _ in range(plan.fresh)]
        if plan.copied is not None:
            self._steps.copy(MoveKind.DEVICE, plan.copied, fresh[0])
        request.blocks = plan.shared + plan.coming + fresh
        request.num_computed = request.num_cached = plan.computed
        request.num_entered = len(plan.shared)
        self.hit_tokens_total += plan.computed
        self._steps.table_changed(request, 0)
        if self.copies is not None:
            self._start(self.copies, request, plan)

    def _start(self, copies: CacheCopies, request: Request, plan: Fit) -> None:
        """Note the sources of a start and begin its load; queue its device blocks that the host lacks."""
        size, totals, known = self.block_size, copies.totals, request.num_tokens
        backends = dict(request.fetched or ())
        loaded = len(plan.host) * size
        sources = PromptSources(device=plan.computed - loaded, host=loaded, computed=known - plan.computed)
        for slot in plan.host if backends else ():
            if (name := backends.get(slot)) is not None:
                sources.host -= size
                sources.backends[name] = sources.backends.get(name, 0) + size
        request.sources = sources
        totals.prompt += known
        totals.device += sources.device
        totals.host += sources.host
        totals.computed += sources.computed
        totals.backends.update(sources.backends)
        if request.leader is None:
            copies.queue(request.full_digests(len(plan.shared), size))
        if plan.host:
            request.num_computed -= loaded
            copies.start(request, plan.host, len(plan.coming))
        copies.let_go(request)

    def grow(self, request: Request) -> bool:
        """Give a running request one more block; return False if none is available."""
        if self.device.available < 1:
            return False
        request.blocks.append(self.device.allocate())
        self._steps.table_changed(request, len(request.blocks) - 1)
        return True

    def enter_ahead(self, request: Request, start: int, end: int) -> None:
        """Enter the blocks that the draft's row of tokens [start, end) fills into the prefix cache.

        Later rows may read them, those of the draft too: a step writes the KV of all its rows before any attention of
        the layer, and stages run steps in order. A step that is lost leaves no cache.
        """
        first, full = start // self.block_size, end // self.block_size
        if self.prefix_caching and full > first:
            digests = request.full_digests(full, self.block_size)
            for index in range(first, full):
                self.device.enter(request.blocks[index], digests[index])
            self._steps.draft.fills.update(request.blocks[first:full])

    def enter(self, request: Request, computed: int) -> None:
        """Enter the full blocks of the first `computed` tokens into the prefix cache; the host may have them now."""
        full = computed // self.block_size
        if full > request.num_entered:
            if self.prefix_caching:
                digests = request.full_digests(full, self.block_size)
                for index in range(request.num_entered, full):
                    self.device.enter(request.blocks[index], digests[index])
                if self.copies is not None:
                    self.copies.queue(digests[request.num_entered :])
            request.num_entered = full

    # --- swap -----------------------------------------------------------------------------------------------

    def swap_need(self, request: Request) -> int:
        """Return the number of host blocks that its computed tokens need."""
        return self.blocks_for(request.num_computed)

    def load_need(self, request: Request) -> int:
        """Return the number of device blocks that loading it needs."""
        return self.blocks_for(request.num_tokens)

    def copy_out(self, request: Request, host: list[int]) -> None:
        """Copy its computed blocks to `host`; both stay until that step has retired."""
        for source, target in zip(request.blocks, host, strict=False):
            self._steps.copy(MoveKind.OUT, source, target)
        request.host_blocks = host
        self._steps.touch(request)
        self._steps.draft.outs.append(request)

    def copy_in(self, request: Request) -> None:
        """Copy its host blocks to new device blocks; both stay until that step has retired."""
        request.blocks = [self.device.allocate() for _ in range(self.load_need(request))]
        request.num_entered = 0
        for source, target in zip(request.host_blocks, request.blocks, strict=False):
            self._steps.copy(MoveKind.IN, source, target)
        self._steps.table_changed(request, 0)
        self._steps.touch(request)
        self._steps.draft.loads.append(request)

    # --- release --------------------------------------------------------------------------------------------

    def drop_device(self, request: Request) -> None:
        """Release its device blocks, the end of the table first."""
        if self.copies is not None:
            self.copies.left(request.digests[: request.num_entered])
        self.device.release(reversed(request.blocks))
        request.blocks = []

    def drop_host(self, request: Request) -> None:
        """Release its host blocks."""
        self.host.release(request.host_blocks)
        request.host_blocks = []

    def exclusive(self, request: Request) -> int:
        """Return the number of its device blocks that no other request uses."""
        pins: Mapping[int, int] = self._steps.pins() if self._pins else {}
        return sum(1 for block in request.blocks if self.device.references(block) - pins.get(block, 0) == 1)

    # --- moves ----------------------------------------------------------------------------------------------

    def relocate(self, block: int, owners: list[Request]) -> None:
        """Move one block to a low one for all its owners; the copy goes into the draft."""
        target = self.device.relocate(block, len(owners))
        self._pins += 1
        self._steps.draft.pinned.append(block)
        self._steps.copy(MoveKind.DEVICE, block, target)
        for request in owners:
            index = request.blocks.index(block)
            request.blocks[index] = target
            self._steps.table_changed(request, index)
            self._steps.touch(request)

    def _pin(self, block: int) -> None:
        self.device.share(block)
        self._pins += 1
        self._steps.draft.pinned.append(block)

    def reset(self) -> None:
        """Drop the prefix cache and any limit below the size; no block may be in use."""
        self.device.drop_cache()
        self.device.reserve = 0
        self.device.set_limit(self.device.size)
        if self.copies is not None:
            self.copies.reset()

    def void(self, record: StepRecord) -> None:
        """Release the source blocks and the host slots of a step that a lost stage has not executed."""
        self.unpin(record)
        if self.copies is not None:
            self.copies.void(record)

    def unpin(self, record: StepRecord) -> None:
        """Release the source blocks of a retired step's copies."""
        self._pins -= len(record.pinned)
        self.device.release(record.pinned)
