"""`ppconsole bench --online`: requests that arrive at random over HTTP, at rates a second or shares of the highest one.

All requests at once come first. They give the highest rate, and what streaming over HTTP leaves of the throughput of
`LLM`. Each rate is then measured over HTTP and over the core's own socket, with other requests of the same lengths.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import statistics
from collections.abc import Callable, Iterator

import msgspec

from ppengine.bench.beside import WARM_UP
from ppengine.bench.load_plan import Plan, Planned, at_once, poisson, run_client
from ppengine.bench.online_figures import Figures, Slo, figures, ratios, remarks, table
from ppengine.bench.online_servers import EngineServer, Server, VllmServer
from ppengine.bench.process_cpu import cpu_by_module
from ppengine.bench.sides import run_engine
from ppengine.bench.workload import Job
from ppengine.common.config import Profile

URL_KEY = "OPENAI_API_KEY"
"""Variable with the key of a server at a URL."""
_CPU = frozenset({"http", "core"})
"""Processes whose CPU time a token is reported."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """Arguments of an online measurement. `rates` or `loads` is empty."""

    rates: list[float]
    """Requests a second."""
    loads: list[float]
    """Percent of the highest rate."""
    rounds: int
    """Measurements of all requests at once."""
    seed: int
    slo: Slo | None
    baseline: bool
    """Whether `LLM` and the core's socket are measured too."""
    url: str | None
    beside: bool
    """Whether vLLM is measured too."""
    vllm_python: str
    beside_words: str


class Online:
    """Measures servers one after the other, and keeps a row of each measurement. Raises EngineError, ValueError."""

    def __init__(self, profile: Profile, work: Iterator[list[Job]], choices: Choices, say: Callable[..., None]) -> None:
        self._profile, self._work, self._choices, self._say = profile, work, choices, say
        self._rows: list[Figures] = []
        # Both sides get the same requests at a load; over the socket they have other ids of the same lengths.
        self._at_loads = [(next(work), next(work)) for _ in choices.rates or choices.loads]

    def run(self) -> None:
        """Measure all that was chosen, and print the table."""
        choices = self._choices
        if choices.url is not None:
            with Server(choices.url, os.environ.get(URL_KEY, "")) as server:
                self._loads(server, self._all_at_once(server))
        else:
            self._own()
        print("\n".join([*table(self._rows), *remarks(self._rows)]))
        self._compare()

    def _own(self) -> None:
        choices, profile = self._choices, self._profile
        with EngineServer(profile) as engine:
            highest = self._all_at_once(engine)
            if not choices.beside or choices.rates:
                self._loads(engine, highest)
        if choices.beside:
            with VllmServer(profile, choices.vllm_python, shlex.split(choices.beside_words)) as vllm:
                self._say(vllm=vllm.version)
                highest = min(highest, self._all_at_once(vllm))
                self._loads(vllm, highest)
            if choices.loads:
                # Only now it is known which rates both can serve.
                with EngineServer(profile) as engine:
                    self._warm(engine)
                    self._loads(engine, highest)

    def _all_at_once(self, server: Server) -> float:
        """Measure all requests at once; return the requests a second that the server reached."""
        self._warm(server)
        reached = []
        for _ in range(self._choices.rounds):
            offline = self._offline(server)
            before = _cpu(server)
            row = self._measure(server, "all", None, at_once(next(self._work)))
            if row.errors == row.requests:
                raise ValueError(f"{server.name} served no request: {row.first_error}")
            after, tokens = _cpu(server), row.tokens_s * (row.requests - row.errors) / row.reached_rate
            used = {f"{name}_us": round(1e6 * (after[name] - before[name]) / tokens, 1) for name in after.keys() & _CPU}
            if used:
                self._say(load="all", cpu_a_token=used)
                print(f"CPU a token: HTTP {used['http_us']:.1f} µs, core {used['core_us']:.1f} µs")
            if offline is not None:
                share = row.tokens_s / offline
                self._say(load="all", offline_tok_s=round(offline, 1), over_http=round(share, 4))
                print(f"over HTTP {row.tokens_s:,.1f} tokens/s, offline {offline:,.1f}: {share:.3f}")
            reached.append(row.reached_rate)
        return statistics.median(reached)

    def _offline(self, server: Server) -> float | None:
        """Return the tokens a second of the engine as `LLM`; None for other servers."""
        if not isinstance(server, EngineServer) or not self._choices.baseline:
            return None
        jobs = next(self._work)
        return sum(job.output_len for job in jobs) / run_engine(server.llm, jobs)

    def _loads(self, server: Server, highest: float) -> None:
        """Measure a server at each load."""
        choices = self._choices
        named = [(f"{rate:g}/s", rate) for rate in choices.rates]
        named += [(f"{load:g} %", highest * load / 100) for load in choices.loads]
        for (load, rate), (jobs, others) in zip(named, self._at_loads, strict=True):
            over_http = self._measure(server, load, rate, poisson(jobs, rate, choices.seed))
            if isinstance(server, EngineServer) and choices.baseline:
                direct = self._measure(server, load, rate, poisson(others, rate, choices.seed), direct=True)
                more = over_http.ttft_ms[0] - direct.ttft_ms[0]
                self._say(load=load, ttft_p50_over_socket_ms=round(more, 3))
                print(f"at {load}: TTFT p50 is {more:+.2f} ms over the core's own socket")

    def _measure(
        self, server: Server, load: str, rate: float | None, requests: list[Planned], *, direct: bool = False
    ) -> Figures:
        """Run one client; `direct`: over the core's own socket."""
        if direct:
            assert isinstance(server, EngineServer), "only our engine has that socket"
            seen = run_client("socket_client", Plan(target=server.socket, requests=requests))
        else:
            plan = Plan(target=server.target, requests=requests, model=server.model, key=server.key)
            seen = run_client("http_client", plan)
        row = figures("socket" if direct else server.name, load, rate, seen, self._choices.slo)
        self._rows.append(row)
        self._say(**msgspec.to_builtins(row))
        return row

    def _warm(self, server: Server) -> None:
        """Run a few requests that do not count."""
        few = at_once(next(self._work)[:WARM_UP])
        run_client("http_client", Plan(target=server.target, requests=few, model=server.model, key=server.key))

    def _compare(self) -> None:
        """Print our figures over those of vLLM, by load; the last measurement of each counts."""
        ours, theirs = (
            {row.load: row for row in self._rows if row.side == name} for name in (EngineServer.name, VllmServer.name)
        )
        for load, row in theirs.items():
            found = ratios(ours[load], row)
            self._say(load=load, ratios=found)
            print(f"engine / vLLM at {load}: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))


def _cpu(server: Server) -> dict[str, float]:
    """Return the CPU seconds of the engine's processes."""
    return cpu_by_module(server.llm.llm_engine.supervisor_pid) if isinstance(server, EngineServer) else {}
