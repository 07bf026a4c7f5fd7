"""The first two lines: which engine, in which state, how fresh; and the verdict in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verb_table import Role, covers

from ppconsole.model.facts import (
    FAULT_WORDS,
    REPLAY,
    REPLAY_END,
    brief_text,
    cordon_text,
    fault_word,
    headline,
    root_verdict,
    unseen_stages,
)
from ppconsole.model.safe import clean
from ppconsole.model.units import age_text
from ppconsole.view import figures
from ppconsole.view.cells import Row, Seg, clip, fit, row, spread, width_of
from ppconsole.view.incident_table import badge
from ppconsole.view.marks import ENGINE, LINK

OLD_CORE_MS = 2000.0
"""Older than this the core's figures are said to be old."""
_NO_LIMIT = 10_000
_HOLDER_WIDTH = 14
"""Most cells for the holder of the control lease."""
SPARKS = "▁▂▃▄▅▆▇█"


class Link(NamedTuple):
    """The banner's facts about the link and this console. Ages in seconds."""

    state: str = "connecting"
    age_s: float | None = None
    retry_in_s: float | None = None
    text: str = ""
    read_only: bool = False
    role: Role = "admin"
    """Rights of this console's key."""
    frozen_s: float | None = None
    alarms: tuple[str, ...] = ()
    """Metrics past a threshold, with its level."""
    problem: str = ""
    """A failure inside the console itself."""
    position: tuple[Seg, ...] = ()
    """The position in a past, in place of `recorded`."""

    @property
    def live(self) -> bool:
        """Whether the figures are current: the present, or a past that is replayed."""
        return self.state in ("live", REPLAY, REPLAY_END)


def banner(snapshot: Snapshot | None, link: Link, width: int, title: str = "") -> Row:
    """Return the top line. The last parts drop out if it is narrow."""
    badge = _rights_chip(link)
    if snapshot is None:
        name = clean(title) or "ppconsole"
        return clip(Row(((f" {name} ", "chip.name"), (" ", ""), *link_segs(link), (" ", ""), badge), "bar"), width)
    engine = snapshot.engine
    before: list[Seg] = [
        (f" {clean(engine.name)} ", "chip.name"),
        *([] if link.state == "ended" else [_state_chip(snapshot)]),
        *_cordon_chip(snapshot),
        *_lease_chip(snapshot),
        (" ", ""),
    ]
    after: list[Seg] = [(" ", ""), badge, *((f" {text} ", "chip.warn") for text in link.alarms)]
    head = [*before, *link_segs(link, width - sum(width_of(text) for text, _ in (*before, *after))), *after]
    if old := (snapshot.core_age_ms or 0.0) > OLD_CORE_MS:
        head += [(f" core silent {figures.age(snapshot.core_age_ms)}", "warn")]
    throughput = snapshot.throughput
    rate = figures.rate(None if old else throughput.output_tok_s)
    parts = [
        ("util ", f"{engine.memory_utilization:.2f}".removeprefix("0")),
        ("r", f"{engine.memory_revision}"),
        ("step ", f"{engine.step}"),
        ("", f"{rate} tok/s{figures.window(throughput)}"),
        *([("slo ", figures.goodput(slo))] if (slo := snapshot.latency.slo) is not None else []),
        ("ops:", str(sum(op.state in ("accepted", "deferred") for op in snapshot.operations))),
        ("consoles:", str(engine.consoles)),
        ("up ", age_text(engine.uptime_s)),
        ("", f"pp{engine.pipeline_parallel_size} tp{engine.tensor_parallel_size} {clean(engine.executor)}"),
        ("epoch ", clean(engine.epoch)[:8]),
        ("", clean(engine.model)),
    ]
    used = sum(width_of(text) for text, _ in head)
    for label, value in parts:
        size = 1 + width_of(label) + width_of(value)
        if used + size > width:
            break
        head += [(" ", ""), (label, "dim"), (value, "")]
        used += size
    return clip(Row(tuple(head), "bar"), width)


def _rights_chip(link: Link) -> Seg:
    """Return whether verbs are possible, as far as this console and its key decide."""
    if link.read_only or link.state == "ended":
        return " RO ", "chip.warn"
    return (" RW ", "chip.dim") if covers(link.role, "operator") else (f" {link.role.upper()} ", "chip.warn")


def _state_chip(snapshot: Snapshot) -> Seg:
    """Return the effect of a fault, or else the engine's state."""
    if word := fault_word(snapshot):
        return f" {word.upper()} ", "chip.warn" if word == FAULT_WORDS["store"] else "chip.bad"
    state = snapshot.engine.state
    return f" {clean(state).upper()} ", ENGINE.get(state, "chip.info")


def state_segs(snapshot: Snapshot | None, link: Link) -> list[Seg]:
    """Return the engine's state for the title of another screen; nothing while it serves without a fault."""
    if snapshot is None or link.state == "ended":
        return []
    chip = _state_chip(snapshot)
    return [] if chip[1] == ENGINE["serving"] else [chip]


def fault_segs(snapshot: Snapshot | None, link: Link, room: int) -> list[Seg]:
    """Return the fault for the title of another screen, `! STAGE 1 stopped 5.6s`; nothing if `room` is too small."""
    verdict = root_verdict(snapshot) if snapshot is not None else None
    if verdict is None or not verdict.root or not link.live:
        return []
    text = f"! {headline(verdict)} {age_text(verdict.since_s)}"
    return [(" ", ""), (text, "bad")] if 1 + width_of(text) <= room else []


def _cordon_chip(snapshot: Snapshot) -> list[Seg]:
    """Return which stages are cordoned: no request begins, in any state of the engine."""
    placed = sorted({stage.index for stage in snapshot.stages if stage.cordon})
    which = ",".join(map(str, placed)) if len(placed) <= 3 else f"{len(placed)} STAGES"
    return [(f" CORDON {which} ", "chip.warn")] if placed else []


def _lease_chip(snapshot: Snapshot) -> list[Seg]:
    """Return the key that holds the control lease: verbs of others are refused."""
    lease = snapshot.lease
    return [] if lease is None else [(f" LEASE {fit(clean(lease.principal), _HOLDER_WIDTH).rstrip()} ", "chip.warn")]


def link_segs(link: Link, room: int = _NO_LIMIT) -> list[Seg]:
    """Return link state and age of the newest sample; a freeze of the display comes first.

    In a past the last figures since the mark drop out if `room` cells are too few.
    """
    segs = _link_segs(link)
    while len(link.position) > 1 and sum(width_of(text) for text, _ in segs) > room:
        link = link._replace(position=link.position[:-1])
        segs = _link_segs(link)
    return segs


def _link_segs(link: Link) -> list[Seg]:
    """Return link state and age, with every figure of the position."""
    style = LINK.get(link.state, "warn")
    segs: list[Seg] = []
    if link.frozen_s is not None:
        segs += [(f"FROZEN {age_text(link.frozen_s)}", "warn"), (" ", "")]
    if link.state == "ended":
        segs += [(" ENDED ", "chip.bad"), *(((" ", ""), *link.position) if link.position else ())]
    elif link.position and link.state in (REPLAY, REPLAY_END):
        segs += link.position
    else:
        segs.append((link.state, style))
    if link.age_s is not None:
        segs.append((f" {age_text(link.age_s)}", style if not link.live else "dim"))
    if link.state == "lost" and link.retry_in_s is not None:
        segs.append((f" retry {age_text(link.retry_in_s)}", style))
    return segs


def verdict_line(snapshot: Snapshot | None, link: Link, width: int, history: Sequence[float] = ()) -> Row:
    """Return the second line: the fault in words, or throughput if there is none."""
    if link.problem:
        return row((fit(f"! console: {link.problem}", width), "alert"))
    if link.state == REPLAY and link.text:
        return row((fit(f"  the replay ends here: {clean(link.text)}", width), "alert.warn"))
    if not link.live and (snapshot is None or link.state != "connecting"):
        return row((fit(_link_words(link), width), "alert" if link.state == "ended" else "alert.warn"))
    if snapshot is None:
        return row((fit(f"  {link.text or 'waiting for the first sample'}", width), "dim"))
    verdict = root_verdict(snapshot)
    if verdict is None:
        if unseen := unseen_stages(snapshot):
            return row((fit(f"! no samples of {unseen}: the agent may hang (l logs)", width), "alert.warn"))
        return calm(snapshot, width, history)
    bad = verdict.root and verdict.cause not in ("undetermined", "store")
    others = len(snapshot.verdicts) - 1
    tail = (f" +{others}" if others else "") + "  d detail "
    engine = snapshot.engine
    if verdict.cause == "store" and engine.message and engine.state != "serving":
        tail = f"  ! {headline(verdict)}{tail}"
        return row((fit(f"  {clean(engine.message)}", width - len(tail)) + tail, "alert.warn"))
    text = f"! {brief_text(verdict, snapshot)}"
    style = "alert" if bad else "alert.warn"
    return row((fit(text, width - len(tail)) + tail, style))


def _link_words(link: Link) -> str:
    """Return what a link that is not live means for the operator."""
    if link.state == "ended":
        return f"  {clean(link.text)}"
    text = clean(link.text)
    detail, why = f" ({text})" if text else "", f": {text}" if text else ""
    age = age_text(link.age_s)
    known = "there are no figures yet" if link.age_s is None else f"figures are {age} old"
    words = {
        "connecting": f"  connecting{why}; verbs are off until the link is live",
        "stale": f"  no sample for {age}{detail}; the figures are old and verbs are off",
        "lost": f"  link lost{why}; {known}, verbs are off; trying again by itself",
        "new-epoch": f"  the engine was restarted{detail}: this is a new epoch, old requests are gone",
    }
    return words.get(link.state, f"  {link.state}{detail}")


def calm(snapshot: Snapshot, width: int, history: Sequence[float]) -> Row:
    """Return throughput of the last minute when there is nothing to worry about."""
    engine = snapshot.engine
    if engine.message and engine.state != "serving":
        return row((fit(f"  {engine.message}", width), "info"))
    working = [op for op in snapshot.operations if op.state in ("accepted", "deferred")]
    if working:
        op = working[0]
        more = f" (+{len(working) - 1})" if len(working) > 1 else ""
        return row((fit(f"  {op.verb} by {op.by}: {op.progress or op.state}{more}", width), "info"))
    if placed := [text for text in map(cordon_text, snapshot.stages) if text]:
        more = f" (+{len(placed) - 1})" if len(placed) > 1 else ""
        return row((fit(f"  {placed[0]}{more}: no request begins", width), "warn"))
    peak = max(history, default=0.0)
    rates: list[Seg] = [
        (" ", ""), (figures.rate(snapshot.throughput.output_tok_s), "strong"), (" out ", "dim"),
        (figures.rate(snapshot.throughput.prompt_tok_s), "strong"),
        (f" in tok/s{figures.window(snapshot.throughput)}", "dim"),
    ]  # fmt: skip
    past = badge(snapshot, width - 44)
    right: list[Seg] = [(f"{past or 'no fault found'} ", "warn" if past else "ok")]
    room = width - 3 - sum(width_of(text) for text, _ in (*rates, *right))
    top = f"  peak {figures.rate(peak)}" if peak else ""
    if room - len(top) >= 8:
        rates.append((top, "dim"))
        room -= len(top)
    return spread([("  ", ""), (spark(history, peak, max(8, min(60, room))), "spark"), *rates], right, width)


def spark(values: Sequence[float], top: float, width: int) -> str:
    """Return the last `width` values as bars from 0 to `top`; cells without a value are blank."""
    last = list(values)[-width:]
    bars = "".join(
        SPARKS[min(len(SPARKS) - 1, int(max(0.0, value) / top * (len(SPARKS) - 0.01)))] if top else SPARKS[0]
        for value in last
    )
    return bars.rjust(width)
