"""Facts of faults, each pushed once to the gateway: `diagnosis/fault_log.py` reduces them.

Reports say how things are, facts say that something happened. Facts of one sender arrive in order; the supervisor's
and the core's arrive in either order. A process is known by its place and the generation it was started for.
`mono_ns` is the monotonic clock of the engine's host, on which supervisor, core and gateway run.
"""

from __future__ import annotations

import msgspec

from ppengine.protocol.backend_calls import BackendCall
from ppengine.protocol.place import Place


class Exited(msgspec.Struct, tag="exited", frozen=True, kw_only=True):
    """A process ended by itself; from the supervisor. The end of a process that it replaces or stops is no fact."""

    mono_ns: int
    role: str
    place: Place | None
    """None: the process is no stage's."""
    generation: int
    pid: int
    exit_code: int
    detail: str = ""
    calls: list[BackendCall] = []
    """Calls of backends in which a store has ended, if they may be the reason."""


class Lost(msgspec.Struct, tag="lost", frozen=True, kw_only=True):
    """A stage reported that it cannot go on; from the core. Its process may still be there."""

    mono_ns: int
    place: Place
    generation: int
    words: str
    pid: int | None = None
    """None: it has not loaded."""


class LinkBroke(msgspec.Struct, tag="link-broke", frozen=True, kw_only=True):
    """A stage reported a broken wire, and no end of a process explained it in time; from the core."""

    mono_ns: int
    """Time of that report."""
    stage: int
    """The stage that reported it."""
    peer: int
    """The stage at the other end: its own, if the connection is that of the ranks of a stage.

    With its own rank, too, the reporter is at fault: it expected a message that its step does not have.
    """
    text: str
    """Report of that stage, in one line."""
    closed: bool
    """The connection closed; False: a message arrived that was not due."""
    rank: int = 0
    """Tensor rank of the stage that reported it."""
    peer_rank: int = 0
    """Tensor rank at the other end."""


class GenerationBegan(msgspec.Struct, tag="generation-began", frozen=True, kw_only=True):
    """All stages leave the older generations and meet in this one; from the core."""

    mono_ns: int
    generation: int
    restarted: tuple[Place, ...]
    """Stages that get a new process; empty: all meet again with the processes that they have."""
    why: str
    by: str = ""
    """Operator who requested it; empty: it is automatic."""


class Serving(msgspec.Struct, tag="serving", frozen=True, kw_only=True):
    """All stages have met in a new generation, and the engine serves again; from the core."""

    mono_ns: int
    generation: int
    processes: tuple[tuple[Place, int], ...]
    """The generation for which the serving process of each place was started."""
    took_s: float
    """Seconds since the first generation that did not serve began."""
    recomputed: int
    """Requests that had computed tokens and are recomputed."""
    by: str = ""
    """Operator who requested a restart; empty: it was automatic."""


Fact = Exited | Lost | LinkBroke | GenerationBegan | Serving
