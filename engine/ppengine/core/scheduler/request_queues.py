"""Who stands where: waiting, swapped, running, and inside running the line of decodes and the open prefills."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator

from ppengine.core.scheduler.request import Request


def by_arrival(request: Request) -> int:
    """Key of first come, first served."""
    return request.arrival


class ReadyLine:
    """Requests with one token to give, those whose last row is longest ago first.

    Not a plain queue: where the core schedules ahead, a request comes back to the line when it is scheduled or when
    a step retires, and in that order one half of the requests could be given two steps in a row while the other
    half waits. Each second step would then need the token of the step right before it, and the stages take turns.
    """

    def __init__(self) -> None:
        self._by_step: dict[int, deque[Request]] = {}
        """Requests by the number of the step of their last row; few keys, since a step is soon followed."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, request: Request) -> bool:
        return request in self._by_step.get(request.last_step, ())

    @property
    def oldest_step(self) -> int:
        """Step of the last row of the request that is first; the line must not be empty."""
        return min(self._by_step)

    def append(self, request: Request) -> None:
        """Add a request behind those whose last row is as long ago."""
        self._line_of(request).append(request)

    def put_back(self, request: Request) -> None:
        """Add a request that was popped and got nothing, in front of those."""
        self._line_of(request).appendleft(request)

    def pop(self) -> Request:
        """Take the first request out."""
        step = self.oldest_step
        line = self._by_step[step]
        request = line.popleft()
        if not line:
            del self._by_step[step]
        self._count -= 1
        return request

    def remove(self, request: Request) -> None:
        """Take one request out. Raises ValueError if it is not here."""
        line = self._by_step.get(request.last_step, deque())
        line.remove(request)
        if not line:
            del self._by_step[request.last_step]
        self._count -= 1

    def _line_of(self, request: Request) -> deque[Request]:
        self._count += 1
        return self._by_step.setdefault(request.last_step, deque())


class Lines:
    """The queues. Held requests and followers of an unfinished prompt are in none of them."""

    def __init__(self, max_pending: int) -> None:
        self.max_pending = max_pending
        """Unretired samples that a request may have before it is given the next one: 1, or 2 ahead."""
        self.waiting: deque[Request] = deque()
        self.swapped: list[Request] = []
        self.running: dict[Request, None] = {}
        """Requests with device blocks, loading ones and fenced ones among them."""
        self.ready = ReadyLine()
        """Running requests with one token to give."""
        self.prefilling: list[Request] = []
        """Running requests with more of their known tokens to compute, first come first."""
        self.parked = 0
        """Followers that wait for their leader's prompt."""

    def put_waiting(self, request: Request) -> None:
        """Put a request into the line by its arrival: what was here before goes in front of what came later."""
        request.state = "waiting"
        waiting = self.waiting
        if not waiting or waiting[-1].arrival < request.arrival:
            waiting.append(request)
            return
        for index, other in enumerate(waiting):
            if other.arrival > request.arrival:
                waiting.insert(index, request)
                return

    def first_waiting(self, begun: bool) -> Request | None:
        """Return who is admitted next; `begun`: of those that have run before."""
        if not begun:
            return self.waiting[0] if self.waiting else None
        return next((request for request in self.waiting if request.begun), None)

    def put_swapped(self, request: Request) -> None:
        """Put a request into the line of those that come back from the host, by its arrival."""
        request.state = "swapped"
        insort(self.swapped, request, key=by_arrival)

    def put_ready(self, request: Request) -> None:
        """Let a running request have its next decode."""
        if not request.queued:
            request.queued = True
            self.ready.append(request)

    def put_prefilling(self, request: Request) -> None:
        """Let a running request have its next chunk."""
        if request not in self.prefilling:
            insort(self.prefilling, request, key=by_arrival)

    def resume(self, request: Request) -> None:
        """Put a running, unfenced request where its next tokens come from, unless it has to wait for a retirement."""
        computed = request.num_computed
        if request.state != "running" or request.fence is not None or request in self.prefilling:
            return
        if computed < len(request.prompt_ids) or request.num_tokens + request.pending - computed > 1:
            self.put_prefilling(request)
        elif request.pending < self.max_pending and len(request.output_ids) + request.pending < request.max_tokens:
            self.put_ready(request)

    def leave(self, request: Request) -> None:
        """Take a request out of the lines where it could be given tokens; it stays in `running`."""
        if request.queued:
            request.queued = False
            self.ready.remove(request)
        elif request in self.prefilling:
            self.prefilling.remove(request)

    def forget(self, request: Request) -> None:
        """Take a request out of every line."""
        self.leave(request)
        if request in self.running:
            del self.running[request]
        elif request.state == "swapped":
            self.swapped.remove(request)
        elif request.state == "waiting":
            leader = request.leader
            if leader is not None and request in leader.followers:
                leader.followers.remove(request)
                self.parked -= 1
            else:
                self.waiting.remove(request)

    def park(self, request: Request, leader: Request) -> None:
        """Keep a follower off the line until its leader's prompt is computed."""
        leader.followers.append(request)
        self.parked += 1

    def unpark(self, leader: Request) -> None:
        """Put the followers of `leader` into the line."""
        followers, leader.followers = leader.followers, []
        self.parked -= len(followers)
        for follower in followers:
            self.put_waiting(follower)

    def newest_first(self) -> Iterator[Request]:
        """Return running requests that are not fenced, the newest first: the order of victims."""
        return iter(sorted((r for r in self.running if r.fence is None), key=by_arrival, reverse=True))
