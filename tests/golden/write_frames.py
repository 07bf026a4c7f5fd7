"""Write one message of each type, with every field filled, as the present protocol version sends it.

python tests/golden/write_frames.py

`protocol-N.bin` has the frames, `protocol-N.json` what they mean. Those of earlier versions are never written again.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect
from ppengine.protocol import frames
from ppengine.protocol.control import FromBulk, FromGateway, Inspected, ToBulk, ToGateway
from ppengine.protocol.sampling import SamplingParams
from ppengine.protocol.snapshot import Events, Snapshot
from ppengine.protocol.store_verbs import StoreAdd
from ppengine.protocol.verbs import Limit, Many

FOLDER = Path(__file__).parent
UNIONS: dict[str, Any] = {
    "to-gateway": ToGateway, "from-gateway": FromGateway, "to-bulk": ToBulk, "from-bulk": FromBulk,
    "snapshot": Snapshot, "events": Events,
}  # fmt: skip
"""Type of the body by the first word of a message's name."""
CHOSEN: dict[type, dict[str, Any]] = {
    SamplingParams: {"n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": 64,
                     "min_tokens": 2, "stop": ["END"], "stop_token_ids": [3], "logprobs": 5, "min_p": 0.25,
                     "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25,
                     "logit_bias": {4: -2.5}, "allowed_token_ids": [4, 5, 6], "bad_words": ["bad"],
                     "bad_words_ids": [[5, 6]]},
    Limit: {"client": "ann", "limit": "60/min"},
    StoreAdd: {"backend": "nvme0", "kind": "files", "url": "/data/kv", "quota_gib": 1.5,
               "write": "evicted", "timeout_ms": 7},
    Many: {"verbs": [{"type": "abort", "request": "r-1"}, {"type": "abort", "request": "r-2"}], "revisions": [1, None]},
}  # fmt: skip
"""Values of the types whose fields depend on each other."""
VALUES: dict[str, Any] = {"share": 0.5, "utilization": 0.5, "ttl_s": 60.0, "client": "ann", "backend": "nvme0"}
"""Values of fields with limits that their type does not have."""


class Frame(msgspec.Struct, array_like=True):
    """One message: its name, and the frames as they are sent."""

    name: str
    header: bytes
    body: bytes


def members(union: Any) -> list[inspect.StructType]:
    """Return the types of a union."""
    kinds = typing.get_args(union) or (union,)
    infos = [inspect.type_info(kind) for kind in kinds]
    return [info for info in infos if isinstance(info, inspect.StructType)]


def value_of(name: str, info: inspect.Type, pick: int = 0) -> Any:
    """Return a value of a type that is no default. `pick`: the member of a union of messages."""
    if name in VALUES:
        return VALUES[name]
    match info:
        case inspect.StructType():
            return struct_of(info, pick)
        case inspect.UnionType():
            kinds = [kind for kind in info.types if not isinstance(kind, inspect.NoneType)]
            return value_of(name, kinds[pick % len(kinds)])
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [value_of("", info.item_type)]
        case inspect.TupleType():
            return [value_of("", each) for each in info.item_types]
        case inspect.DictType():
            return {value_of("key", info.key_type): value_of("", info.value_type)}
        case inspect.LiteralType():
            return sorted(info.values, key=str)[-1]
        case inspect.BoolType():
            return True
        case inspect.IntType():
            return 7
        case inspect.FloatType():
            return 1.5
        case inspect.BytesType():
            return b"bytes"
        case inspect.RawType():
            return msgspec.Raw(msgspec.msgpack.encode({"any": "detail"}))
        case _:
            return f"a {name}"


def struct_of(info: inspect.StructType, pick: int = 0) -> Any:
    """Return a message as its decoder takes it."""
    if info.cls in CHOSEN:
        values = CHOSEN[info.cls]
    else:
        values = {field.encode_name: value_of(field.name, field.type, pick) for field in info.fields}
    if info.array_like:
        return ([] if info.tag is None else [info.tag]) + [values[field.encode_name] for field in info.fields]
    return ({} if info.tag_field is None else {info.tag_field: info.tag}) | values


def header() -> frames.Header:
    """Return the header of a message at a fixed time."""
    made = frames.header("engine-1", "epoch-1", "event", 7)
    return msgspec.structs.replace(made, mono_ns=123_456_789_000, wall=1_700_000_000.25)


def make() -> list[Frame]:
    """Return one frame a message type, and one a verb."""
    found = []
    head = frames.encode(header())
    for group, union in UNIONS.items():
        for info in members(union):
            verb = next((field.type for field in info.fields if field.name == "verb"), None)
            picks = len(verb.types) if isinstance(verb, inspect.UnionType) else 1
            for pick in range(picks):
                value = struct_of(info, pick)
                tags = [str(info.tag or "")] + ([value["verb"]["type"]] if picks > 1 else [])
                # Through the type: the encoder then writes it as the engine does.
                message = msgspec.convert(value, info.cls)
                found.append(Frame(" ".join([group, *filter(None, tags)]), head, frames.encode(message)))
    return found


def meaning(one: Frame) -> Any:
    """Return what a frame says to the present decoders, as plain data. Raises ProtocolError."""
    union = UNIONS[one.name.partition(" ")[0]]
    body = frames.Codec(union).decode(one.body)
    if isinstance(body, Inspected):
        body.data = msgspec.Raw(msgspec.json.encode(msgspec.msgpack.decode(bytes(body.data))))
    return msgspec.json.decode(msgspec.json.encode({"header": frames.decode_header(one.header), "body": body}))


def read(version: int) -> tuple[list[Frame], dict[str, Any]]:
    """Return frames and meanings of a version."""
    kept = msgspec.msgpack.decode((FOLDER / f"protocol-{version}.bin").read_bytes(), type=list[Frame])
    return kept, msgspec.json.decode((FOLDER / f"protocol-{version}.json").read_bytes())


def main() -> None:
    """Write the files of the present version."""
    made = make()
    name = f"protocol-{frames.PROTOCOL}"
    (FOLDER / f"{name}.bin").write_bytes(msgspec.msgpack.encode(made))
    lines = (f"{msgspec.json.encode(one.name).decode()}: {msgspec.json.encode(meaning(one)).decode()}" for one in made)
    (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"wrote {len(made)} messages to {name}.bin and {name}.json")


if __name__ == "__main__":
    main()
