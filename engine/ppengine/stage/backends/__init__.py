"""Devices that a stage can run on: `cpu` and `cuda` behind the interface in `hardware`."""
