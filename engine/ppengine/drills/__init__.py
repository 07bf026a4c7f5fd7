"""Faults on demand, for tests and drills: an engine started with `--allow-faults` can be told to fail in a known way.

`registry` says what a kind is; the modules with the kinds in them (`hangs`, `edges`, `ends`, `slow`, `numbers`,
`incidents`, `watchers`, `devices`) are one decorated function a kind. `desk` carries a command out for the gateway:
from outside (`target`, `groups`, `wires`) or by a word to the stage, whose `stage` module has put `points` where a
fault can strike; `boot` is for what strikes a stage that starts.
Nothing here is imported by an engine that was started without the option.
"""
