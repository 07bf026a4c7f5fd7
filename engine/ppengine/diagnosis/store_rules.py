"""Faults of stores and backends of KV tiers: requests compute on, so none is the root of a stage's fault.

All of them are one verdict without a stage, of the worst; `further` has the others.
"""

from __future__ import annotations

from typing import NamedTuple

from ppengine.diagnosis.budgets import (
    CORRUPT_TOLD_S,
    FAILING_LEAST,
    FAILING_TOLD_S,
    QUOTA_FULL,
    STOPPED_AFTER_S,
    STORE_ABSENT_S,
    STORE_GONE_S,
    STORE_IDLE_SILENT_S,
    STORE_SILENT_S,
    STORE_SLOW_S,
    TIER_WINDOW_S,
)
from ppengine.diagnosis.case import Case
from ppengine.diagnosis.phrases import exit_words, seconds
from ppengine.diagnosis.tier_evidence import BackendEvidence, StoreEvidence, TierEvidence
from ppengine.protocol.backend_calls import while_text
from ppengine.protocol.reports import NODE_LOST
from ppengine.protocol.snapshot import FurtherFault, Verdict

_GOES_ON = "requests and steps go on; prompts are computed instead of loaded"


class _Trouble(NamedTuple):
    """One fault of a store or a backend."""

    subject: str
    summary: str
    since_s: float
    evidence: list[str]
    suggest: str


def stores(case: Case) -> list[Verdict]:
    """Return one verdict on all stores and backends, the worst first; none while the core itself is at fault."""
    tiers, core = case.evidence.tiers, case.evidence.core
    if tiers is None or case.evidence.stopping or None in case.guilty:
        return []
    if core.report_age_s is not None and core.report_age_s > STORE_SILENT_S:
        return []  # The ages of the stores are the core's.
    found = [
        *filter(None, map(_dead, tiers.stores)),
        *filter(None, map(_hanging, tiers.stores)),
        # Wrong bytes are named for a minute, and must not hide a backend that fails now.
        *filter(None, map(_broken, tiers.backends)),
        *filter(None, map(_corrupt, tiers.backends)),
        *filter(None, map(_failing, tiers.backends)),
        *_slow(tiers),
        *filter(None, map(_full, tiers.backends)),
    ]
    if not found:
        return []
    worst, *others = found
    return [
        Verdict(
            stage=None,
            cause="store",
            subject=worst.subject,
            summary=worst.summary,
            since_s=worst.since_s,
            evidence=[*worst.evidence, _GOES_ON],
            suggest=worst.suggest,
            further=[FurtherFault(subject=other.subject, summary=other.summary) for other in others],
        )
    ]


def _dead(store: StoreEvidence) -> _Trouble | None:
    """Return the fault of a store that is not back a second after its end, except with its node.

    The verdict on its stage names the node, and the store comes back with the stage.
    """
    if store.gone_for_s is None or store.gone_for_s < STORE_GONE_S or store.exit_code == NODE_LOST:
        return None
    lines = [f"pid {store.pid}: {exit_words(store.exit_code)}, and no other has begun"]
    lines += [f"last words: {store.exit_detail}"] if store.exit_detail else []
    summary = f"{store.name} {exit_words(store.exit_code)}{while_text(store.calls)}"
    suggest = "ppconsole logs (the supervisor restarts it by itself)"
    backends = {call.backend for call in store.calls}
    if len(backends) == 1:
        suggest = f"ppconsole store pause {backends.pop()} (its package ends the store)"
    return _Trouble(store.subject, summary, store.gone_for_s, lines, suggest)


def _hanging(store: StoreEvidence) -> _Trouble | None:
    """Return the fault of a store that lives and gives no sign of life, or has not come to the core."""
    if store.gone_for_s is not None:
        return None
    owes = f"{store.jobs} jobs, the oldest for {seconds(store.lag_s)}" if store.jobs else "no job"
    state = f"pid {store.pid}: process state {store.process_state or 'unknown'}"
    if store.absent_for_s is not None:
        if store.absent_for_s < STORE_ABSENT_S:
            return None
        lines = [state, f"it has run for {seconds(store.absent_for_s)} and not come to the core"]
        return _Trouble(store.subject, f"{store.name} does not come up", store.absent_for_s, lines, "ppconsole logs")
    silent = store.age_s or 0.0
    stopped = store.process_state == "T" and silent >= STOPPED_AFTER_S
    if not stopped and silent < (STORE_SILENT_S if store.jobs else STORE_IDLE_SILENT_S):
        return None
    lines = [state, f"newest figures: {seconds(silent)} old; it sends them twice a second", f"it owes {owes}"]
    if stopped:
        summary = f"{store.name} is stopped by a signal (state T); it owes {owes}"
        return _Trouble(store.subject, summary, silent, lines, f"kill -CONT {store.pid}{store.where}")
    summary = f"{store.name} hangs: silent for {seconds(silent)}, it owes {owes}"
    suggest = f"kill -KILL {store.pid}{store.where} (another one is started)" if store.pid else "ppconsole logs"
    return _Trouble(store.subject, summary, silent, lines, suggest)


def _corrupt(backend: BackendEvidence) -> _Trouble | None:
    """Return the fault of a backend that gave wrong bytes a moment ago; one that is paused has none."""
    ago = backend.corrupt_ago_s
    if ago is None or ago > CORRUPT_TOLD_S or backend.state == "paused":
        return None
    count = max(1, backend.corrupt_new)
    lines = [
        f"shards with a wrong checksum, length or header: {count} in {TIER_WINDOW_S:.0f} s, {backend.corrupt} in all",
        f"the newest {seconds(ago)} ago; each was deleted, and no token came from it",
    ]
    summary = f"{backend.subject} gave {count} corrupt shard{'' if count == 1 else 's'}"
    return _Trouble(backend.subject, summary, ago, lines, f"ppconsole store pause {backend.name}")


def _broken(backend: BackendEvidence) -> _Trouble | None:
    """Return the fault of a backend that is not opened, or of which a breaker is open; one that is paused has none."""
    if backend.broken_for_s is None or backend.state == "paused" or _drained(backend):
        return None
    why = backend.error or "it reports no error"
    lines = [
        f"state {backend.state}, breaker of reads {backend.breaker}, of writes {backend.write_breaker}, "
        f"{backend.errors} calls failed or timed out",
        f"newest error: {why}",
    ]
    if backend.only_writes:
        lines.append("its chunks are read on; chunks that it should get are dropped")
        summary = f"{backend.subject} fails writes, and is read on: {why}"
        suggest = f"ppconsole store drain {backend.name} (read on, nothing written)"
        return _Trouble(backend.subject, summary, backend.broken_for_s, lines, suggest)
    summary = f"{backend.subject} is broken: {why}"
    unopened = backend.state == "broken" and backend.breaker == "closed"
    suggest = (
        f"ppconsole store test {backend.name} (opens it, once that is mended)"
        if unopened
        else f"ppconsole store pause {backend.name}"
    )
    return _Trouble(backend.subject, summary, backend.broken_for_s, lines, suggest)


def _drained(backend: BackendEvidence) -> bool:
    """Return whether a backend is drained whose writes alone fail: as suggested."""
    return backend.only_writes and backend.state == "draining"


def _failing(backend: BackendEvidence) -> _Trouble | None:
    """Return the fault of a backend of which some calls fail and others do not, as on a full disk."""
    ago = backend.errors_ago_s
    if backend.broken_for_s is not None or backend.state == "paused":
        return None
    if ago is None or ago > FAILING_TOLD_S or backend.errors_new < FAILING_LEAST:
        return None
    why = backend.error or "it reports no error"
    lines = [
        f"calls that failed or timed out: {backend.errors_new} in {TIER_WINDOW_S:.0f} s, {backend.errors} in all",
        f"newest error: {why}",
    ]
    summary = f"{backend.subject} fails: {why}"
    return _Trouble(backend.subject, summary, ago, lines, f"ppconsole store test {backend.name}")


def _slow(tiers: TierEvidence) -> list[_Trouble]:
    """Return the fault of the slowest backend, if jobs of a live store wait for it."""
    late = [store for store in tiers.stores if (store.lag_s or 0.0) >= STORE_SLOW_S and _hanging(store) is None]
    waited = [each for each in tiers.backends if each.queue and each.broken_for_s is None]
    if not late or not waited:
        return []
    store = max(late, key=lambda each: each.lag_s or 0.0)
    backend = max(waited, key=lambda each: (each.slowest_ms or 0.0, each.queue))
    lag = seconds(store.lag_s)
    lines = [
        f"{store.name} owes {store.jobs} jobs, the oldest for {lag}",
        f"{backend.queue} calls wait for {backend.name}; p99 of a call: "
        + ("unknown" if backend.slowest_ms is None else f"{backend.slowest_ms:.0f} ms"),
    ]
    summary = f"{backend.subject} is slow: a job waits {lag} at {store.name}"
    return [_Trouble(backend.subject, summary, store.lag_s or 0.0, lines, f"ppconsole store pause {backend.name}")]


def _full(backend: BackendEvidence) -> _Trouble | None:
    """Return the fault of a backend that only churns: it deletes for its quota, and nothing is found in it.

    A full one with hits is a cache at work.
    """
    full = backend.fill is not None and backend.fill >= QUOTA_FULL
    if not full or backend.churns_for_s is None or backend.state in ("paused", "draining"):
        return None
    lines = [
        f"{backend.fill or 0.0:.0%} of its quota is used",
        f"in {TIER_WINDOW_S:.0f} s {backend.evicted_new} shards were deleted for the quota, and no token came from it",
    ]
    summary = f"{backend.subject} is full: it deletes for its quota, and nothing is found in it"
    suggest = f"ppconsole store pause {backend.name} (then a larger quota_gib)"
    return _Trouble(backend.subject, summary, backend.churns_for_s, lines, suggest)
