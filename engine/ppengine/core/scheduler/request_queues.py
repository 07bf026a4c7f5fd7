"""The queues of requests: waiting, swapped, held and running, and those set aside."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from ppengine.core.scheduler.request import FORCED_MOST, Request
from ppengine.protocol.snapshot import Queues


class ReadyQueue:
    """Requests whose next token can be sampled at once, the one with the oldest last row first.

    If the core schedules ahead, a request returns here both when it is scheduled and when a step
    retires. A plain queue could then give half of the requests two steps in a row while the other
    half waits. Each second step would need the token of the step right before it, and the stages
    would idle in turn.
    """

    def __init__(self) -> None:
        self._by_step: dict[int, deque[Request]] = {}
        """Requests by the step number of their last row; few keys at a time."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, request: Request) -> bool:
        return request in self._by_step.get(request.last_step, ())

    def append(self, request: Request) -> None:
        """Add a request behind those of the same last step."""
        self._count += 1
        queue = self._by_step.get(request.last_step)
        if queue is None:
            queue = self._by_step[request.last_step] = deque()
        queue.append(request)

    def put_back(self, request: Request) -> None:
        """Add a taken request that got no token, in front of those of the same last step."""
        self._count += 1
        self._by_step.setdefault(request.last_step, deque()).appendleft(request)

    def take(self, newest: int, most: int) -> list[Request]:
        """Remove and return the first requests, `most` at most, whose last row was in step `newest` or before."""
        taken: list[Request] = []
        for step in sorted(self._by_step):
            left = most - len(taken)
            if step > newest or not left:
                break
            queue = self._by_step[step]
            if left >= len(queue):
                taken += queue
                del self._by_step[step]
            else:
                taken += [queue.popleft() for _ in range(left)]
        self._count -= len(taken)
        return taken

    def remove(self, request: Request) -> None:
        """Remove one request. Raises ValueError if it is not queued."""
        queue = self._by_step.get(request.last_step, deque())
        queue.remove(request)
        if not queue:
            del self._by_step[request.last_step]
        self._count -= 1


class RequestQueues:
    """All requests and their queues. Followers of an unfinished prompt are in none.

    Nor are requests that are set aside while their chunks are found or fetched:

        set_aside(request, "finding", why)    from the waiting queue
        set_aside(request, "fetching", why)   from `finding`; or only with another `why`
        take_back(request)                    to the waiting queue, at its place by its order

    They hold no device block and cost a step nothing. An abort, a hold or a new generation takes
    them from `aside` without a word: look whether they are in it before anything else.
    """

    def __init__(self, max_pending: int) -> None:
        self.max_pending = max_pending
        """Unretired samples that a request may have: 1, or 2 if the core schedules ahead."""
        self.requests: dict[str, Request] = {}
        """Requests that have not ended or still have steps in flight, by id."""
        self.waiting: list[Request] = []
        self.swapped: list[Request] = []
        self.held: dict[Request, None] = {}
        self.running: dict[Request, None] = {}
        """Requests with device blocks, loading and fenced ones included."""
        self.ready = ReadyQueue()
        """Running requests with one token to compute, or a few that a grammar has forced."""
        self.prefilling: list[Request] = []
        """Running requests with more than one known token to compute."""
        self.parked = 0
        """Followers that wait for their leader's prompt."""
        self.aside: dict[Request, str] = {}
        """Requests in the states `finding` and `fetching`, with the reason to show."""
        self.constrained: dict[Request, None] = {}
        """Requests whose tokens need masks."""
        self.unmasked: dict[Request, None] = {}
        """Those of them whose next mask was not asked for."""
        self.unconstrained: list[Request] = []
        """Constrained requests that have ended, until the core takes them."""

    def counts(self) -> Queues:
        """Return the number of requests in each state."""
        loading = sum(1 for request in self.running if request.state == "loading")
        return Queues(
            waiting=len(self.waiting) + self.parked,
            running=len(self.running) - loading,
            swapped=len(self.swapped),
            held=len(self.held),
            loading=loading,
            finding=sum(1 for request in self.aside if request.state == "finding"),
            fetching=sum(1 for request in self.aside if request.state == "fetching"),
        )

    @contextmanager
    def reordering(self, request: Request) -> Iterator[None]:
        """Take a request out of the sorted queues while its order changes, then put it back by the new one."""
        queues = [queue for queue in (self.waiting, self.swapped, self.prefilling) if request in queue]
        for queue in queues:
            queue.remove(request)
        yield
        for queue in queues:
            insort(queue, request, key=Request.order)

    # --- in -------------------------------------------------------------------------------------------------

    def enqueue(self, request: Request) -> None:
        """Queue a new request; a follower waits until its leader's prompt is computed."""
        self.enter(request)
        if request.leader is None:
            self.put_waiting(request)
        else:
            request.leader.followers.append(request)
            self.parked += 1

    def enter(self, request: Request) -> None:
        """Take a request in, before it has a queue."""
        self.requests[request.id] = request
        if request.constrained:
            self.constrained[request] = self.unmasked[request] = None

    def left(self, request: Request) -> None:
        """Note that a request has ended: it needs no further mask."""
        if request.constrained and request in self.constrained:
            del self.constrained[request]
            self.unmasked.pop(request, None)
            self.unconstrained.append(request)

    def put_waiting(self, request: Request) -> None:
        """Queue a new or preempted request at its place by its order."""
        request.state = "waiting"
        insort(self.waiting, request, key=Request.order)

    def put_swapped(self, request: Request) -> None:
        """Queue a request to be loaded from the host."""
        request.state = "swapped"
        insort(self.swapped, request, key=Request.order)

    def put_held(self, request: Request, by: str) -> None:
        """Keep a request from running until it is released."""
        request.state = "held"
        request.held_by = by
        self.held[request] = None

    def put_running(self, request: Request) -> None:
        """Move a waiting request to `running`."""
        self.forget(request)
        request.state = "running"
        self.running[request] = None

    def take_ready(self, newest: int, most: int) -> list[Request]:
        """Take the next requests to decode, `most` at most, whose last row was in step `newest` or before."""
        taken = self.ready.take(newest, most)
        for request in taken:
            request.queued = False
        return taken

    def put_ready_back(self, request: Request) -> None:
        """Put a request that was taken and got no token in front of the others."""
        request.queued = True
        self.ready.put_back(request)

    def put_prefilling(self, request: Request) -> None:
        """Queue a running request for its next chunk."""
        if request not in self.prefilling:
            insort(self.prefilling, request, key=Request.order)

    def resume(self, request: Request) -> None:
        """Queue a request for its next tokens, unless it must wait for a retirement."""
        if request.state != "running" or request.fence is not None or request in self.prefilling:
            return
        prompt, outputs, computed = len(request.prompt_ids), len(request.output_ids), request.num_computed
        pending = request.pending
        most = 1 + FORCED_MOST if request.constrained else 1
        if computed < prompt or prompt + outputs + pending - computed > most:
            self.put_prefilling(request)
        elif not request.queued and outputs + pending < request.max_tokens and request.may_sample(self.max_pending):
            request.queued = True
            self.ready.append(request)

    def set_aside(self, request: Request, state: Literal["finding", "fetching"], why: str = "") -> None:
        """Take a request from the waiting queue while its chunks are found or fetched; `why` is shown.

        One that is aside already changes its state. Raises ValueError if it is in neither: a
        follower of an unfinished prompt cannot be set aside.
        """
        if request not in self.aside:
            if request.state != "waiting" or self.follows(request):
                raise ValueError(f"{request.id} is {request.state} and not in the waiting queue")
            self.forget(request)
        request.state = state
        self.aside[request] = why

    def take_back(self, request: Request) -> None:
        """Put a request that is aside back to its place in the waiting queue. Raises KeyError if it is not."""
        del self.aside[request]
        self.put_waiting(request)

    def unpark(self, leader: Request) -> None:
        """Move the followers of `leader` to the waiting queue."""
        followers, leader.followers = leader.followers, []
        self.parked -= len(followers)
        for follower in followers:
            self.put_waiting(follower)

    # --- out ------------------------------------------------------------------------------------------------

    @staticmethod
    def follows(request: Request) -> bool:
        """Return whether a request waits for its leader's prompt."""
        return request.leader is not None and request in request.leader.followers

    def first_waiting(self, begun: bool) -> Request | None:
        """Return the next request to start; with `begun`, the next one that has run before."""
        if not begun:
            return self.waiting[0] if self.waiting else None
        return next((request for request in self.waiting if request.begun), None)

    def unfenced(self) -> list[Request]:
        """Return the running requests without a fence: possible victims."""
        return [request for request in self.running if request.fence is None]

    def leave(self, request: Request) -> None:
        """Remove a request from `ready` and `prefilling`; it stays in `running`."""
        if request.queued:
            request.queued = False
            self.ready.remove(request)
        elif request in self.prefilling:
            self.prefilling.remove(request)

    def forget(self, request: Request) -> None:
        """Remove a request from every queue."""
        self.leave(request)
        if request in self.running:
            del self.running[request]
        elif request.state == "swapped":
            self.swapped.remove(request)
        elif request.state == "held":
            del self.held[request]
        elif request in self.aside:
            del self.aside[request]
        elif request.state == "waiting":
            if request.leader is not None and self.follows(request):
                request.leader.followers.remove(request)
                self.parked -= 1
            else:
                del self.waiting[bisect_left(self.waiting, request.order(), key=Request.order)]
