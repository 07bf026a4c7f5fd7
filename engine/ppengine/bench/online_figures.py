"""Figures of online measurements: quantiles, goodput, ratios and the table. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ppengine.bench.load_plan import Outcome, Seen
from ppengine.common.config import ConfigError

BUSY_MOST = 0.7
"""Share of a core from which on a client may have delayed what it measured."""
LATE_MOST_MS = 10.0
"""Milliseconds between arrival and sending, of 99 in 100 requests, from which on the arrivals were others."""
SLO_NAMES = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms")


class Slo(msgspec.Struct, frozen=True):
    """Limits that a good request keeps, in milliseconds; None: no limit. `itl_ms` holds for 99 in 100 of its gaps."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def holds(self, one: Outcome) -> bool:
        """Return whether the request ended well and within all limits."""
        if one.error:
            return False
        measured = (one.ttft_s, quantile(sorted(one.gaps_s), 0.99), tpot_s(one), one.e2e_s)
        limits = (self.ttft_ms, self.itl_ms, self.tpot_ms, self.e2e_ms)
        return all(most is None or 1e3 * s <= most for s, most in zip(measured, limits, strict=True))


def parse_slo(text: str) -> Slo:
    """Return the limits of `ttft_ms=200,itl_ms=50`. Raises ConfigError."""
    found = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in SLO_NAMES or not 0 < found[name] < math.inf:
            raise ConfigError(f"--slo {word}: write limits in ms as NAME=NUMBER, with the names {', '.join(SLO_NAMES)}")
    return Slo(**found)


class Figures(msgspec.Struct, kw_only=True):
    """One measurement. Times are in milliseconds; a quantile without any value is 0."""

    side: str
    load: str
    requests: int
    errors: int
    asked_rate: float | None
    """Requests a second; None: all at once."""
    sent_rate: float
    """At which the client sent them: the arrivals of a good client."""
    reached_rate: float
    """Requests a second that ended well, from the start to the last end."""
    tokens_s: float
    ttft_ms: tuple[float, float, float]
    """p50, p90 and p99."""
    itl_ms: tuple[float, float, float]
    """Between events with a choice, of all requests."""
    tpot_ms: tuple[float, float, float]
    """Mean time of a request's tokens after the first."""
    e2e_ms: tuple[float, float, float]
    tokens_an_event: float
    """Above 1, tokens shared events: then the gaps are of events, not of tokens."""
    good_rate: float | None
    """Requests a second within the limits of --slo; None without any."""
    client_busy: float
    """Share of a core that the client took."""
    late_p99_ms: float
    """From arrival to sending."""
    first_error: str = ""


def figures(side: str, load: str, rate: float | None, seen: Seen, slo: Slo | None) -> Figures:
    """Return the figures of what a client saw."""
    done = [one for one in seen.outcomes if not one.error]
    errors = [one.error for one in seen.outcomes if one.error]
    tokens, events = sum(one.tokens for one in done), sum(1 + len(one.gaps_s) for one in done)
    last = max(one.sent_s for one in seen.outcomes)
    return Figures(
        side=side, load=load, requests=len(seen.outcomes), errors=len(errors), asked_rate=rate,
        sent_rate=round(len(seen.outcomes) / last, 3) if last > 0 else 0.0,
        reached_rate=round(len(done) / seen.seconds, 4), tokens_s=round(tokens / seen.seconds, 1),
        ttft_ms=_three([one.ttft_s for one in done]), itl_ms=_three([gap for one in done for gap in one.gaps_s]),
        tpot_ms=_three([tpot_s(one) for one in done if one.tokens > 1]), e2e_ms=_three([one.e2e_s for one in done]),
        tokens_an_event=round(tokens / events, 3) if events else 0.0,
        good_rate=None if slo is None else round(sum(map(slo.holds, seen.outcomes)) / seen.seconds, 4),
        client_busy=round(seen.busy, 3),
        late_p99_ms=round(1e3 * quantile(sorted(one.late_s for one in seen.outcomes), 0.99), 2),
        first_error=errors[0] if errors else "",
    )  # fmt: skip


def tpot_s(one: Outcome) -> float:
    """Return the mean seconds of a request's tokens after the first."""
    return (one.e2e_s - one.ttft_s) / (one.tokens - 1) if one.tokens > 1 else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that `share` of the ordered values do not exceed; 0 without any."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def _three(seconds: list[float]) -> tuple[float, float, float]:
    seconds.sort()
    p50, p90, p99 = (round(1e3 * quantile(seconds, share), 3) for share in (0.5, 0.9, 0.99))
    return p50, p90, p99


def table(rows: Sequence[Figures]) -> list[str]:
    """Return the lines of a table, with p50/p90/p99 of each time."""
    good = any(row.good_rate is not None for row in rows)
    head = ["side", "load", "req/s", "reached", "TTFT ms", "ITL ms", "TPOT ms", "e2e ms", "tokens/s", "tok/event"]
    lines = [[*head, *(["good/s"] if good else []), "errors"]]
    for row in rows:
        asked = "at once" if row.asked_rate is None else f"{row.asked_rate:.2f}"
        times = [_slashed(each) for each in (row.ttft_ms, row.itl_ms, row.tpot_ms, row.e2e_ms)]
        cells = [row.side, row.load, asked, f"{row.reached_rate:.2f}", *times, f"{row.tokens_s:,.1f}"]
        cells += [f"{row.tokens_an_event:.2f}", *([f"{row.good_rate or 0.0:.2f}"] if good else []), str(row.errors)]
        lines.append(cells)
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]


def remarks(rows: Sequence[Figures]) -> list[str]:
    """Return a line for each row that must be read with care."""
    found = []
    for row in rows:
        if row.errors:
            found.append(
                f"{row.side} at {row.load}: {row.errors} of {row.requests} failed; the first: {row.first_error}"
            )
        if row.client_busy > BUSY_MOST:
            found.append(
                f"{row.side} at {row.load}: its client took {row.client_busy:.2f} of a core, so times may be long"
            )
        if row.late_p99_ms > LATE_MOST_MS:
            late = f"1 in 100 requests was sent {row.late_p99_ms:.1f} ms late or later"
            found.append(f"{row.side} at {row.load}: {late}, so arrivals were not as they should be")
    return found


def ratios(ours: Figures, theirs: Figures) -> dict[str, float]:
    """Return our figures over theirs at one load, those of theirs that are not 0."""
    pairs = {
        "tokens_s": (ours.tokens_s, theirs.tokens_s), "ttft_p50": (ours.ttft_ms[0], theirs.ttft_ms[0]),
        "ttft_p99": (ours.ttft_ms[2], theirs.ttft_ms[2]), "itl_p50": (ours.itl_ms[0], theirs.itl_ms[0]),
        "itl_p99": (ours.itl_ms[2], theirs.itl_ms[2]), "tpot_p50": (ours.tpot_ms[0], theirs.tpot_ms[0]),
        "e2e_p50": (ours.e2e_ms[0], theirs.e2e_ms[0]),
    }  # fmt: skip
    return {name: round(a / b, 3) for name, (a, b) in pairs.items() if b}


def _slashed(three: tuple[float, float, float]) -> str:
    return "/".join(f"{one:.1f}" if one < 100 else f"{one:.0f}" for one in three)
