"""Wire messages of the engine. Imports msgspec alone, so that the console stays light.

Public sockets (gateway binds, consoles connect):

=========  =================  =============================================================
socket     pattern            carries
=========  =================  =============================================================
state      XPUB, verbose      `Snapshot` at 10 Hz (topic ``snap``) and 1 Hz (``snap1``), `Event` (``event``)
control    ROUTER <- DEALER   `Hello`, `Ping`, `Command` and what answers them
bulk       ROUTER <- DEALER   `Replay` of events, `Fetch` of outputs, `Inspect` of a request or stacks
=========  =================  =============================================================

docs/design/protocol.md has the rules of framing, sequences and epochs.
"""
