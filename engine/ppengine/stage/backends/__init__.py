"""Devices that a stage can run on: `base` and `hardware` are the interface, `cpu` and `cuda` implement it."""
