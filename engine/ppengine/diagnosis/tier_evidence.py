"""Evidence of stores and backends of KV tiers. They are no part of a step, and never the root of a stage's fault."""

from __future__ import annotations

import msgspec

from ppengine.protocol.backend_calls import BackendCall


class StoreEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The store of one place."""

    stage: int
    rank: int | None = None
    """Tensor rank; None: stages have one rank."""
    pid: int | None = None
    node: str = ""
    """Name of its node; empty: the engine's own host."""
    exit_code: int | None = None
    exit_detail: str = ""
    calls: list[BackendCall] = []
    """Calls of backends in which its process ended."""
    process_state: str | None = None
    """State letter; None: not known."""
    gone_for_s: float | None = None
    """Since its process ended without a successor; None: one runs."""
    absent_for_s: float | None = None
    """Since its process runs and has not come to the core; None: it has."""
    age_s: float | None = None
    """Age of the newest figures of the present process; None: not known, or too early to judge."""
    jobs: int = 0
    lag_s: float | None = None
    """Age of the oldest job that it owes an answer."""

    @property
    def subject(self) -> str:
        """Name for operators: `the store of stage 1`, with the rank where stages have several."""
        return f"the store of stage {self.stage}" + ("" if self.rank is None else f" rank {self.rank}")

    @property
    def name(self) -> str:
        """The same with its node, if that is another one."""
        return f"{self.subject}{self.where}"

    @property
    def where(self) -> str:
        """Words behind a command with its pid, which is one of its node."""
        return f" on {self.node}" if self.node else ""


class BackendEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One backend, over all places."""

    name: str
    state: str = "open"
    breaker: str = "closed"
    """State for lookups and reads."""
    write_breaker: str = "closed"
    error: str = ""
    broken_for_s: float | None = None
    """Since it is broken or a breaker is not closed; None: it works."""
    errors: int = 0
    """Calls that failed or timed out since the boot."""
    errors_new: int = 0
    """Those of them of the last minute."""
    errors_ago_s: float | None = None
    """Since the newest of them; None: none was seen."""
    corrupt: int = 0
    """Shards with a wrong checksum, length or header since the boot."""
    corrupt_new: int = 0
    """Those of them of the last minute."""
    corrupt_ago_s: float | None = None
    """Since the newest of them; None: none was seen."""
    evicted_new: int = 0
    """Shards deleted for the quota in the last minute."""
    churns_for_s: float | None = None
    """Since it deletes much for the quota while no token comes from it; None: it does not, or is not known to."""
    fill: float | None = None
    """Used share of its quota; None: not known."""
    queue: int = 0
    slowest_ms: float | None = None
    """99th percentile of its reads or writes, the larger one; None: no call."""

    @property
    def only_writes(self) -> bool:
        """Whether its writes alone fail: it is read on."""
        return self.state != "broken" and self.breaker == "closed" and self.write_breaker != "closed"

    @property
    def subject(self) -> str:
        """Name for operators: `backend nvme0`."""
        return f"backend {self.name}"


class TierEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """All of them at one moment."""

    stores: tuple[StoreEvidence, ...] = ()
    backends: tuple[BackendEvidence, ...] = ()
