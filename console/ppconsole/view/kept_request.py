"""The last known state of a request, as names and values for the CLI and the console."""

from __future__ import annotations

from ppengine.protocol.finished import FinishedInfo
from ppengine.protocol.snapshot import RequestInfo

from ppconsole.link.kept_requests import KeptRequest
from ppconsole.model.endings import clock_text
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text
from ppconsole.view import events, figures
from ppconsole.view.cells import EMPTY, Row, fit, row, wrap
from ppconsole.view.drilldown import sources_text

NOT_KEPT = "prompt, output and block table are not kept"


def kept_fields(kept: KeptRequest, now: float) -> list[tuple[str, str]]:
    """Return everything that is known of a request, with the time that it is of. `now`: Unix seconds."""
    if kept.ended is not None:
        return end_fields(kept.ended, now)
    found = [("request", clean(kept.id)), ("as of", f"{clock_text(kept.as_of, now)}, {age_text(now - kept.as_of)} ago")]
    if kept.finished:
        found.append(("state", f"finished: {clean(kept.finished)}"))
    if kept.info is None or kept.picture_wall is None:
        return [*found, ("picture", "none: it is in no snapshot that was kept")]
    if not kept.finished:
        found.append(("state", _state(kept.info)))
    elif kept.as_of > kept.picture_wall:
        before = age_text(kept.as_of - kept.picture_wall)
        found.append(("before", f"{_state(kept.info)}, {before} before; the figures below are of that time"))
    return [*found, *_figures(kept.info)]


def end_fields(ended: FinishedInfo, now: float) -> list[tuple[str, str]]:
    """Return the figures that stay of a request that has ended. `now`: Unix seconds."""
    came = f"{clean(ended.client)}, {ended.route}" if ended.route else clean(ended.client)
    queued, first = figures.latency(ended.queue_s), figures.latency(ended.ttft_s)
    return [
        ("request", clean(ended.id)),
        ("state", f"finished: {clean(ended.ending)}"),
        ("ended", f"{clock_text(ended.wall, now)}, {age_text(max(0.0, now - ended.wall))} ago"),
        ("owner", clean(ended.owner)),
        *([("client", came)] if came else []),
        ("tokens", f"{ended.prompt_tokens} in, {ended.output_tokens} out"),
        ("timing", f"prepared {figures.latency(ended.prepare_s)}, queued {queued}, first token {first}, "
                   f"finished {age_text(ended.took_s)}"),
        ("per token", f"{figures.latency_ms(ended.itl_ms)}, p50 {figures.latency_ms(ended.itl_p50_ms)}, "
                      f"p99 {figures.latency_ms(ended.itl_p99_ms)}"),
        *([("from", sources_text(ended.sources, ended.prompt_tokens))] if ended.sources is not None else []),
        ("preempted", f"{ended.preemptions} times"),
    ]  # fmt: skip


def rows(kept: KeptRequest, now: float, width: int) -> list[Row]:
    """Return the same as rows of the console, with the events."""
    found = [row((fit(" LAST KNOWN STATE  from the kept record", width), ""), fill="head")]
    for name, value in kept_fields(kept, now):
        parts = wrap(value, max(10, width - 16))
        found += [row((f"  {name if not at else '':<13} ", "dim"), (part, "")) for at, part in enumerate(parts)]
    found.append(row((f"  {NOT_KEPT}", "dim")))
    if kept.events:
        found += [EMPTY, row((fit(" EVENTS", width), ""), fill="head")]
        found += [events.event_row(event, width, full=True) for event in kept.events]
    return found


def _state(info: RequestInfo) -> str:
    why = clean(info.why.text or info.why.code) if info.why is not None else ""
    return f"{info.state}{f': {why}' if why else ''}"


def _figures(info: RequestInfo) -> list[tuple[str, str]]:
    """Return the figures of a request in a snapshot."""
    queued, first = figures.latency(info.queue_s), figures.latency(info.ttft_s)
    flight = " ".join(f"m{step}" for step in info.in_flight) or "-"
    return [
        ("owner", clean(info.owner)),
        ("age", age_text(info.age_s)),
        ("tokens", f"{info.prompt_tokens} in, {info.output_tokens} out, {info.computed_tokens} computed, "
                   f"{info.cached_tokens} from the prefix cache"),
        ("timing", f"prepared {figures.latency(info.prepare_s)}, queued {queued}, first token {first}, "
                   f"per token {figures.latency_ms(info.itl_ms)}, p99 {figures.latency_ms(info.itl_p99_ms)}"),
        ("blocks", f"{info.blocks} on the device, {info.swap_blocks} on the host"),
        ("in flight", flight),
        ("preempted", f"{info.preemptions} times"),
        ("priority", str(info.priority)),
        ("revision", str(info.revision)),
    ]  # fmt: skip
