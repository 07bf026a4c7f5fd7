"""Everything that reads bytes of others: how an input is made, how it is read, and the errors that may leave."""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import core_commands
import damage
import msgspec
import past_questions
from ppconsole.link import config_file, export
from ppconsole.link.source import QueryFailed
from ppengine.checkpoint import model_spec, tensor_files
from ppengine.common import config, yaml_reader
from ppengine.gateway import event_journal
from ppengine.gateway.control_lease import Held
from ppengine.protocol import (
    chat_messages,
    control,
    frames,
    offline,
    recording,
    reports,
    snapshot,
    steps,
    text_messages,
)  # fmt: skip
from ppengine.protocol.discovery import EngineRecord
from ppengine.protocol.error_text import LINE_MOST, one_line
from ppengine.protocol.incidents import Incident
from ppengine.protocol.json_files import decode_json
from values import packed, value_of

Make = Callable[[Random], bytes]
Read = Callable[[bytes], None]
PROFILES = config.profiles_dir()
TINY = PROFILES / "models" / "tiny"
SHARD = "model-1.safetensors"


@dataclass(frozen=True)
class Target:
    """One reader. `make` returns an input that is right or nearly so; `words` are what damages it."""

    name: str
    make: Make
    read: Read
    errors: tuple[type[Exception], ...]
    words: tuple[bytes, ...] = tuple(damage.MSGPACK)
    whole: float = 0.125
    """Share of the inputs that are not damaged."""


def targets(folder: Path) -> Iterator[Target]:
    """Yield every target; files that readers want are written into `folder`."""
    yield from _messages()
    yield from _kept(folder)
    desk = past_questions.Questions(folder / "engines")
    yield Target("past: questions", past_questions.question, desk.take, (frames.ProtocolError,), whole=0.5)
    errors = frames.ProtocolError, QueryFailed
    yield Target("past: lists", past_questions.listing, past_questions.take_list, errors, whole=0.5)
    yield from _profiles(folder)
    yield from _checkpoints(folder)
    core = core_commands.CoreCommands()
    yield Target("core: messages", core_commands.make, core.take, (frames.ProtocolError,), whole=0.95)


def check_text(error: Exception) -> None:
    """Assert that an error is one short line that a terminal shows as it is."""
    text = one_line(str(error))
    assert text.isprintable(), f"not printable: {text!r}"
    assert len(text) <= LINE_MOST, f"{len(text)} characters: {text[:100]!r}"


def _messages() -> Iterator[Target]:
    unions = {
        "ToGateway": control.ToGateway, "FromGateway": control.FromGateway, "ToBulk": control.ToBulk,
        "FromBulk": control.FromBulk, "ToFront": offline.ToFront, "FromFront": offline.FromFront,
        "ToCollector": reports.ToCollector, "ToStage": steps.ToStage, "FromStage": steps.FromStage,
        "FromRenderer": chat_messages.FromRenderer, "ToTexts": text_messages.ToTexts,
        "FromTexts": text_messages.FromTexts,
    }  # fmt: skip
    for name, union in unions.items():
        yield Target(f"messages: {name}", _packer(union), _quiet(frames.Codec(union).decode), (frames.ProtocolError,))
    for kind in (snapshot.Snapshot, snapshot.Event):
        read = _quiet(lambda data, kind=kind: frames.decode_as(kind, data))
        yield Target(f"messages: {kind.__name__}", _packer(kind), read, (frames.ProtocolError,))
    snapshots = _packer(snapshot.Snapshot)
    yield Target("messages: packed Snapshot", lambda chance: frames.pack(snapshots(chance)),
                 _quiet(lambda data: frames.decode_as(snapshot.Snapshot, frames.unpack(data))),
                 (frames.ProtocolError,))  # fmt: skip
    yield Target("messages: header", _header, _quiet(frames.decode_header), (frames.ProtocolError,))


def _kept(folder: Path) -> Iterator[Target]:
    words = (*damage.TEXT, *damage.MSGPACK)
    recorded, exported = folder / "a.ppr", folder / "a.zip"
    yield Target(
        "recording", _recording, _file(recorded, _read_recording), (recording.RecordingError, frames.ProtocolError)
    )
    yield Target("recording, packed", lambda chance: gzip.compress(_recording(chance), 1),
                 _file(recorded, _read_recording), (recording.RecordingError, frames.ProtocolError))  # fmt: skip
    yield Target("export", _export, _file(exported, _read_export), (export.ExportError,), words)
    journal = folder / event_journal.FILE
    yield Target("event journal", _journal, _file(journal, event_journal._read), ())
    for kind in (EngineRecord, Incident, Held):
        decode = _quiet(lambda data, kind=kind: decode_json(data, kind))
        yield Target(f"JSON: {kind.__name__}", _json(kind), decode, (ValueError,), tuple(damage.TEXT))


def _profiles(folder: Path) -> Iterator[Target]:
    texts = [path.read_bytes() for path in sorted(PROFILES.glob("*.yaml"))]
    path, words = folder / "profile.yaml", tuple(damage.TEXT)
    load = _file(path, lambda path: config.load_profile(str(path)))
    yield Target("profile", lambda chance: chance.choice(texts), load, (config.ConfigError,), words)
    yield Target(
        "YAML", lambda chance: chance.choice(texts), _quiet(yaml_reader.read_yaml), (yaml_reader.YamlError,), words
    )
    toml = b'[[thresholds]]\nmetric = "ttft_p99_s"\nabove = 2.0\nclear_below = 1.5\ncommand = ["true"]\n'
    toml += b'[on_incident]\ncommand = ["notify-send", "engine"]\n'
    read = _file(folder / "config.toml", config_file.read_config)
    yield Target("console's config", lambda _: toml, read, (config_file.ConfigFileError,), words)


def _checkpoints(folder: Path) -> Iterator[Target]:
    spec, words = json.loads((TINY / "config.json").read_bytes()), tuple(damage.TEXT)
    names = [*spec, "rope_scaling", "quantization_config", "head_dim", "sliding_window", "eos_token_id"]

    def fields(chance: Random) -> bytes:
        return json.dumps({**spec, chance.choice(names): _any(chance)}).encode()

    (folder / "model").mkdir()
    read = _file(folder / "model" / "config.json", lambda path: model_spec.read_spec(path.parent))
    yield Target("config.json", fields, read, (config.ConfigError,), words)
    header = _file(folder / "model.safetensors", tensor_files.read_header)
    yield Target("safetensors", _safetensors, header, (config.ConfigError,), words)
    (folder / "sharded").mkdir()
    (folder / "sharded" / SHARD).write_bytes(struct.pack("<Q", 2) + b"{}")
    shards = _file(
        folder / "sharded" / "model.safetensors.index.json", lambda path: model_spec.tensor_files(path.parent)
    )
    yield Target("index of shards", _shards, shards, (config.ConfigError,), words)


# --- how inputs are made ------------------------------------------------------------------------------------


def _packer(kind: Any) -> Make:
    return lambda chance: packed(kind, chance)


def _json(kind: Any) -> Make:
    return lambda chance: json.dumps(value_of(kind, chance), default=repr).encode()


def _header(chance: Random) -> bytes:
    return msgspec.msgpack.encode([frames.PROTOCOL, *value_of(frames.Header, chance)[1:]])


def _recording(chance: Random) -> bytes:
    header = recording.RecordingHeader(schema=snapshot.SCHEMA, recorded_at=1.0, engine="e", name="n")
    bodies = [packed(recording.Recorded, chance) for _ in range(chance.randrange(4))]
    framed = (len(body).to_bytes(4, "big") + body for body in (frames.encode(header), *bodies))
    return recording.MAGIC + b"".join(framed)


def _export(chance: Random) -> bytes:
    made = io.BytesIO()
    manifest = {"format": export.FORMAT, **(value_of(export.Manifest, chance) if chance.random() < 0.3 else {})}
    what = chance.choice(list(export.DETAILS))
    detail = _any(chance) if chance.random() < 0.3 else value_of(export.DETAILS[what], chance)
    parts = {
        "manifest.json": json.dumps(manifest, default=repr).encode(),
        "snapshot.json": _json(snapshot.Snapshot)(chance),
        f"{what}.json": json.dumps(detail, default=repr).encode(),
    }
    if chance.random() < 0.5:
        # The archive's own sums would find most damage that comes afterwards.
        parts = {name: damage.damaged(data, damage.TEXT, chance) for name, data in parts.items()}
    with zipfile.ZipFile(made, "w", chance.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return made.getvalue()


def _journal(chance: Random) -> bytes:
    bodies = [packed(event_journal.Entry, chance) for _ in range(chance.randrange(5))]
    return b"".join(event_journal._LENGTH.pack(len(body)) + body for body in bodies)


def _safetensors(chance: Random) -> bytes:
    at, entries = 0, {}
    for name in ("a", "b"):
        size = chance.choice([0, 4, 16])
        shape = [size // 4] if chance.random() < 0.8 else [chance.choice([0, 1, 4, -1, 2**62]) for _ in range(3)]
        entries[name] = {"dtype": chance.choice(["F32", "F32", "I99"]), "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


def _shards(chance: Random) -> bytes:
    files = [SHARD] * 12 + ["../x.safetensors", "/etc/passwd", "a\0b", ""]
    return json.dumps({"weight_map": {f"t{index}": chance.choice(files) for index in range(3)}}).encode()


def _any(chance: Random, depth: int = 0) -> Any:
    """Return any value that JSON has."""
    plain = [None, True, False, 0, -1, 1, 2**31, 10**30, 0.5, 1e308, "", "x", "\x1b[2J", "relu", 64, 4]
    if depth > 3 or chance.random() < 0.7:
        return chance.choice(plain)
    if chance.random() < 0.5:
        return [_any(chance, depth + 1) for _ in range(chance.randrange(4))]
    return {chance.choice(["a", "type", "rope_type", "factor", "stages"]): _any(chance, depth + 1) for _ in range(2)}


# --- how they are read --------------------------------------------------------------------------------------


def _quiet(decode: Callable[[bytes], object]) -> Read:
    def read(data: bytes) -> None:
        decode(data)

    return read


def _file(path: Path, reader: Callable[[Path], object]) -> Read:
    def read(data: bytes) -> None:
        path.write_bytes(data)
        reader(path)

    return read


def _read_recording(path: Path) -> None:
    for _ in recording.Recording(path).frames():
        pass


def _read_export(path: Path) -> None:
    read = export.Export(path)
    for what in export.DETAILS:
        read.detail(what)
