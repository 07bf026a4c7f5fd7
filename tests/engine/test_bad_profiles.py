"""A profile that cannot be is one short line with file, key, value and range, at once and in little memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ppengine.common.config import ConfigError, Profile, build_profile, load_profile
from ppengine.common.profile_sections import ModelConfig
from ppengine.common.yaml_reader import YamlError, read_yaml
from ppengine.protocol.error_text import LINE_MOST, TEXT_MOST, one_line, shown

GOOD = b"name: x\nmodel: {path: m}\n"
BOMB = b"name:\n- &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    b"- &%c [%s]\n" % (name, b", ".join([b"*%c" % (name - 1)] * 9)) for name in b"bcdefghij"
)
BROKEN: dict[str, tuple[bytes, str]] = {
    "alias bomb": (BOMB, "line 2, column 3: anchors and aliases are not read; write the value out"),
    "alias alone": (b"a: *b", "anchors and aliases are not read"),
    "deep list": (b"[" * 16_000, "line 1, column 9: more than 8 levels of nesting"),
    "deep section": (b"a: " + b"{a: " * 4_000, "more than 8 levels of nesting"),
    "deep dashes": (b"- " * 8_000, "more than 8 levels of nesting"),
    "many values": (b"[" + b"1," * 8_000 + b"1]", "more than 1000 values and keys"),
    "large file": (GOOD + b"# " * 2**13, "it has more than 16384 bytes, the most that is read"),
    "long value": (b"name: " + b"x" * 10_000, "a value of 10000 characters; at most 4096 are read"),
    "not UTF-8": (b"name: \xff", "byte 0xff at offset 6 is not UTF-8"),
    "5,000 digits": (b"a: 0x" + b"f" * 4_000, "is no whole number of 64 bits"),
    "4,000 digits": (b"a: " + b"9" * 4_000, "is no whole number of 64 bits"),
    "a key twice": (b"name: x\nname: y", "line 2, column 1: key 'name' is given twice"),
    "a nested key twice": (b"model: {path: a, path: b}", "key 'path' is given twice"),
    "a key that is a number": (b"1: x", "key 1 is no text"),
    "a key that is a list": (b"? [a]\n: x", "key ['a'] is no text"),
    "tag of an object": (b"name: !!python/object:os.system x", "is not read; write a plain value"),
    "tag of a date": (b"name: !!timestamp 2024-13-45", "is not read; write a plain value"),
    "an escape": (b"name: \x1b[31m", "special characters are not allowed"),
    "two documents": (b"--- a\n--- b", "another document"),
    "no YAML": (b"a: b: c", "line 1, column 5: mapping values are not allowed here"),
    "empty": (b"", "a profile is a mapping, this is NoneType"),
    "a list": (b"[a]", "a profile is a mapping, this is list"),
}  # fmt: skip
OUT_OF_RANGE: dict[str, tuple[str, str]] = {
    "tokens of a step": ("scheduler.max_num_batched_tokens=1000000", "is 1000000; it must be 1 to 32768"),
    "requests": (f"scheduler.max_num_seqs={2**62}", f"is {2**62}; it must be 1 to 65536"),
    "more than 64 bits": (f"scheduler.max_num_seqs={2**64}", "is no whole number of 64 bits"),
    "watermark below": ("scheduler.watermark=-1", "scheduler.watermark is -1; it must be 0 to 0.5"),
    "watermark above": ("scheduler.watermark=1", "scheduler.watermark is 1; it must be 0 to 0.5"),
    "watermark huge": ("scheduler.watermark=1.0e+308", "scheduler.watermark is 1e+308; it must be 0 to 0.5"),
    "watermark no number": ("scheduler.watermark=.nan", "scheduler.watermark is nan; it must be 0 to 0.5"),
    "swap endless": ("memory.swap_space_gib=.inf", "memory.swap_space_gib is inf; it must be 0 to 65536"),
    "utilization": ("memory.utilization=.nan", "memory.utilization is nan; it must be above 0 and at most 1"),
    "device": ("memory.device_mib=0", "memory.device_mib is 0; it must be 1 to 16777216"),
    "blocks": ("memory.block_size=17", "memory.block_size is 17; it must be one of 8, 16, 32, 64, 128"),
    "stages": ("parallel.pipeline=0", "parallel.pipeline is 0; it must be 1 to 256"),
    "cut": ("parallel.partition=[0]", "parallel.partition is [0]; it must be 1 to 256 entries of 1 to 1024"),
    "backends without a host tier": ("tiers.backends.a={kind: files}", "tiers.host is false; tiers.backends needs it"),
    "backend's name": ("tiers.backends={A: {kind: files}}", "it must be 1 to 32 small letters"),
    "backend's key": ("tiers.backends.a.knd=files", "unknown key tiers.backends.a.knd; did you mean"),
    "backend's kind missing": ("tiers.backends.a={}", "tiers.backends.a.kind is missing"),
    "backend's quota": ("tiers.backends.a.quota_gib=0", "tiers.backends.a.quota_gib is 0; it must be above 0"),
    "backends at one place": (
        "tiers.backends={a: {kind: files, url: /kv}, b: {kind: files, url: /kv/./}}",
        "tiers.backends: a and b are at one place; a quota counts all chunks of it",
    ),
    "backend that is none": ("tiers.backends.a=3", "tiers.backends.a is 3; it is a section of keys"),
    "backends that are a list": ("tiers.backends=[a]", "it is a map from names to sections"),
    "length": ("model.max_model_len=1", "model.max_model_len is 1; it must be 2 to 4194304"),
    "threads": ("threads_per_stage=0", "threads_per_stage is 0; it must be 1 to 1024"),
    "pace": ("console.publish_hz=1.0e+9", "console.publish_hz is 1000000000.0; it must be 0.1 to 100"),
    "hour": ("console.history_minutes=-1", "console.history_minutes is -1; it must be 0 to 1440"),
    "disk": ("console.history_mib=0", "console.history_mib is 0; it must be 1 to 65536"),
    "path empty": ("model.path=''", "model.path is ''; it must be 1 to 4096 characters"),
    "path with NUL": (r'model.path="a\0b"', r"model.path is 'a\x00b'; it must be a text without NUL"),
    "name empty": ("name=''", "name is ''; it must be 1 to 64 letters"),
    "name with a slash": ("name=../x", "name is '../x'; it must be 1 to 64 letters"),
    "name with a line end": (r'name="x\n"', r"name is 'x\n'; it must be 1 to 64 letters"),
    "name with an escape": (r'name="\e[31m"', r"name is '\x1b[31m'; it must be 1 to 64 letters"),
    "name long": ("name=" + "n" * 65, "it must be 1 to 64 letters"),
    "name a date": ("name=2024-13-45 25:61", "name is '2024-13-45 25:61'; it must be 1 to 64 letters"),
    "name of the model twice": ("http.model_names=[a, b, a]", "http.model_names has 'a' 2 times; a name is given once"),
    "name of the model with a space": ("http.model_names=['a b']", "0 to 64 entries of 1 to 256 characters without"),
    "name of the model not UTF-8": (r'http.model_names=["\ud800"]', "http.model_names is not UTF-8 at offset 0"),
    "name of the model alone": ("http.model_names=a", "http.model_names is 'a'; it must be a list of texts"),
    "another kind": ("scheduler.max_num_seqs=many", "is 'many'; it must be a whole number, 1 to 65536"),
    "section": ("memory=5", "memory is 5; it is a section of keys"),
    "value with keys": ("name.x=5", "name is {'x': 5}; it must be a text, 1 to 64 letters"),
    "escape in a key": ("\x1b[2Jmemory=5", r"unknown key \x1b[2Jmemory; did you mean memory?"),
    "long key": ("k" * 10_000 + "=5", "unknown key kkk"),
    "deep key": (".".join("k" * 1_000) + "=5", "unknown key k; the keys are name, "),
    "key of a section": ("max_model_len=5", "unknown key max_model_len; did you mean model.max_model_len?"),
    "key of sections": ("listen=5", "did you mean parallel.listen or console.listen or http.listen?"),
    "key like none": ("memory.foo=1", "unknown key memory.foo; the keys are "),
    "no value": ("\x1b[2J" * 5_000, "write it as key=value"),
    "no YAML": ("name=[", "--set 'name': line 1, column 2"),
    "not UTF-8": ("name=\udcff", "byte 0xff at offset 0 is not UTF-8"),
}  # fmt: skip


@contextmanager
def bounded(seconds: float = 5.0, mib: float = 30.0) -> Iterator[None]:
    """Check that little processor time and memory were used: a bomb would take all of either."""
    tracemalloc.start()
    begun = time.process_time()
    try:
        yield
        assert time.process_time() - begun < seconds
        assert tracemalloc.get_traced_memory()[1] < mib * 2**20
    finally:
        tracemalloc.stop()


def is_one_line(text: str) -> None:
    line = one_line(text)
    assert line.isprintable()
    assert len(line) <= TEXT_MOST


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_bytes(GOOD)
    return path


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused_at_once(case: str, tmp_path: Path) -> None:
    data, text = BROKEN[case]
    path = tmp_path / "p.yaml"
    path.write_bytes(data)
    with bounded(), pytest.raises(ConfigError) as caught:
        load_profile(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert text in str(caught.value)
    is_one_line(str(caught.value))


@pytest.mark.parametrize("case", OUT_OF_RANGE)
def test_a_value_out_of_its_range_is_refused_with_key_value_and_range(case: str, good: Path) -> None:
    setting, text = OUT_OF_RANGE[case]
    with bounded(), pytest.raises(ConfigError) as caught:
        load_profile(str(good), [setting])
    assert text in one_line(str(caught.value))
    is_one_line(str(caught.value))


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("scheduler.max_num_seqs", 65_536),
        ("scheduler.max_num_batched_tokens", 32_768),
        ("scheduler.watermark", 0.5),
        ("memory.utilization", 1),
        ("parallel.pipeline", 256),
        ("name", "n" * 64),
    ],
)
def test_the_largest_value_is_taken(key: str, most: object, good: Path) -> None:
    load_profile(str(good), [f"{key}={most}"])


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({}, "here: name is missing; it must be a text, 1 to 64 letters"),
        ({"name": "x"}, "here: model.path is missing; it must be a text, 1 to 4096 characters"),
        ({"name": "x", "model": None}, "here: model is None; it is a section of keys"),
        ({"name": "x", "model": {"path": "m", "dtype": "é" * 9_000}}, "here: model.dtype is 'é"),
        ({"name": "x", "model": {"path": "\ud800"}}, "here: model.path is not UTF-8 at offset 0"),
        ({"name": "x", "model": {"path": "m"}, "memory": {"swap_space_gib": 10**400}}, "memory.swap_space_gib is 1000"),
    ],
)
def test_data_from_elsewhere_is_checked_in_the_same_way(data: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_profile(data, Path(), "here")
    assert text in str(caught.value)
    is_one_line(str(caught.value))


def test_a_profile_made_in_python_has_the_same_ranges() -> None:
    with pytest.raises(ValueError, match=r"^name is ''; it must be 1 to 64 letters"):
        Profile(name="", model=ModelConfig(path="m"))
    with pytest.raises(ValueError, match=r"^model\.path is ''; it must be 1 to 4096 characters$"):
        Profile(name="x", model=ModelConfig(path=""))


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no profile at"):
        load_profile(str(tmp_path / "none.yaml"))
    with pytest.raises(ConfigError) as caught:
        load_profile("\x1b[31m" * 3_000)
    is_one_line(str(caught.value))


def test_the_folder_of_a_model_is_no_profile_and_the_key_for_it_is_named(tmp_path: Path) -> None:
    for name in (str(tmp_path), "some-org/some-model"):
        with pytest.raises(
            ConfigError, match=r"a profile is a \.yaml file with model\.path, .* or .*model\.id of a hub"
        ):
            load_profile(name)


SHAPES = st.lists(
    st.sampled_from([*"[]{}:,-?&*!|>'\"%@`#<=~ \n\t", "a", "1", "- ", ": ", "0x", "!!int", "<<", ".inf", "\x00", "é"])
).map("".join)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=200), SHAPES.map(str.encode)))
def test_any_bytes_are_a_value_or_one_error(data: bytes) -> None:
    try:
        read_yaml(data)
    except YamlError as error:
        is_one_line(str(error))


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["name", "model", "memory.utilization", "parallel.partition", "x.y"]), SHAPES)
def test_any_setting_makes_a_profile_or_one_error(good: Path, key: str, text: str) -> None:
    try:
        load_profile(str(good), [f"{key}={text}"])
    except ConfigError as error:
        is_one_line(str(error))


@given(st.text(st.characters(), max_size=1_000), st.integers(20, 400))
def test_one_line_is_printable_and_short(text: str, most: int) -> None:
    line = one_line(text, most)
    assert line.isprintable()
    assert len(line) <= most
    if text.isprintable() and len(text) <= most:
        assert line == text


def test_one_line_keeps_begin_and_end_and_shows_escapes() -> None:
    assert one_line("a\x1b[31m\nb\u202e\r\nc\ud800") == r"a\x1b[31m b\u202e c\ud800"
    line = one_line("begin " + "\x1b" * 10_000_000 + " end")
    assert line.startswith(r"begin \x1b")
    assert line.endswith(r"\x1b end")
    assert len("error: " + line) == LINE_MOST
    assert shown(16**9_999) == "a value of type int, too large to print"
