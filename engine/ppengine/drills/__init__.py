"""Faults on demand, for tests and drills: an engine started with `--allow-faults` can be made to fail in a known way.

`registry` defines a kind. The modules with the kinds (`hang_faults`, `edge_faults`, ...) have one decorated function a
kind. `fault_desk` executes a command in the gateway: from outside (`target`, `cgroups`, `tcp_sockets`) or by a message
to the stage. There `stage_faults` has put the parts behind `fault_points`. `start_faults` strike a stage that starts.

An engine without the option imports nothing of this.
"""
