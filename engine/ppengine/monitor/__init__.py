"""Watching: the agent reads rings and /proc, the gateway merges, judges and publishes. Never in the engine's way."""
