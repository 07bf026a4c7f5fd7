"""Tokenizer: the ids, texts and chats of transformers, and streams that never show half a character."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import make_tokenizer
from ppengine.checkpoint.chat_template import ChatTemplate
from ppengine.checkpoint.tokenizer import TextError, Tokenizer
from ppengine.common.config import ConfigError
from ppengine.protocol.chat_messages import Chat
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

TEXTS = [
    "The stage waits for the stage before it.",
    "  two spaces, a tab\tand a line\nbreak ",
    "café ünïcödé 漢字 🙂🚀👩‍👩‍👧",
    "",
    "<s>not</s> the special kind<pad>",
]
CHAT = [{"role": "user", "content": "Who waits? <>&'"}, {"role": "assistant", "content": "Stage 1."}]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte-level")
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama 2's way: spaces become part of words, unknown characters fall back to bytes."""
    folder = tmp_path_factory.mktemp("sentence-piece")
    backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special[:3], show_progress=False)
    backend.train_from_iterator(["the stage waits for the stage before it", "a b c"] * 3, trainer)
    data = json.loads(backend.to_str())
    vocabulary = data["model"]["vocab"]
    for name in special[3:]:
        vocabulary.setdefault(name, len(vocabulary))
    backend = Backend.from_str(json.dumps(data))
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("options", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_ids_and_texts_are_those_of_transformers(
    kind: str, options: dict[str, bool], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = request.getfixturevalue(kind)
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **options}))
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    generator = random.Random(1)
    for _ in range(50):
        ids = [generator.randrange(theirs.vocab_size) for _ in range(12)]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert (ours.eos, ours.eos_id) == (theirs.eos_token, theirs.eos_token_id)


def test_special_tokens_stand_in_front_only_where_the_model_wants_them(byte_level: Path) -> None:
    tokenizer = Tokenizer.load(byte_level)
    assert tokenizer.encode("a")[0] == 1
    assert 1 not in tokenizer.encode("a")[1:]
    assert tokenizer.decode([1, *tokenizer.encode("a stage"), 2]) == "a stage"


def test_bad_words_begin_a_text_or_follow_a_space(byte_level: Path, sentence_piece: Path) -> None:
    tokenizer = Tokenizer.load(byte_level)
    letters = [token for token in "abcdefghijklmnopqrstuvwxyz" if len(tokenizer.encode_chat(" " + token)) == 1]
    for letter in letters:
        bare, spaced = tokenizer.encode_bad_word(f" {letter}")
        assert (tokenizer.decode(bare), tokenizer.decode(spaced)) == (letter, f" {letter}")
    assert letters
    pieces = Tokenizer.load(sentence_piece).encode_bad_word("stage")
    assert len(pieces) == 1, "this tokenizer puts a space before the first word itself"
    with pytest.raises(ValueError, match="the bad word ' ' has no tokens"):
        tokenizer.encode_bad_word(" ")


def test_chat_is_that_of_transformers(byte_level: Path) -> None:
    ours, theirs = Tokenizer.load(byte_level), AutoTokenizer.from_pretrained(byte_level)
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    text = ChatTemplate.load(byte_level).render(Chat(messages=CHAT), 1000)
    assert text == expected
    assert expected.endswith("<assistant>")
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(text) == ids


TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
MARKED = (
    "{% set word = 'out' %}{% for message in messages %}{% generation %}{% set word = message.role %}"
    "{{ word }}: {{ message.content }}{% endgeneration %};{{ word }} {% endfor %}"
)
"""As trainers mark the assistant's text."""


def test_named_templates_and_marked_text_are_those_of_transformers(byte_level: Path, tmp_path: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(byte_level)
    for template in (MARKED, {"default": "plain {{ messages | length }}", "tool_use": "with {{ tools | length }}"}):
        theirs.chat_template = template
        theirs.save_pretrained(tmp_path)
        for tools in (None, [TOOL]):
            expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
            chat = Chat(messages=CHAT, tools=tools, add_generation_prompt=False)
            assert ChatTemplate.load(tmp_path).render(chat, 1000) == expected
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    (tmp_path / "chat_template.jinja").unlink()
    config = {"chat_template": [{"name": name, "template": name} for name in ("default", "tool_use")]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    made = [ChatTemplate.load(tmp_path).render(Chat(messages=CHAT, tools=tools), 99) for tools in (None, [TOOL])]
    assert made == ["default", "tool_use"]


def test_template_may_stand_in_the_config_and_cannot_leave_its_sandbox(tmp_path: Path) -> None:
    config = tmp_path / "tokenizer_config.json"

    def chat(template: object) -> str:
        config.write_text(json.dumps({"chat_template": template, "eos_token": {"content": "</s>"}}))
        return ChatTemplate.load(tmp_path).render(Chat(messages=CHAT), 1000)

    assert chat("{{ messages[0]['content'] }}{{ eos_token }}") == "Who waits? <>&'</s>"
    assert chat([{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]) == "yes"
    assert chat("{{ messages[1] | tojson }}") == '{"role": "assistant", "content": "Stage 1."}'
    assert (
        chat("{% if tools is not none %}tools{% endif %}{% for _ in messages %}{% break %}{% endfor %}none") == "none"
    )
    with pytest.raises(ConfigError, match="roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ConfigError, match="chat template"):
        chat("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ConfigError, match="chat template"):
        chat("{{ messages.append(1) }}")
    with pytest.raises(ConfigError, match="no chat template"):
        chat(None)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_pieces_of_a_text_join_and_hold_whole_characters(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer.load(request.getfixturevalue(kind))
    for text in TEXTS:
        prompt, ids = tokenizer.encode("the stage"), tokenizer.encode(text)
        stream = tokenizer.stream(prompt)
        pieces = [stream.push(token) for token in ids]
        assert stream.flush() == ""
        assert "".join(pieces) == tokenizer.decode(prompt + ids)[len(tokenizer.decode(prompt)) :]
        assert not any("\ufffd" in piece for piece in pieces)


def test_pieces_of_any_tokens_join_to_their_text(byte_level: Path) -> None:
    """Random tokens are full of broken UTF-8, special tokens and ids beyond the vocabulary."""
    tokenizer = Tokenizer.load(byte_level)
    generator = random.Random(2)
    for _ in range(200):
        ids = [generator.randrange(400) for _ in range(generator.randrange(1, 120))]
        stream = tokenizer.stream()
        joined = "".join([*(stream.push(token) for token in ids), stream.flush()])
        assert joined == tokenizer.decode(ids)


def test_a_token_of_whole_characters_is_decoded_once(byte_level: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, decoded = Tokenizer.load(byte_level), list[list[int]]()
    ids = tokenizer.encode_chat("the stage waits") * 2
    stream, decode = tokenizer.stream(), tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(list(ids)) or decode(ids))
    assert "".join(map(stream.push, ids)) == "the stage waits" * 2
    assert sorted(decoded) == sorted([one] for one in set(ids))


def test_half_a_character_waits_and_comes_out_at_the_end(byte_level: Path) -> None:
    tokenizer = Tokenizer.load(byte_level)
    rocket = tokenizer.encode("🛸")[1:]
    assert len(rocket) > 1
    stream = tokenizer.stream()
    assert [stream.push(token) for token in rocket] == [""] * (len(rocket) - 1) + ["🛸"]
    stream = tokenizer.stream()
    assert stream.push(rocket[0]) == ""
    assert stream.flush() == "\ufffd"


def test_a_stream_without_a_whole_character_stays_fast_and_exact(byte_level: Path) -> None:
    tokenizer = Tokenizer.load(byte_level)
    lead = tokenizer.encode("🛸")[1]
    ids = [lead] * 3000
    stream = tokenizer.stream()
    begin = time.process_time()
    joined = "".join([*(stream.push(token) for token in ids), stream.flush()])
    assert joined == tokenizer.decode(ids)
    assert time.process_time() - begin < 5


def test_errors_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0",')
    with pytest.raises(ConfigError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_neither_torch_nor_transformers_is_imported() -> None:
    modules = "ppengine.checkpoint.tokenizer, ppengine.checkpoint.model_spec"
    code = f"import sys, {modules}; print({{'torch', 'transformers'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("seed", range(30))
def test_a_run_of_tokens_at_once_has_the_text_of_single_ones(byte_level: Path, seed: int) -> None:
    """A core that follows another one makes the text again, and goes on with it token by token."""
    tokenizer, draw = Tokenizer.load(byte_level), random.Random(seed)
    ids = tokenizer.encode("".join(draw.choice(TEXTS) for _ in range(draw.randint(1, 6))))
    if seed % 3 == 0:
        draw.shuffle(ids)
    cut, one, run = draw.randint(0, len(ids)), tokenizer.stream(ids[:3]), tokenizer.stream(ids[:3])
    single = [one.push(token) for token in ids]
    pieces = [run.extend(ids[:cut]), *map(run.push, ids[cut:])]
    assert "".join([*pieces, run.flush()]) == "".join([*single, one.flush()])


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_special_tokens_that_are_read_have_a_text(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer.load(request.getfixturevalue(kind))
    spoken = tokenizer.special_ids(["</s>", "no token", "the"])
    assert list(spoken.values()) == ["</s>"]
    (mark,) = spoken
    hidden = tokenizer.special_ids(["<s>"])
    ids = [mark, *tokenizer.encode_chat("the é"), mark, *hidden, *tokenizer.encode_chat("the"), mark]
    half = tokenizer.encode_chat("é")[:1]
    stream = tokenizer.stream([], spoken)
    text = "".join(stream.push(one) for one in [*ids, *half, mark]) + stream.flush()
    assert text.replace(" ", "").startswith("</s>theé</s>the</s>") and text.endswith("</s>")
    stream = tokenizer.stream([], spoken)
    assert stream.extend([*ids, *half, mark]) + stream.flush() == text
    assert "</s>" not in tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_a_long_text_has_the_ids_of_a_short_one(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = Tokenizer.load(request.getfixturevalue(kind))
    text = "Once upon a time, d\u00e9j\u00e0 vu \U0001f600. " * 50
    assert tokenizer.encode_long(text, special=True) == tokenizer.encode(text)
    assert tokenizer.encode_long(text, special=False) == tokenizer.encode_chat(text)


# --- checkpoints whose tokenizer fails ------------------------------------------------------------------------

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"}
PANICS = {"pre_tokenizer": {"type": "FixedLength", "length": 0}}
"""The Rust library panics at a text, which is no Exception to Python."""


def changed(folder: Path, into: Path, **parts: object) -> Path:
    """Return `into` with the tokenizer of `folder`, some parts of which are others."""
    data = json.loads((folder / "tokenizer.json").read_bytes())
    (into / "tokenizer.json").write_text(json.dumps({**data, **parts}))
    return into


@pytest.mark.parametrize(
    ("parts", "reason"),
    [({"model": WORDS, "added_tokens": [], "post_processor": None}, r"Missing \[UNK\]"), (PANICS, "chunk size")],
    ids=["a word without a token", "a panic"],
)
def test_a_text_that_the_tokenizer_does_not_take_is_refused(
    parts: dict[str, object], reason: str, byte_level: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(changed(byte_level, tmp_path, **parts))
    for encode in (
        tokenizer.encode, tokenizer.encode_chat, tokenizer.encode_bad_word,
        lambda text: tokenizer.encode_long(text, special=True),
    ):  # fmt: skip
        for _ in range(2):
            with pytest.raises(TextError, match=f"^the tokenizer fails: .*{reason}") as caught:
                encode("zz")
            assert isinstance(caught.value, ValueError) and isinstance(caught.value, ConfigError)


def test_a_panic_at_loading_is_one_line(byte_level: Path, tmp_path: Path) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizer fails: Precompiled: ") as caught:
        Tokenizer.load(changed(byte_level, tmp_path, normalizer=broken))
    assert "\n" not in str(caught.value)


def test_a_decoder_that_fails_does_not_end_an_output(byte_level: Path, tmp_path: Path) -> None:
    word = Tokenizer.load(byte_level).token_text(10)
    strip = {"type": "Strip", "content": word, "start": 0, "stop": 9}
    tokenizer = Tokenizer.load(changed(byte_level, tmp_path, decoder=strip))
    assert tokenizer.decode([10, 10]) == tokenizer.token_text(10) == "\ufffd"
    stream = tokenizer.stream([])
    assert "".join(map(stream.push, [10, 10, 10])) + stream.flush() == "\ufffd"


def test_an_interrupt_is_none_of_its_failures(byte_level: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.load(byte_level)

    class Interrupted:
        def encode(self, text: str, **_: object) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(tokenizer, "_backend", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
