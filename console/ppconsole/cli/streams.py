"""`streams`: how far the streams of GPUs are, and the ledger of the stages, as tables."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import click

from ppconsole.cli import exits
from ppconsole.cli.options import Common, common_options
from ppconsole.cli.session import attached, one_snapshot, print_json, run

if TYPE_CHECKING:
    from ppengine.protocol.inspection import LedgerDetail
    from ppengine.protocol.reports import StageLedger
    from ppengine.protocol.snapshot import Snapshot

    from ppconsole.link.source import Detail


@click.command("streams")
@common_options
@click.option("--stage", type=click.IntRange(0), metavar="K", help="Only this stage.")
def streams_command(common: Common, stage: int | None) -> None:
    """Print the progress of devices, and the ledger.

    First the streams of GPUs with the steps that they have begun and done, then streams, hand-offs and buffers of the
    ledger. That has to be on: `ppconsole check ledger on`. With --json: the ledger alone; `status --json` has the rest.
    """
    from ppengine.protocol.inspection import LedgerDetail

    async def ask() -> Detail:
        async with attached(common, slow=True) as link, asyncio.timeout(common.timeout):
            return await link.inspect("ledger", stage=stage)

    detail = run(ask)
    if not isinstance(detail, LedgerDetail):
        raise exits.Failure(f"the engine answered with {type(detail).__name__}")
    if common.json:
        print_json(detail)
    else:
        devices = device_lines(run(lambda: one_snapshot(common)), stage)
        click.echo("\n".join([*devices, *([""] if devices else []), *ledger_lines(detail)]))


def device_lines(snapshot: Snapshot, stage: int | None = None) -> list[str]:
    """Return the progress of each stream of a device, as the device wrote it; empty if there is none."""
    from ppconsole.cli.render import table
    from ppconsole.model.ranks import of_snapshot
    from ppconsole.model.safe import clean
    from ppconsole.model.units import ms_text
    from ppconsole.view.wording import STREAM

    def step(number: int | None) -> str:
        return "-" if number is None else f"m{number}"

    rows = [
        [of_snapshot(snapshot, one), s.name, step(s.begun_step), step(s.done_step), str(s.pending),
         ms_text(s.age_ms) if s.pending else "-", s.waits_for or ""]
        for one in snapshot.stages
        for s in one.streams
        if s.on_device and stage in (None, one.index)
    ]  # fmt: skip
    titles = (STREAM["stage"], STREAM["name"], "BEGUN", "DONE", *(STREAM[key] for key in ("pending", "age", "waits")))
    right = [STREAM[key] for key in ("stage", "pending", "age")]
    return [clean(line) for line in table(" ".join(titles), rows, right)] if rows else []


def ledger_lines(detail: LedgerDetail) -> list[str]:
    """Return the whole ledger as text."""
    if not detail.on:
        return ["the ledger is off; to switch it on: ppconsole check ledger on"]
    lines = [] if detail.stages else ["no stage has reported its ledger yet; try again in a second"]
    ranked = any(ledger.rank for ledger in detail.stages)
    for ledger in detail.stages:
        lines += [*([""] if lines else []), *_stage_lines(ledger, ranked)]
    return lines


def _stage_lines(ledger: StageLedger, ranked: bool) -> list[str]:
    from ppconsole.cli.render import table
    from ppconsole.model.ranks import words
    from ppconsole.model.safe import clean
    from ppconsole.model.units import age_text, bytes_text, ms_text
    from ppconsole.view.wording import BUFFER, HANDOFF, STREAM

    streams = [
        [s.name, s.owner, s.device, s.purpose, "yes" if s.alive else "no", str(s.pending), ms_text(s.age_ms), s.op]
        for s in ledger.streams
    ]
    handoffs = [[h.producer, h.consumer, h.event, str(h.count)] for h in ledger.handoffs]
    buffers = [
        [b.name, bytes_text(b.bytes), str(b.generation), b.writer or "-", ", ".join(b.in_flight) or "-",
         "free" if b.freed else ""]
        for b in ledger.buffers
    ]  # fmt: skip
    name = words(ledger.stage, ledger.rank if ranked else None)
    lines = [f"{name}: {len(ledger.findings)} findings, reported {age_text(ledger.age_s)} ago"]
    head = (STREAM["name"], STREAM["owner"], "DEVICE FOR ALIVE", *(STREAM[key] for key in ("pending", "age", "op")))
    lines += table(" ".join(head), streams, (STREAM["pending"], STREAM["age"]))
    lines += table(" ".join(HANDOFF.values()), handoffs, (HANDOFF["count"],))
    lines += table(" ".join([*BUFFER.values(), "STATE"]), buffers, (BUFFER["bytes"], BUFFER["generation"]))
    for finding in ledger.findings:
        lines += [f"! {finding.cause}: {finding.summary}", *(f"    {fact}" for fact in finding.evidence)]
    return [clean(line) for line in lines]
