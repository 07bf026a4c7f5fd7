"""Shapes that the modules of this kernel share."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

HALF = gl.constexpr(64)
"""Rows of scores of one group of warps; also elements of a row in shared memory, 128 bytes."""
ROWS = gl.constexpr(128)
"""Rows of a tile of queries: tokens times the query heads of one key head."""
TILE = gl.constexpr(128)
"""Slots of the cache read at once."""
STAGES = gl.constexpr(2)
"""Tiles of keys, and of values, loading or in use."""
LEAST_PART = gl.constexpr(512)
"""Slots of the smallest part of a context."""

# What the loading warp says of a tile of queries, in this order.
TOKEN = gl.constexpr(0)
"""First token, counted from the step's first."""
LEFT = gl.constexpr(1)
"""Tokens of the row from there on."""
SEEN = gl.constexpr(2)
"""Slots of the row before that token."""
KV_HEAD = gl.constexpr(3)
BEGIN = gl.constexpr(4)
"""First slot of the part of the context, and the one behind its last."""
END = gl.constexpr(5)
PART = gl.constexpr(6)
"""Place of the part among all parts of the launch; -1 if the context is one part."""
RUNNING = gl.constexpr(7)
"""0 behind the last tile."""
WORDS = gl.constexpr(8)

# Words by pair of a tile of queries and a key head, for `weigh`, behind two of the launch: pairs and parts of each.
HEADER = gl.constexpr(4)
PAIR_WORDS = gl.constexpr(4)


def tile_tokens(group: int) -> int:
    """Return how many tokens a tile of queries has."""
    return int(ROWS.value) // group
