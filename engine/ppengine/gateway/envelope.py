"""Opens `[header][body]` from outside, and answers senders of anything else."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ppengine.protocol import frames
from ppengine.protocol.control import Refused
from ppengine.protocol.verb_table import ROWS

_TEXT_MOST = 300


class _Tag(msgspec.Struct):
    type: str = ""


class _Outline(msgspec.Struct):
    """The readable part of a command whose verb is not readable."""

    type: str = ""
    id: str = ""
    verb: _Tag | None = None


class _Numbered(msgspec.Struct):
    nonce: int = 0


def open_message(parts: Sequence[bytes]) -> tuple[frames.Header, bytes]:
    """Return header and body of two frames. Raises ProtocolError."""
    head, body = frames.split(parts)
    return frames.decode_header(head), body


def readable(parts: Sequence[bytes]) -> bool:
    """Return whether there is a header: only senders of this protocol get an answer."""
    try:
        frames.decode_header(parts[0] if parts else b"")
    except frames.ProtocolError:
        return False
    return True


def refusal(parts: Sequence[bytes], error: frames.ProtocolError) -> Refused | None:
    """Return the answer to an unreadable message; None if it must be dropped."""
    if not readable(parts):
        return None
    text = " ".join(str(error).split())[:_TEXT_MOST]
    try:
        outline = frames.decode_as(_Outline, parts[1] if len(parts) == 2 else b"")
    except frames.ProtocolError:
        return Refused(id="", code="PROTOCOL", text=text)
    identity = outline.id[:128]
    if outline.type == "command" and outline.verb is not None:
        verb = outline.verb.type
        if verb not in ROWS:
            return Refused(id=identity, code="UNSUPPORTED", text=f"there is no verb {verb[:64]!r}")
        # A value out of its range: the text is for users, so it goes without the decoder's preamble.
        return Refused(id=identity, code="INVALID", text=text.partition("ValidationError: ")[2] or text)
    return Refused(id=identity, code="PROTOCOL", text=text)


def nonce(parts: Sequence[bytes]) -> int:
    """Return the nonce of an unreadable bulk question, 0 if it has none."""
    try:
        return frames.decode_as(_Numbered, parts[1] if len(parts) == 2 else b"").nonce
    except frames.ProtocolError:
        return 0
