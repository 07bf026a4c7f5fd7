"""Messages between the gateway and the process of texts, on the gateway's socket `texts`."""

from __future__ import annotations

import msgspec

from ppengine.protocol.control import ErrorCode
from ppengine.protocol.verbs import Submit


class Encode(msgspec.Struct, tag="encode", kw_only=True):
    """A submission with texts, answered by `Encoded`. One that is repeated while it is under way counts once."""

    id: str
    """Id of its command."""
    submit: Submit


class Encoded(msgspec.Struct, tag="encoded", kw_only=True):
    """The submission by token ids alone, or the reason why there is none."""

    id: str
    submit: Submit | None = None
    """Without prompt text, chat and bad words; stop texts stay. None: it is refused."""
    error: str = ""
    """One line; empty: there is none."""
    code: ErrorCode = "INVALID"
    """Code of the refusal that the error leads to."""


class TextsAlive(msgspec.Struct, tag="texts-alive", kw_only=True):
    """The process takes work; it says so once a second. The number shows a gateway that another one is there."""

    pid: int


class TextsEvent(msgspec.Struct, tag="texts-event", kw_only=True):
    """An event for the engine's log, as the end of the process of chat templates."""

    kind: str
    text: str


ToTexts = Encode
FromTexts = Encoded | TextsAlive | TextsEvent
