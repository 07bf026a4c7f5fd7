"""A client of the core's own socket, without HTTP: `python -m ppengine.bench.socket_client`, a `Plan` on stdin.

The difference of its times and those of `http_client` is the price of HTTP.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time

import msgspec
import uvloop

from ppengine.bench.load_plan import Outcome, Plan, Planned, Seen, report
from ppengine.http.followed import Followed
from ppengine.http.front_link import FrontLink
from ppengine.protocol.offline import Piece
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.verbs import Submit


async def run(plan: Plan) -> Seen:
    """Send each request at its time, and return when the last one has ended."""
    link = FrontLink(plan.target, f"bench-{os.getpid()}", lambda state: None)
    reading = asyncio.create_task(link.run())
    submissions = [_submission(number, one) for number, one in enumerate(plan.requests)]
    while link.state is None:
        await asyncio.sleep(0.01)
    gc.collect()
    gc.disable()
    cpu, began, tasks = time.process_time(), time.perf_counter(), []
    for one, submission in zip(plan.requests, submissions, strict=True):
        if (wait := began + one.at_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(_ask(link, submission, began, one.at_s)))
    outcomes = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - began
    reading.cancel()
    await asyncio.wait([reading])
    return Seen(outcomes=outcomes, seconds=seconds, busy=(time.process_time() - cpu) / seconds)


async def _ask(link: FrontLink, submission: Submit, began: float, at_s: float) -> Outcome:
    sent = time.perf_counter()
    outcome = Outcome(sent - began, sent - began - at_s)
    answer, followed = await link.submit([submission], "bench", "bench", time.monotonic())
    if answer.error:
        outcome.error = answer.error
        return outcome
    await _Reader(followed[0], outcome, sent).over.wait()
    return outcome


class _Reader:
    """Fills in the outcome of one request."""

    def __init__(self, followed: Followed, outcome: Outcome, sent: float) -> None:
        self._followed, self._outcome, self._sent = followed, outcome, sent
        self._newest = 0.0
        self.over = asyncio.Event()
        followed.to(self._take)

    def _take(self, piece: Piece) -> None:
        outcome, now = self._outcome, time.perf_counter()
        if piece.token_ids and self._newest:
            outcome.gaps_s.append(now - self._newest)
        elif piece.token_ids:
            outcome.ttft_s = now - self._sent
        self._newest = now
        outcome.tokens += len(piece.token_ids)
        if self._followed.error or piece.finish_reason is not None:
            ended = "" if piece.finish_reason == "length" else f"{piece.finish_reason} {piece.loss}"
            outcome.error, outcome.e2e_s = self._followed.error or ended, now - self._sent
            self.over.set()


def _submission(number: int, one: Planned) -> Submit:
    sampling = SamplingParams(
        temperature=one.temperature, top_p=one.top_p, top_k=one.top_k, seed=one.seed, max_tokens=one.output_len,
        ignore_eos=True, detokenize=False,
    )  # fmt: skip
    return Submit(prompt_token_ids=one.prompt, sampling=sampling, request=f"bench-{os.getpid()}-{number}")


def main() -> None:
    """Run the plan on stdin and print the outcomes."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=Plan)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        seen = runner.run(run(plan))
    report(seen)


if __name__ == "__main__":
    main()
