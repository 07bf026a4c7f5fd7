"""Incidents as plain text: the table, and one in full."""

from __future__ import annotations

from collections.abc import Sequence

from ppengine.protocol.incidents import Incident

from ppconsole.cli.render import event_line, table, verdict_sentence
from ppconsole.link.incident_source import Listed
from ppconsole.model.endings import clock_text, consequences, duration, outcome, where
from ppconsole.model.facts import evidence_lines
from ppconsole.model.safe import clean


def table_lines(rows: Sequence[Listed], now: float) -> list[str]:
    """Return one line an incident under a head, the newest last."""
    body = [
        [
            one.id, clean(one.engine.name), clock_text(one.info.wall, now).replace(" ", "-"), duration(one.info, now),
            where(one.info), one.info.cause, clean(one.info.by) or "-",
            clean(one.info.ended) or "it lasts",
        ]
        for one in rows
    ]  # fmt: skip
    return table("ID ENGINE BEGIN LASTED STAGE CAUSE BY END", body, ("LASTED",))


def incident_lines(listed: Listed, incident: Incident, now: float) -> list[str]:
    """Return one incident in full: verdict with evidence, end, consequences, records, events."""
    info, fault = incident.info, incident.fault
    by = f" ({clean(info.by)} acted)" if info.by else ""
    head = (
        f"incident {listed.id} of {clean(listed.engine.name)} ({clean(listed.engine.id)}), {clock_text(info.wall, now)}"
    )
    lines = [f"{head}: {outcome(info, now)}", verdict_sentence(fault.verdict, over=info.over_wall is not None)]
    lines += [f"    {clean(line)}" for line in evidence_lines(fault.verdict)]
    lines.append(f"ended: {clean(info.ended) or 'not yet'}{by}")
    if then := consequences(incident):
        lines += ["consequences:", *(f"    {text}" for text in then)]
    steps = f"{fault.rings.steps} steps of each thread" if fault.rings is not None else "no steps"
    stacks = f"{len(fault.stacks.all)} stacks" if fault.stacks is not None else "no stacks"
    missing = "".join(f"; {clean(text)}" for text in fault.missing)
    lines.append(f"kept: {steps}, {stacks}{missing}")
    if incident.events:
        lines += ["events:", *(f"    {event_line(event)}" for event in incident.events)]
    # An earlier engine on another host is reached by the present one, and named in the id.
    named, number = (
        (listed.engine.address, listed.id) if listed.engine.remote else (listed.engine.id, listed.folder.name)
    )
    lines.append(f"see it: ppconsole -e {named} replay --incident {number}")
    return lines
