"""The engine core: one scheduler in one event loop over stages, gateway and timers. It waits for no other process."""
