"""NIXL's agent for one end of an edge: memory of two hosts that their network adapters copy, past the kernels.

NIXL brings UCX along. UCX uses verbs here (InfiniBand, RoCE) and nothing else: its TCP transport listens on
all addresses, and writes for every caller to any address of the process.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

VERBS = "ib"
"""UCX's name for all transports of adapters that do RDMA."""
TRANSPORTS = "PPCONSOLE_RDMA_TRANSPORTS"
"""Environment variable with other transports of UCX, for tests on hosts without an adapter."""
_ADAPTERS = Path("/sys/class/infiniband")
_HOST = "DRAM"


class NoRdmaError(Exception):
    """This host or its peer can do no RDMA; one line with the reason."""


def missing() -> str:
    """Return the reason why this host can do no RDMA; empty: it may."""
    if _library() is None:
        return "the package nixl is not installed: pip install 'ppconsole[rdma]'"
    if _transports() == VERBS and not any(_ADAPTERS.glob("*")):
        return f"this host has no RDMA adapter: {_ADAPTERS} is empty"
    return ""


class RdmaAgent:
    """`size` bytes of host memory that one peer may write (a receiver), or from which this side writes (a sender).

    Not for two threads at once. A method raises NoRdmaError if NIXL reports an error.
    """

    def __init__(self, size: int) -> None:
        if reason := missing():
            raise NoRdmaError(reason)
        transports = _transports()
        # UCX reads it when the agent is made.
        os.environ["UCX_TLS"] = transports
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        with _errors("no RDMA agent"):
            nixl = import_module(str(_library()))
            # An adapter needs no thread of the receiver. Its replacements in tests do.
            config = nixl.nixl_agent_config(enable_prog_thread=transports != VERBS, backends=["UCX"])
            self._agent: Any = nixl.nixl_agent(secrets.token_hex(8), config)
        memory = torch.zeros(size, dtype=torch.uint8)
        self.view = memory.numpy().data
        """The memory; bytes under way must stay as they are."""
        self.address = memory.data_ptr()
        """Address of the memory in this process."""
        with _errors(f"{size} bytes cannot be registered for RDMA (ulimit -l bounds them)"):
            self._registered = self._agent.register_memory(memory)
        with _errors("no metadata"):
            self.metadata = bytes(self._agent.get_agent_metadata())
            """NIXL's description of this agent, for the peer."""
        self._peer: str | None = None
        self._peer_address = 0

    def reach(self, metadata: bytes, address: int) -> None:
        """Prepare to write to the memory of the agent that `metadata` describes, which begins at `address`."""
        with _errors("the peer's agent cannot be reached"):
            self._peer, self._peer_address = self._agent.add_remote_agent(metadata), address
            self._agent.make_connection(self._peer)

    def progress(self) -> None:
        """Let UCX answer a peer that connects. One that cannot is the peer's error."""
        with contextlib.suppress(NoRdmaError), _errors("no progress"):
            self._agent.get_new_notifs()

    def write(self, at: int, count: int) -> Write:
        """Begin to copy `count` bytes from offset `at` of this memory to the same offset of the peer's."""
        agent = self._agent
        with _errors("no write"):
            source = agent.get_xfer_descs([(self.address + at, count, 0)], _HOST)
            target = agent.get_xfer_descs([(self._peer_address + at, count, 0)], _HOST)
            handle = agent.initialize_xfer("WRITE", source, target, self._peer)
            return Write(agent, handle, agent.transfer(handle))

    def close(self) -> None:
        """Take the memory back: the peer can write to it no longer."""
        with contextlib.suppress(NoRdmaError), _errors("not closed"):
            if self._peer is not None:
                self._agent.remove_remote_agent(self._peer)
        with contextlib.suppress(NoRdmaError), _errors("not closed"):
            self._agent.deregister_memory(self._registered)
        self._agent = None


class Write:
    """A copy under way."""

    def __init__(self, agent: Any, handle: Any, state: Literal["DONE", "PROC", "ERR"]) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    def done(self) -> bool:
        """Return whether all bytes are in the peer's memory. Raises NoRdmaError if they never will be."""
        with _errors("the copy failed"):
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
        if self._state == "ERR":
            raise NoRdmaError("the copy failed")
        return self._state == "DONE"

    def release(self) -> None:
        """Forget the copy; one that is under way is cancelled."""
        with contextlib.suppress(NoRdmaError), _errors("not released"):
            self._handle.release()


def _transports() -> str:
    return os.environ.get(TRANSPORTS) or VERBS


def _library() -> str | None:
    """Return the module of NIXL: the one that chooses by the CUDA of torch, else one of its two."""
    return next((name for name in ("nixl", "nixl_cu13", "nixl_cu12") if find_spec(name) is not None), None)


@contextlib.contextmanager
def _errors(what: str) -> Iterator[None]:
    """Turn NIXL's errors, which have no base of their own, into one line."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        text = " ".join(str(error).split())
        raise NoRdmaError(f"{what}: {type(error).__name__}: {text}") from None
