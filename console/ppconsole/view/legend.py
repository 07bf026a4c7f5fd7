"""The legend: each column, letter and glyph of each screen. `?` and `ppconsole help columns` show this table."""

from __future__ import annotations

from ppconsole.view import legend_main as main
from ppconsole.view import legend_pages as pages
from ppconsole.view.legend_main import OPERATIONS, REQUEST_STATES, STAGE_STATES, Section

__all__ = ["COMMANDS", "OPERATIONS", "REQUEST_STATES", "SCREENS", "STAGE_STATES", "Section"]

SCREENS: dict[str, tuple[Section, ...]] = {
    "main": (main.STAGES, main.STAGE_STATES, main.OPERATIONS, main.MARKS, main.MEMORY_BAR, main.POOL, main.REQUESTS,
             main.REQUEST_STATES, main.FILTER, main.TIMELINE, main.KV_MAP, main.STREAMS, main.TRENDS, main.LINES,
             main.BANNER),
    "stage": (pages.STAGE_FIELDS, main.STAGES, pages.STAGE_REQUESTS, main.OPERATIONS, pages.MEMORY, main.MEMORY_BAR,
              pages.GPU, main.STREAMS, main.TIMELINE, main.STAGE_STATES, main.MARKS),
    "request": (pages.REQUEST_FIELDS, pages.REQUEST_TIMES, pages.REQUEST_BLOCKS, main.MARKS),
    "diagnosis": (pages.DIAGNOSIS, pages.STEPS, main.STAGE_STATES, main.MARKS),
    "streams": (pages.CHECKS, main.STREAMS, pages.LEDGER, main.MARKS),
    "events": (pages.EVENTS, pages.CHANGES),
    "incidents": (pages.INCIDENTS,),
    "finished": (pages.FINISHED, pages.FINISHED_FILTER),
    "stacks": (pages.STACKS,),
    "logs": (pages.LOGS,),
    "memory": (pages.MEMORY_DIALOG, main.MEMORY_BAR, pages.CONFIRM),
    "confirm": (pages.CONFIRM, main.REQUEST_STATES),
    "status": (pages.CLI_STATUS, pages.CLI_REQUESTS, main.FILTER),
    "topology": (pages.TOPOLOGY, pages.WAYS, pages.SUMS, pages.LINKS),
    "clients": (pages.CLIENTS,),
    "tiers": (pages.TIERS, pages.TIER_BARS, pages.BACKENDS),
    "backend": (pages.BACKEND, pages.BACKENDS),
    "trends": (main.TRENDS,),
    "set": (pages.OPTIONS,),
    "ls": (pages.CLI_ENGINES,),
    "finished-command": (pages.FINISHED,),
    "streams-command": (pages.CLI_STREAMS,),
}  # fmt: skip
"""Sections by screen; the last three are output of the commands."""
COMMANDS = {"status": "status", "ls": "ls", "finished-command": "finished", "streams-command": "streams"}
"""The output of these commands, by its key in `SCREENS`."""
