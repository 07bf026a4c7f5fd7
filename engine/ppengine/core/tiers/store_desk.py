"""The store desk: routes messages of stores, and lets finder, fetcher and writer take a turn.

Without a backend it does nothing. Stores that do not come cost the engine nothing but their chunks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ppengine.checkpoint.model_spec import ModelSpec
from ppengine.common.config import EngineConfig
from ppengine.core.events import Events
from ppengine.core.journal_records import TierState
from ppengine.core.scheduler import Retirement, Scheduler
from ppengine.core.scheduler.cache_copies import CacheCopies
from ppengine.core.scheduler.request import Request
from ppengine.core.stage_records import Stages
from ppengine.core.tiers.backends import Backend, Backends
from ppengine.core.tiers.chunk_writer import ChunkWriter
from ppengine.core.tiers.chunks import chunk_blocks
from ppengine.core.tiers.fetch_costs import Costs
from ppengine.core.tiers.jobs import Jobs
from ppengine.core.tiers.kept_prefixes import KeptPrefixes
from ppengine.core.tiers.known_chunks import KnownChunks
from ppengine.core.tiers.open_pools import FIRST, OpenPools, Send
from ppengine.core.tiers.prefix_fetcher import PrefixFetcher
from ppengine.core.tiers.prefix_finder import PrefixFinder
from ppengine.core.tiers.store_links import StoreLinks
from ppengine.core.tiers.store_records import StoreRecord
from ppengine.protocol.reports import NODE_LOST, ProcessInfo
from ppengine.protocol.store_messages import Cancel, Done, Fetched, Found, Stored, StoreFigures, StoreReady, Weights

UNSOUGHT_MOST = 1024
"""Requests that wait until chunks can be found; of more the first ones of a queue, the newest of those that come."""


@dataclass(eq=False)
class StoreDesk:
    """Makes the parts of tier 2 and owns the slots of the present generation."""

    _config: EngineConfig
    _spec: ModelSpec
    _stages: Stages
    send: Send
    _event: Events
    _clock: Callable[[], float]
    looked: Callable[[float], None]
    """Called with the seconds that a request waited for an answer about its chunks."""
    _retired_at: float = field(init=False, default=0.0)
    """Time at which the newest step retired."""
    _copies: CacheCopies | None = field(init=False, default=None)
    """Copies of the newest generation that served."""
    _unsought: deque[Request] = field(init=False, default_factory=lambda: deque(maxlen=UNSOUGHT_MOST))
    """Requests to look for as soon as chunks can be found, unless they have begun."""

    def __post_init__(self) -> None:
        tiers, clock, send = self._config.profile.tiers, self._clock, self.send
        # Answers to a core before this one have smaller numbers: the clock goes on.
        self.jobs = jobs = Jobs(lambda place, job: send(place, Cancel(job)), clock, first=int(clock() * 1e6))
        self.backends = backends = Backends(tiers.backends, clock)
        self.links = StoreLinks(self._config, self._spec, self._stages, backends, send, clock)
        self.known, self.costs, self.kept = KnownChunks(clock), Costs(clock), KeptPrefixes(clock)
        self.fetcher = PrefixFetcher(
            self.known, jobs, self.costs, backends, self.kept, send, self._event,
            tiers.fetch_ms / 1e3, tiers.fetches, tiers.least_tokens, clock,
        )  # fmt: skip
        self.finder = PrefixFinder(
            self.known, jobs, self.fetcher, backends, send, tiers.find_ms / 1e3, clock, self.looked
        )  # fmt: skip
        self.writer = ChunkWriter(self.known, jobs, backends, send, clock)

    # --- messages -------------------------------------------------------------------------------------------

    def take(self, name: bytes, message: object) -> None:
        """Take a message of the store with the routing id `name`."""
        record = self.links.by_name(name)
        if record is None:
            return
        record.seen = self._clock()
        match message:
            case StoreReady():
                self._lose(record, f"{record.name} was restarted")
                record.restart(message, self._clock())
                self.finder.wake()
            case StoreFigures():
                self.links.take_figures(record, message)
            case Found() | Fetched() | Stored() | Done():
                self.jobs.take(record.place, message)
            case Weights() if record.place == FIRST:
                self._take_weights(message)
        self.links.update()

    def _take_weights(self, message: Weights) -> None:
        """Take the hash of the weight files. The first one counts: it is of the files that the stages have loaded."""
        links, error = self.links, message.error
        if not links.weights:
            links.weights = message.digest
        elif message.digest and message.digest != links.weights:
            error = "the weight files were changed while the engine runs; restart it"
        else:
            error = links.weights_error if message.error else ""
        if error and error != links.weights_error:
            self._event("store.failed", f"no chunk is found or put: {error}")
        links.weights_error = error

    def on_process(self, info: ProcessInfo) -> None:
        """Note the end of a store's process, as the supervisor reports it; other roles do not matter.

        Its event is the gateway's, which has the supervisor's fact of every end, also without a core.
        """
        record = self.links.by_name(info.role.encode())
        if record is None or info.exit_code is None:
            return
        if record.pid is None:
            # One of another node is reported later than it starts: this may be the end of the one before it.
            if not info.node or info.exit_code == NODE_LOST:
                self.links.inherited.done(record.place)
        elif (record.pid, record.node) == (info.pid, info.node):
            why = f"{record.name} (pid {info.pid}) has ended, {info.detail or f'exit code {info.exit_code}'}"
            self._lose(record, why)

    def _lose(self, record: StoreRecord, why: str) -> None:
        """End all jobs of a store: its process is dead."""
        record.lose()
        self.jobs.lose(record.place, why)
        self.links.inherited.done(record.place)

    # --- requests -------------------------------------------------------------------------------------------

    def admitted(self, requests: list[Request]) -> None:
        """Look for the chunks of a new prompt, before a step can begin it."""
        pools = self.links.pools
        if pools is None or not self.ready:
            if len(self.backends):
                self._unsought.append(requests[0])
        elif requests[0].state == "waiting":
            self.finder.consider(pools, requests[0])

    def retired(self, retirement: Retirement, sent: float, tokens: int) -> None:
        """Take a step of `tokens`, sent at `sent`: its requests use chunks, and it says how long prefills take."""
        if not len(self.backends):
            return
        now, prompt = self._clock(), retirement.prompt_tokens
        if prompt:
            # Steps behind each other share the stages: the time since the one before counts.
            self.costs.computed(prompt, (now - max(sent, self._retired_at)) * min(1.0, prompt / max(1, tokens)))
        self._retired_at = now
        pools = self.links.pools
        if pools is None:
            return
        for request in retirement.began:
            if request.leader is None:
                self.writer.used(pools, request)
        for request in retirement.finished:
            self.writer.used(pools, request, request.num_prompt)

    # --- turns ----------------------------------------------------------------------------------------------

    def advance(self, scheduler: Scheduler | None, generation: int) -> None:
        """End late jobs and begin due ones. `scheduler` None: the stages do not serve."""
        if self._idle:
            return
        if scheduler is None:
            self._leave("the stages do not serve")
        else:
            self._serve(scheduler, generation)
        self.jobs.advance()
        pools = self.links.pools
        if pools is None:
            return
        self.links.inherited.advance(pools)
        self.kept.advance(pools)
        self.finder.advance(pools)
        self.fetcher.advance(pools)
        if self.ready:
            self._look(pools)
            self.writer.advance(pools)

    def _look(self, pools: OpenPools) -> None:
        """Look for the chunks of requests that a lost stage has set back, and of those that came meanwhile.

        A store that owes answers of an older generation may hang: nothing waits for it again.
        """
        queues, unsought = pools.scheduler.queues, self._unsought
        if unsought and not pools.host.quarantined:
            requests = list(unsought)
            unsought.clear()
            for request in requests:
                if request.state == "waiting" and request.id in queues.requests and not queues.follows(request):
                    self.finder.consider(pools, request)

    @property
    def _idle(self) -> bool:
        """Whether there is no backend, and nothing is left of one."""
        busy = len(self.backends) or len(self.jobs) or len(self.kept) or self.links.inherited.holds
        return not busy and self.next_deadline is None

    @property
    def next_deadline(self) -> float | None:
        """Time at which a turn is due without a message; None: there is none."""
        if self.links.pools is None and not len(self.jobs):
            return None  # No backend has ever been there, or no stage serves.
        times = (self.jobs.next_deadline, self.finder.next_deadline, self.fetcher.next_deadline)
        return min((time for time in times if time is not None), default=None)

    @property
    def ready(self) -> bool:
        """Whether chunks can be found, fetched and put."""
        return bool(len(self.backends)) and not self.links.why_not_ready

    def _serve(self, scheduler: Scheduler, generation: int) -> None:
        """Open the slots of a generation in which all stages have met."""
        if self.links.pools is not None and self.links.pools.generation == generation:
            return
        self._leave("a new generation has begun")
        copies, ready = scheduler.blocks.copies, self.links.ready_by_place()
        if copies is None or any(each.slots_fd < 0 or each.slot_bytes <= 0 for each in ready.values()):
            return
        blocks = chunk_blocks(self._config.profile.memory.block_size)
        sizes = {place: each.slot_bytes for place, each in ready.items()}
        self._copies = copies
        self.links.pools = pools = OpenPools(scheduler, copies, generation, blocks, sizes)
        copies.cache.on_evict = self.writer.on_evict
        self._unsought.extend(scheduler.queues.waiting[:UNSOUGHT_MOST])
        self.links.inherited.hold(pools)
        self.links.update()

    def _leave(self, why: str) -> None:
        """End everything that is about the slots of an older generation."""
        pools, self.links.pools = self.links.pools, None
        if pools is not None:
            self.finder.stop(pools, why)
            self.fetcher.stop(pools, why)
            self.kept.stop(pools)
            self.writer.stop(pools)

    # --- backends -------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Send changed settings of backends to all stores."""
        self.finder.wake()
        self.known.forget_absent()
        self.links.update()

    def hit_tokens(self, backend: Backend) -> int:
        """Return the tokens that starts loaded from a backend; copies go on with the counts of the core before."""
        return backend.hit_tokens if self._copies is None else self._copies.totals.backends[backend.name]

    def forget_chunks(self, backend: str) -> None:
        """Forget which chunks a backend has."""
        self.known.drop_backend(backend)
        self.writer.drop_candidates(backend)

    def add(self, backend: Backend) -> None:
        """Add a backend. Its counts begin at zero, also if there was one of its name."""
        if self._copies is not None:
            self._copies.totals.end_backend(backend.name)
        self.backends.add(backend)
        self.changed()

    def forget(self, backend: str) -> None:
        """Forget a backend."""
        self.backends.remove(backend)
        self.links.forget(backend)
        self.forget_chunks(backend)
        self.costs.forget(backend)
        self.changed()

    # --- a core before or after this one --------------------------------------------------------------------

    def state(self) -> TierState | None:
        """Return everything for the journal; None if no backend has ever been there."""
        if not len(self.backends) and not self._config.profile.tiers.backends and not self.links.weights:
            return None
        backends, failed = self.backends.state(self.hit_tokens), self.fetcher.failed_total
        return TierState(self.links.weights, backends, failed, self.writer.dropped_total)

    def restore(self, state: TierState | None) -> None:
        """Go on with the backends of the core before this one, whose fetches may still write into slots."""
        if state is not None:
            self.links.weights, self.fetcher.failed_total = state.weights, state.failed_fetches
            self.writer.dropped_total = state.dropped
            self.backends.restore(state.backends)
            self.links.inherited.begin()
