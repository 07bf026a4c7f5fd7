"""Requests with their times of arrival, as a client's process gets them, and what it saw of each."""

from __future__ import annotations

import random
import subprocess
import sys

import msgspec

from ppengine.bench.workload import Job


class Planned(msgspec.Struct, array_like=True):
    """One request."""

    at_s: float
    """Seconds from the start to its arrival."""
    prompt: list[int]
    output_len: int
    temperature: float
    top_p: float
    top_k: int
    seed: int


class Plan(msgspec.Struct, kw_only=True):
    """A client's work. `target`: `http://HOST:PORT` or `unix:/PATH`, or a socket of ours with the core behind it."""

    target: str
    requests: list[Planned]
    model: str = ""
    """Name of the model in requests over HTTP."""
    key: str = ""
    """API key; empty: none."""


class Outcome(msgspec.Struct, array_like=True):
    """One request as its client saw it, in seconds. Without an error it has come to its end."""

    sent_s: float
    """From the start to its sending."""
    late_s: float = 0.0
    """From its arrival to its sending: a slow client."""
    ttft_s: float = 0.0
    """From its sending to the first event with a choice."""
    e2e_s: float = 0.0
    gaps_s: list[float] = []
    """Between events with a choice."""
    tokens: int = 0
    """Output tokens, as the server counted them."""
    error: str = ""


class Seen(msgspec.Struct, kw_only=True):
    """Result of a client: the outcomes in the order of the requests."""

    outcomes: list[Outcome]
    seconds: float
    """From the start to the end of the last answer: the gap before the first request is a part of its rate."""
    busy: float
    """Share of one core that the client took."""


def poisson(jobs: list[Job], rate: float, seed: int) -> list[Planned]:
    """Return `jobs` with random arrivals, `rate` a second: exponential gaps, stretched so that their mean is exact."""
    chance = random.Random(f"arrivals {seed} {len(jobs)}")
    gaps = [chance.expovariate(1.0) for _ in jobs]
    stretch, at, found = len(jobs) / rate / sum(gaps), 0.0, []
    for number, (job, gap) in enumerate(zip(jobs, gaps, strict=True)):
        at += gap * stretch
        found.append(_planned(at, job, number))
    return found


def at_once(jobs: list[Job]) -> list[Planned]:
    """Return `jobs` that all arrive at the start."""
    return [_planned(0.0, job, number) for number, job in enumerate(jobs)]


def _planned(at_s: float, job: Job, number: int) -> Planned:
    how = job.sampling
    return Planned(at_s, job.prompt, job.output_len, how.temperature, how.top_p, how.top_k, number)


def run_client(module: str, plan: Plan) -> Seen:
    """Return what the client `module` of this package saw, in a process of its own. Raises ValueError if it fails."""
    command = [sys.executable, "-m", f"ppengine.bench.{module}"]
    ran = subprocess.run(command, input=msgspec.json.encode(plan), stdout=subprocess.PIPE, check=False)
    if ran.returncode:
        raise ValueError(f"the client {module} ended with exit code {ran.returncode}; its own words are above")
    return msgspec.json.decode(ran.stdout, type=Seen)


def report(seen: Seen) -> None:
    """Write what a client saw to its stdout, whole: with PYTHONUNBUFFERED, `sys.stdout.buffer` may write a part."""
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(msgspec.json.encode(seen))
