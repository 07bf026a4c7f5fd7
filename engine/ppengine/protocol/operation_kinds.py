"""The kinds of operations in rings, and which of them are waits. Agent, diagnosis and console read them here.

A new kind also has a glyph in the console's `view/timeline.py`, a word in `view/legend.py`, and if it waits in a place
of its own, a row of `_SLEEPS` in `diagnosis/budgets.py`.
"""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Kind of an operation."""

    IDLE = 0
    """Waits for a step from the core."""
    RECEIVE = 1
    """Main ring: waits for a message. Ring `receive`: a posted one, as `Record` says of messages."""
    EMBED = 2
    FORWARD = 3
    """Layers of the stage; `detail` is the number of the first one, `size` the tokens."""
    HEAD = 4
    SAMPLE = 5
    SEND = 6
    """Main ring: hands a message over, which is work of its own. Ring `send`: the message, as `Record` says."""
    SWAP_OUT = 7
    SWAP_IN = 8
    COPY = 9
    MAP = 10
    COLLECTIVE = 11
    STEP = 12
    """The whole step on this stage, from taking it up to retiring it; `size` its tokens, `detail` their context."""
    TOKEN_RETURN = 13
    """Waits for sampled tokens from the last stage."""
    LOAD = 14
    DEVICE = 15
    """Waits for a device to finish a step."""
    ROOM = 16
    """Inside a send: waits until fewer messages are under way, which is when the peer takes them."""
    ON_DEVICE = 17
    """Work of a device for a step, by its own clock; `size` and `detail` as of STEP. Written once, when the step is
    retired: ended when the host saw it done, begun earlier by the time that the device measured, returned after
    layers and head, before sampling. Step 0: a trial of boot with that many tokens."""
    ALL_REDUCE = 18
    """Waits for the part of another rank of the stage, `peer`; `detail` is the call site (`common.groups.site`)."""
    ALL_GATHER = 19
    """The same, for its columns."""
    MASK = 20
    """Waits for masks that come behind their step, from the core."""

    @property
    def word(self) -> str:
        """Its name in samples and texts, as `all_reduce`."""
        return self.name.lower()


RANK_WAITS = frozenset({Kind.ALL_REDUCE, Kind.ALL_GATHER})
"""Operations that wait for another rank of the stage."""
WAITS = RANK_WAITS | {Kind.IDLE, Kind.RECEIVE, Kind.ROOM, Kind.COLLECTIVE, Kind.TOKEN_RETURN, Kind.MASK}
"""Operations in which a stage does no work of its own. A send is work: the kernel takes it at once."""
RANK_WAIT_WORDS = frozenset(kind.word for kind in RANK_WAITS)
WAIT_WORDS = frozenset(kind.word for kind in WAITS)
