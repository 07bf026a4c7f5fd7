"""Ways to damage an input: bytes, pieces, lengths, and words that mean something to a reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

BYTES_MOST = 64 * 1024
"""Most bytes of a damaged input. Readers have caps of their own, which tests try one by one."""
MSGPACK = [
    b"\xc0", b"\xc1", b"\xc2", b"\x90", b"\x91", b"\x80", b"\x81", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xcb\x7f\xf8" + bytes(6), b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7), b"\xa4type", b"\xd4\x01\x00", b"\xd6\xff" + bytes(4), b"\x91" * 2_000, b"\xa2\xff\xfe",
]  # fmt: skip
TEXT = [
    b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\u0000", b"\\ud800", b"null", b"true", b"NaN", b"1e999", b"-1",
    b"9" * 400, b"\xff", b"\x00", b"\x1b[31m", b"&a", b"*a", b"!!python/object:os.system", b"? ", b"- ", b"\n", b"\t",
    b"[" * 2_000, b'{"a":' * 500, b"2024-13-45", b"0x" + b"f" * 300, b"<<: *a", b"%YAML 9.9\n", b"--- ",
]  # fmt: skip


def damaged(data: bytes, words: Sequence[bytes], chance: Random) -> bytes:
    """Return `data` after one to four random changes."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        chance.choice(_WAYS)(changed, words, chance)
        if not changed:
            break
    return bytes(changed[:BYTES_MOST])


def _flip(data: bytearray, words: Sequence[bytes], chance: Random) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _set(data: bytearray, words: Sequence[bytes], chance: Random) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.randrange(256)


def _word(data: bytearray, words: Sequence[bytes], chance: Random) -> None:
    """Put a word over what is there, or between it."""
    word, at = chance.choice(words), chance.randint(0, len(data))
    data[at : at + chance.choice([0, 1, len(word)])] = word


def _cut(data: bytearray, words: Sequence[bytes], chance: Random) -> None:
    del data[chance.randint(0, len(data)) :]


def _drop(data: bytearray, words: Sequence[bytes], chance: Random) -> None:
    start = chance.randint(0, len(data))
    del data[start : start + chance.choice([1, 2, 8, 64])]


def _repeat(data: bytearray, words: Sequence[bytes], chance: Random) -> None:
    start = chance.randint(0, len(data))
    piece = bytes(data[start : start + chance.choice([1, 4, 32, 256])])
    data[start:start] = piece * chance.choice([1, 2, 50])


def _swap(data: bytearray, words: Sequence[bytes], chance: Random) -> None:
    """Move a piece to another place."""
    start, size = chance.randint(0, len(data)), chance.choice([1, 4, 16])
    piece = bytes(data[start : start + size])
    del data[start : start + size]
    at = chance.randint(0, len(data))
    data[at:at] = piece


_WAYS: list[Callable[[bytearray, Sequence[bytes], Random], None]] = [_flip, _set, _word, _cut, _drop, _repeat, _swap]
