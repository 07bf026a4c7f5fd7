"""The source of a console's figures: a live engine over ZeroMQ, or a recording, behind one interface.

`source` has the interface and needs no ZeroMQ; `engine_link` is the live link, `recording` writes and replays files,
`find` chooses the engine.
"""
