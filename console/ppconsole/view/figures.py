"""Figures in the few cells that a table has, beside those of `model.units`. Unknown is `?`, nothing is `-`, never 0."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.quantiles import Quantiles
from ppengine.protocol.snapshot import Latency, SloInfo, Throughput
from ppengine.protocol.stage_info import StageInfo

from ppconsole.model.units import UNKNOWN, age_text, count_text, ms_text, percent_text, ratio

NOTHING = "-"


def several_hosts(stages: Sequence[StageInfo]) -> bool:
    """Return whether stages are on more than one host, so that each must say on which."""
    return len({stage.host for stage in stages if stage.host}) > 1


def rate(value: float | None) -> str:
    """Return tokens a second; small rates keep a decimal."""
    return f"{value:.1f}" if value is not None and 0 < value < 9.95 else count_text(value)


def window(throughput: Throughput) -> str:
    """Return the window of the rates, ` 2s`; empty if there is no rate yet, or an older engine does not say."""
    return "" if throughput.window_s is None else f" {throughput.window_s:.0f}s"


def percent(part: float | None, whole: float | None) -> str:
    """Return part of whole as a percentage."""
    return percent_text(ratio(part, whole))


def millis(value: float | None) -> str:
    """Return milliseconds in at most four cells: .4ms, 22ms, .12s, 6.2s, 1m42."""
    if value is None:
        return UNKNOWN
    if value >= 995:
        return age_text(value / 1000)
    if value >= 99.5:
        return f"{value / 1000:.2f}".lstrip("0") + "s"
    return f"{value:.0f}ms" if value >= 0.95 else f"{value:.1f}".removeprefix("0") + "ms"


def goodput(slo: SloInfo) -> str:
    """Return the share of requests that met the objectives; `-` while none has ended."""
    return NOTHING if slo.goodput is None else f"{100 * slo.goodput:.0f}%"


def slo_text(latency: Latency) -> str:
    """Return the objectives and how many requests met them, in one line; empty without an objective."""
    slo = latency.slo
    if slo is None:
        return ""
    aims = [("ttft", slo.ttft_ms, slo.ttft_missed), ("itl", slo.itl_ms, slo.itl_missed)]
    parts = [f"{name} {latency_ms(value)} missed by {missed}" for name, value, missed in aims if value is not None]
    return f"SLO {goodput(slo)} of {slo.finished} requests of {latency.window_s / 60:.0f} min: {', '.join(parts)}"


def latency(seconds: float | None) -> str:
    """Return a latency given in seconds, in at most five cells; `-` where there is none yet."""
    return latency_ms(None if seconds is None else seconds * 1e3)


def latency_ms(value: float | None) -> str:
    """Return a latency given in milliseconds, in at most five cells; `-` where there is none yet."""
    return NOTHING if value is None else ms_text(value)


def quantiles(found: Quantiles, scale: float) -> tuple[str, str, str]:
    """Return p50, p90 and p99 of latencies; times `scale` they are milliseconds."""
    p50, p90, p99 = (None if value is None else value * scale for value in (found.p50, found.p90, found.p99))
    return latency_ms(p50), latency_ms(p90), latency_ms(p99)


def age(value_ms: float | None) -> str:
    """Return an age given in milliseconds, in seconds and up."""
    return UNKNOWN if value_ms is None else age_text(value_ms / 1000)


def micro_batch(number: int, width: int = 0) -> str:
    """Return the name of a micro-batch, `m18412`, as logs and details have it; in fewer cells `…412`. 0: no limit."""
    name = f"m{number}"
    return name if not width or len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def micro_batches(numbers: list[int], width: int) -> str:
    """Return micro-batches as runs: m18410-12 m18415. Those that do not fit are counted: m18410-12 +1."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [_run(first, last) for first, last in runs]
    text = ""
    for count in range(len(runs), -1, -1):
        left = sum(last - first + 1 for first, last in runs[count:])
        text = " ".join([*shown[:count], *([f"+{left}"] if left else [])])
        if len(text) <= width:
            break
    count = sum(last - first + 1 for first, last in runs)
    if text == f"+{count}" and len(f"{micro_batch(runs[0][0])} +{count - 1}") <= width:
        text = f"{micro_batch(runs[0][0])} +{count - 1}"  # its first one at least
    return text


def _run(first: int, last: int) -> str:
    """Return a run of micro-batches; its end has the digits alone that differ, two at least: `m18410-12`."""
    if first == last:
        return micro_batch(first)
    begin, end = str(first), str(last)
    same = next((at for at, digit in enumerate(begin) if end[at] != digit), 0) if len(begin) == len(end) else 0
    return f"m{begin}-{end[max(0, min(same, len(end) - 2)) :]}"
