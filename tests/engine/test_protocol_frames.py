"""Framing and codecs against hostile bytes: only ProtocolError may come of it."""

from random import Random

import msgspec
import pytest
from ppengine.gateway import envelope
from ppengine.protocol import frames
from ppengine.protocol.control import Command, FromBulk, FromGateway, Hello, Refused, ToBulk, ToGateway
from ppengine.protocol.offline import FromFront, ToFront
from ppengine.protocol.reports import ToCollector
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Snapshot
from ppengine.protocol.verbs import SetMemory, Submit

UNIONS = [ToGateway, FromGateway, ToBulk, FromBulk, ToFront, FromFront, ToCollector]
CODECS = [frames.Codec(union) for union in UNIONS]
GOOD = frames.encode(
    Command(id="c", epoch="e", by="b", verb=Submit(prompt="p", sampling=SamplingParams(max_tokens=3)), reason="r")
)
HEAD = frames.encode(frames.header("id", "epoch", "snap", 3))
DEEP = [b"\x91" * 100_000, b"\x81\xa1a" * 60_000, b"\x81\xa4type\xa7command" + b"\x91" * 50_000]
CRAFTED = [
    b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x81\xa4type\xa1\xff",
    b"\x81\xa4type\xa5hello", b"\x81\xa4type\xc0", b"\x81\xa4type\xa4nope",
    b"\x82\xa4type\xa4ping\xa5nonce\xcb" + b"\xff" * 8,
    b"\xc7\xff\x01" + bytes(255), b"\xa2\xff\xfe", *DEEP,
]  # fmt: skip


def only_protocol_errors(body, seed=None):
    for codec in CODECS:
        try:
            codec.decode(body)
        except frames.ProtocolError as error:
            assert str(error).isprintable() and len(str(error)) < 400, seed
    for read in (frames.decode_header, lambda data: frames.decode_as(Snapshot, data)):
        try:
            read(body)
        except frames.ProtocolError:
            continue


@pytest.mark.parametrize("body", CRAFTED, ids=range(len(CRAFTED)))
def test_crafted_bytes(body):
    only_protocol_errors(body)


# Drawing by hypothesis took twenty times as long as reading. A seed says again what it drew.
def test_random_bytes():
    for seed in range(2000):
        chance = Random(seed)
        only_protocol_errors(chance.randbytes(chance.randint(0, 300)), seed)


def test_damaged_messages():
    for seed in range(2000):
        chance = Random(seed)
        whole = bytearray(chance.choice([GOOD, HEAD]))
        for _ in range(chance.randint(1, 4)):
            whole[chance.randrange(len(whole))] = chance.choice([0, 0x7F, 0xC0, 0xFF, chance.randrange(256)])
        end = chance.choice([len(whole), chance.randint(0, len(whole))])
        only_protocol_errors(bytes(whole[:end]), seed)


def plain(chance, depth=3):
    """Draw a value of any kind, at its edges as often as not."""
    kind = chance.randrange(6 if depth == 0 else 8)
    if kind == 0:
        return chance.choice([None, False, True])
    if kind == 1:
        return chance.choice([0, 1, -1, -(2**63), 2**63, 2**64 - 1, chance.randint(-(2**63), 2**64 - 1)])
    if kind == 2:
        return chance.choice([0.0, -0.0, float("nan"), float("inf"), 5e-324, 1.8e308, chance.uniform(-1e9, 1e9)])
    if kind in (3, 4):
        return text(chance)
    if kind == 5:
        return chance.randbytes(chance.randint(0, 40))
    if kind == 6:
        return [plain(chance, depth - 1) for _ in range(chance.randint(0, 4))]
    return {text(chance): plain(chance, depth - 1) for _ in range(chance.randint(0, 4))}


def text(chance):
    return "".join(chance.choices([*FIELDS, *"a\0\n\x1b\u202e", chr(chance.randrange(0xD800))], k=chance.randint(0, 8)))


FIELDS = ["nonce", "id", "verb", "epoch", "by", "event", "stages", "type"]
TAGS = ["hello", "ping", "command", "replay", "fetch", "inspect", "core", "agent", "processes", "happened", "outcome"]


def test_well_formed_nonsense():
    for seed in range(2000):
        chance = Random(seed)
        fields = {name: plain(chance) for name in chance.sample(FIELDS[:-1], chance.randint(0, 7))}
        if chance.random() < 0.3:  # the decoder quotes a field of a verb that it does not know
            fields["verb"] = {"type": chance.choice(["abort", "submit", "pause"]), text(chance): plain(chance)}
        only_protocol_errors(msgspec.msgpack.encode({"type": chance.choice(TAGS), **fields}), seed)


def test_an_envelope_opens_or_is_refused():
    for seed in range(1000):
        chance = Random(seed)
        some = [HEAD, GOOD, chance.randbytes(chance.randint(0, 40)), b""]
        an_envelope_opens_or_is_refused([chance.choice(some) for _ in range(chance.randint(0, 5))], seed)


def an_envelope_opens_or_is_refused(parts, seed):
    try:
        head, body = envelope.open_message(parts)
        assert head.proto == frames.READABLE_FROM and isinstance(body, bytes) and len(parts) == 2, seed
    except frames.ProtocolError as error:
        answer = envelope.refusal(parts, error)
        assert answer is None or (isinstance(answer, Refused) and answer.text.isprintable()), seed
        assert (answer is None) is not envelope.readable(parts), seed
        assert isinstance(envelope.nonce(parts), int), seed


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_message_is_exactly_two_frames(count):
    with pytest.raises(frames.ProtocolError, match=f"{count} frames where 2 belong"):
        frames.split([b"x"] * count)


def test_a_name_that_the_peer_chose_cannot_reach_the_terminal():
    verb = {"type": "abort", "request": "r", "\x1b[2J\n\u202e": 1}
    body = msgspec.msgpack.encode({"type": "command", "id": "c", "epoch": "e", "by": "b", "verb": verb})
    with pytest.raises(frames.ProtocolError, match=r"unknown field.*\\x1b\[2J.*\\u202e") as caught:
        CODECS[0].decode(body)
    assert str(caught.value).isprintable()


def test_an_oversized_frame_is_refused():
    with pytest.raises(frames.ProtocolError, match="bytes; at most"):
        frames.split([b"", bytes(frames.MAX_FRAME_BYTES + 1)])


def test_another_protocol_version_is_refused_and_new_fields_are_not():
    head = msgspec.msgpack.decode(HEAD)
    assert frames.decode_header(msgspec.msgpack.encode([*head, "a field of the future"])).seq == 3
    for version in (0, frames.PROTOCOL + 1, -1):
        with pytest.raises(frames.ProtocolError, match="is not spoken here"):
            frames.decode_header(msgspec.msgpack.encode([version, *head[1:]]))
    data = msgspec.msgpack.decode(frames.encode(Hello(proto_min=1, proto_max=1, client="c", user="u")))
    assert CODECS[0].decode(msgspec.msgpack.encode({**data, "future": 1})).user == "u"


@pytest.mark.parametrize(
    ("verb", "code", "text"),
    [
        ({"type": "rm-rf"}, "UNSUPPORTED", "no verb 'rm-rf'"),
        ({"type": "__class__"}, "UNSUPPORTED", "no verb"),
        ({"type": "set-memory", "utilization": "much"}, "INVALID", "float"),
        ({"type": "set-memory", "utilization": 0.5, "extra": 1}, "INVALID", "unknown field"),
        (
            {"type": "submit", "prompt": "x", "sampling": {"temperature": 1e9}},
            "INVALID",
            "it must be 0 (greedy) to 100",
        ),
        ({"type": "abort"}, "INVALID", "request"),
    ],
)
def test_a_command_that_cannot_be_read_is_refused_by_its_id(verb, code, text):
    body = msgspec.msgpack.encode({"type": "command", "id": "c9", "epoch": "e", "by": "b", "verb": verb})
    with pytest.raises(frames.ProtocolError) as caught:
        CODECS[0].decode(body)
    answer = envelope.refusal([HEAD, body], caught.value)
    assert (answer.id, answer.code) == ("c9", code) and text in answer.text


def test_what_goes_out_comes_back():
    command = Command(id="c", epoch="e", by="b", verb=SetMemory(utilization=0.25), if_rev=3, dry_run=True)
    assert CODECS[0].decode(frames.encode(command)) == command
    assert frames.decode_header(HEAD).topic == "snap"


@pytest.mark.parametrize(
    ("verb", "says"),
    [
        (Submit(prompt="a\udc9bz"), "prompt is not UTF-8 at offset 1: byte 0x9b"),
        (Submit(prompt="a\ud83d"), r"prompt is not UTF-8 at offset 1: U\+D83D, half a character"),
        (Submit(prompt="a", sampling=SamplingParams(stop=["x", "yz\udcff"])), r"stop\[1\] is not UTF-8 at offset 2"),
    ],
)
def test_a_text_that_no_peer_could_read_is_named_with_its_place(verb, says):
    with pytest.raises(frames.NotUtf8, match=says):
        frames.encode(Command(id="c", epoch="e", by="b", verb=verb))


def test_a_packed_body_is_the_same_again_and_a_bad_one_is_refused():
    body = frames.encode(frames.header("e", "b")) * 1000
    packed = frames.pack(body)
    assert frames.unpack(packed) == body and len(packed) < len(body) / 5
    for bad in (b"", b"no zlib", packed[:-1], packed[:20], frames.pack(bytes(frames.MAX_FRAME_BYTES + 1))):
        with pytest.raises(frames.ProtocolError, match="packed message"):
            frames.unpack(bad)
    assert len(frames.unpack(frames.pack(bytes(frames.MAX_FRAME_BYTES)))) == frames.MAX_FRAME_BYTES
