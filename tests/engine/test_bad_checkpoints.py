"""A checkpoint whose files lie is one short line with file, field, value and range, before any process starts."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ppengine.checkpoint.config_json import SETTING_MOST
from ppengine.checkpoint.model_spec import CheckpointError, check_weights, read_spec, tensor_files
from ppengine.checkpoint.special_tokens import special_tokens
from ppengine.checkpoint.template_source import template_source
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import profiles_dir
from ppengine.protocol.error_text import TEXT_MOST, one_line

TINY = profiles_dir() / "models" / "tiny"
CONFIG = json.loads((TINY / "config.json").read_bytes())
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be a whole number, 1 to 1024"),
    "layers true": ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be a whole number"),
    "layers of 400 digits": ({"num_hidden_layers": 10**400}, "num_hidden_layers is 1000"),
    "head": ({"head_dim": 100_000}, "head_dim is 100000; it must be a whole number, 1 to 1024"),
    "odd head": ({"head_dim": 33}, "head_dim is 33; it must be even"),
    "vocabulary": ({"vocab_size": 2**40}, "vocab_size is 1099511627776; it must be a whole number, 1 to 1048576"),
    "width": ({"hidden_size": 2**40}, "hidden_size is 1099511627776; it must be a whole number, 1 to 65536"),
    "one position": ({"max_position_embeddings": 1}, "is 1; it must be a whole number, 2 to 4194304"),
    "positions": ({"max_position_embeddings": 2**60}, "it must be a whole number, 2 to 4194304"),
    "theta 0": ({"rope_theta": 0}, "rope_theta is 0; it must be a number, 2 to 1e+12"),
    "theta 1": ({"rope_theta": 1, "rope_scaling": YARN}, "rope_theta is 1; it must be a number, 2 to 1e+12"),
    "theta huge": ({"rope_theta": 1e300}, "rope_theta is 1e+300; it must be a number, 2 to 1e+12"),
    "factor huge": ({"rope_scaling": {**YARN, "factor": 1e308}}, "rope factor is 1e+308; it must be a number, 0 to"),
    "factor large": ({"rope_scaling": {**YARN, "factor": 9e5}}, "rope factor 900000 makes 1843200000 positions"),
    "frequencies": ({"rope_scaling": LLAMA3}, "low_freq_factor is 4; it must be below 4"),
    "eos negative": ({"eos_token_id": -1}, "eos_token_id: token id is -1; it must be a whole number of at least 0"),
    "eos true": ({"eos_token_id": True}, "eos_token_id: token id is True"),
    "eos nested": ({"eos_token_id": [[2]]}, "eos_token_id: token id is [[2]]"),
    "many eos": ({"eos_token_id": [1] * 10_000}, "or a list of at most 256"),
    "bos negative": ({"bos_token_id": [-7]}, "bos_token_id: token id is [-7]"),
    "dtype a list": ({"torch_dtype": ["float16"]}, "torch_dtype is ['float16']; it must be a text"),
    "dtype long": ({"torch_dtype": "\x1b[31m" * 9_000}, r"dtype is '\x1b[31m"),
    "flag a text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
    "flag a number": ({"attention_bias": 1}, "attention_bias is 1; it must be true or false"),
    "eps": ({"rms_norm_eps": 1e9}, "rms_norm_eps is 1000000000.0; it must be a number, 0 to 1"),
    "architecture long": ({"architectures": ["\x1b[2J" * 9_000]}, r"\x1b[2J"),
    "architecture nested": ({"architectures": [[["x"]]]}, "is not supported; these work: OPTForCausalLM"),
    "type long": ({"architectures": None, "model_type": "m" * 9_000}, "is not supported; these work: OPTForCausalLM"),
}  # fmt: skip


def is_one_line(text: str) -> None:
    assert one_line(text).isprintable()
    assert len(one_line(text)) <= TEXT_MOST


@pytest.mark.parametrize("case", FIELDS)
def test_a_field_out_of_its_range_is_named_with_file_and_range(case: str, tmp_path: Path) -> None:
    fields, text = FIELDS[case]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **fields}))
    with pytest.raises(CheckpointError) as caught:
        read_spec(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")
    assert text in one_line(str(caught.value))
    is_one_line(str(caught.value))


def test_ids_of_the_generation_config_are_named_with_that_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, -3]}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id: token id is \[2, -3\]"):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"[" * 100_000, "config.json: "),
        (b'{"a": "\xff"}', "config.json: "),
        (b'{"vocab_size": ' + b"9" * 5_000 + b"}", "config.json: "),
        (b" " * (4 * 2**20 + 1), "more than 4194304 bytes, the most that is read"),
    ],
)
def test_a_config_that_is_no_config_is_one_line(content: bytes, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=text) as caught:
        read_spec(tmp_path)
    is_one_line(str(caught.value))


def test_a_pipe_is_no_config(tmp_path: Path) -> None:
    """It would never open: the engine would hang before its first line."""
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is no file"):
        read_spec(tmp_path)


READERS: dict[str, Callable[[Path], object]] = {
    "tokenizer.json": Tokenizer.load, "tokenizer_config.json": special_tokens,
    "special_tokens_map.json": special_tokens, "chat_template.jinja": template_source,
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_setting_beyond_all_sizes_is_not_read(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(SETTING_MOST + 1)
    with pytest.raises(CheckpointError, match=rf"{name}: more than 134217728 bytes, the most that is read"):
        READERS[name](tmp_path)


# --- safetensors --------------------------------------------------------------------------------------------


def entry(dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_weights(folder: Path, header: object, size: int = 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(size))
    return path


HEADERS: dict[str, tuple[object, str]] = {
    "another type": ({"a": entry("F16")}, "tensor 'a' has 16 bytes; F16 [2, 2] needs 8"),
    "another shape": ({"a": entry(shape=[2, 3])}, "tensor 'a' has 16 bytes; F32 [2, 3] needs 24"),
    "shape of many zeros": ({"a": entry(shape=[2**50, 2**50, 0])}, "needs 0"),
    "unknown type": ({"a": entry("F1024\x1b[2J" * 99)}, "has the dtype 'F1024"),
    "gap": ({"a": entry(shape=[2], offsets=[8, 16])}, "begins at byte 8; the tensor before it ends at 0"),
    "overlap": ({"a": entry(), "b": entry(shape=[2], offsets=[8, 16])}, "begins at byte 8; the tensor before it"),
    "backwards": ({"a": entry(shape=[0], offsets=[16, 0])}, "bytes, its header says"),
    "negative": ({"a": entry(offsets=[-16, 16])}, "header is broken"),
    "offset true": ({"a": entry(offsets=[False, 16])}, "header is broken"),
    "offset huge": ({"a": entry(offsets=[0, 2**62])}, "header is broken"),
    "three offsets": ({"a": entry(offsets=[0, 8, 16])}, "header is broken"),
    "shape negative": ({"a": entry(shape=[-2, -2])}, "header is broken"),
    "shape deep": ({"a": entry(shape=[1] * 9)}, "header is broken"),
    "no entry": ({"a": 5}, "header is broken"),
    "a list": ([1], "header is broken"),
    "nested": (b'{"a":' + b"[" * 100_000, "header is broken"),
    "not UTF-8": (b'{"\xff": 1}', "header is broken"),
    "long name": ({"n\x1b" * 9_000: entry("F16")}, r"tensor 'n\x1b"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_lies_is_refused(case: str, tmp_path: Path) -> None:
    header, text = HEADERS[case]
    path = write_weights(tmp_path, header)
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path)
    assert str(caught.value).startswith(f"{path}: ")
    assert text in one_line(str(caught.value))
    is_one_line(str(caught.value))


def test_a_header_of_a_terabyte_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        check_weights(tmp_path)


def test_an_honest_header_is_taken(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "b": entry(offsets=[4, 20]), "a": entry("BF16", [2], [0, 4])}
    path = write_weights(tmp_path, {**header, "none": entry("I64", [0], [4, 4])}, 20)
    assert tensor_files(tmp_path) == dict.fromkeys(("a", "b", "none"), path)
    assert check_weights(TINY)


def test_flipped_bytes_end_in_one_line_or_in_names(tmp_path: Path) -> None:
    """1,000 headers of the bundled model with one to four bytes of another value."""
    whole = (TINY / "model.safetensors").read_bytes()
    length = 8 + struct.unpack("<Q", whole[:8])[0]
    draw, path, refused = random.Random(1), tmp_path / "model.safetensors", 0
    path.write_bytes(whole)
    for _ in range(1_000):
        head = bytearray(whole[:length])
        for _ in range(draw.randint(1, 4)):
            head[draw.randrange(length)] = draw.choice([0, 9, 34, 45, 91, 93, 123, 125, 255, draw.randrange(256)])
        with path.open("r+b") as file:
            file.write(head)
        try:
            assert tensor_files(tmp_path)
        except CheckpointError as error:
            refused += 1
            is_one_line(str(error))
    assert refused > 500


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ({"weight_map": {"a": "../../etc/passwd"}}, "shard '../../etc/passwd' is outside of the folder"),
        ({"weight_map": {"a": "/etc/passwd"}}, "shard '/etc/passwd' is outside of the folder"),
        ({"weight_map": {"a": ".."}}, "shard '..' is outside of the folder"),
        ({"weight_map": {"a": ""}}, "shard '' is outside of the folder"),
        ({"weight_map": {"a": "x\0y"}}, r"shard 'x\x00y' is outside of the folder"),
        ({"weight_map": {"a": "\x1b[31m" * 5_000}}, r"shard '\x1b[31m"),
        ({"weight_map": {"a": 5}}, "broken index"),
        ({"weight_map": [1]}, "broken index"),
        ({}, "broken index"),
        ([1], "Expected `object`, got `array`"),
        ({"weight_map": {"a": "n" * 5_000}}, "shard 'nnnn"),
        ({"weight_map": {"a": "n" * 200}}, "1 of 1 shards missing, the first is nnn"),
    ],
)
def test_an_index_names_files_of_its_folder(index: object, text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        check_weights(tmp_path)
    assert text in one_line(str(caught.value))
    is_one_line(str(caught.value))
