"""The ends of processes beside the stages in words: one event each, and the only one."""

from __future__ import annotations

from typing import NamedTuple

from ppengine.common.child_process import is_unclean
from ppengine.common.config import EngineConfig
from ppengine.protocol.facts import Exited


class EndEvent(NamedTuple):
    """The event of an end. `stage`: the one beside which the process ran."""

    kind: str
    text: str
    stage: int | None = None


def end_event(config: EngineConfig, exited: Exited) -> EndEvent | None:
    """Return the event of the end of a process; None: another part has it, or a core ended on request."""
    how = f"(pid {exited.pid}) has ended, {exited.detail or f'exit code {exited.exit_code}'}"
    kind = f"{exited.role}.ended"
    if exited.role in config.store_roles:
        place = next(place for place in config.groups.places if place.store_role == exited.role)
        effect = "prompts are computed, not fetched, until its successor is there"
        return EndEvent(kind, f"the store of {config.groups.text(place)} {how}; {effect}", place.stage)
    texts = {
        "supervisor": f"the supervisor {how}, and all processes of the engine with it; they are restarted",
        "agent": f"the agent {how}: the stages are not sampled",
        "forkserver": f"the fork server {how}; it is restarted",
        "gateway": f"the gateway {how}; it is restarted",
        "core": f"the engine core {how}" if is_unclean(exited.exit_code) else "",
        **{role: f"the HTTP process {role} {how}; it is restarted" for role in config.http_roles},
        **dict.fromkeys(config.text_roles, f"the process of texts {how}; it is restarted"),
    }
    text = texts.get(exited.role, "")
    return EndEvent(kind, text) if text else None
