"""The gateway: public sockets, snapshots, events, the audit log and verdicts. Never in the way of the engine."""
