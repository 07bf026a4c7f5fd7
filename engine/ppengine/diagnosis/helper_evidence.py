"""Evidence of processes beside the pipeline: HTTP, texts, supervisor, fork server, agent, children of core and others.

Steps go on without them.
"""

from __future__ import annotations

import msgspec


class HelperEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One such process, which runs."""

    role: str
    """Name in the engine, as `http0`; of a child, that of its package."""
    parent: str = ""
    """Role of the process whose child it is; empty: the supervisor's."""
    pid: int
    process_state: str | None = None
    """State letter; None: not known."""
    tracer: str | None = None
    """Name and pid of who has it in state t."""
    frozen: str = ""
    """The file of the cgroup by which it is frozen; empty: it is not."""
    stopped_for_s: float | None = None
    """Since the first of an unbroken run of stops and frosts; None: it is not stopped."""
    silent_for_s: float = 0.0
    """Age of its newest report, or of its first sight before it; children send none."""
    reported: bool = True
    """Whether a report has come since it began."""
    owes_for_s: float | None = None
    """Seconds for which the core has waited for an answer of it; None: it owes none, or not for long."""
    open: int = 0
    """Answers that an HTTP process had open at its newest report."""
    of: int = 1
    """Processes that share its work."""
