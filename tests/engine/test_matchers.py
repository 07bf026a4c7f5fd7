"""Tokens that a grammar forces, as masks alone would give them, and masks that are taken from others."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import count

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from grammar_world import EOS, MODEL, TOKENIZER, allowed
from hypothesis import HealthCheck, given, settings
from llguidance import LLInterpreter, LLTokenizer, grammar_from
from ppengine.grammar import matchers as matchers_module
from ppengine.grammar.first_masks import some_tokens
from ppengine.grammar.matchers import FIRST_MOST, SLICES, GrammarError, Matchers
from ppengine.protocol.grammar_messages import Question
from ppengine.protocol.structured_outputs import Grammar

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
TEXT = st.text(alphabet='abe nd1_-"\\/{}:,é✓\n', min_size=1, max_size=30) | st.sampled_from(
    ["Once upon a time", "the king said", "https://example.com/a?b=1", "2026-11-25T00:00:00Z", "a" * 90]
)
VALUES = st.one_of(
    st.builds(lambda text: {"const": text}, TEXT),
    st.builds(lambda texts: {"enum": texts}, st.lists(TEXT, min_size=1, max_size=4, unique=True)),
    st.builds(lambda least, more: {"type": "integer", "minimum": least, "maximum": least + more},
              st.integers(-200, 99_999), st.integers(0, 300)),
    st.just({"type": "boolean"}), st.just({"type": "null"}), st.just({"type": "string", "maxLength": 5}),
    st.just({"type": "string", "pattern": "^ab{2,5}(cd|ce)*end$"}),
)  # fmt: skip
SCHEMAS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.builds(
            lambda fields: {"type": "object", "properties": fields, "required": list(fields),
                            "additionalProperties": False},
            st.dictionaries(TEXT, inner, min_size=1, max_size=4),
        ),
        st.builds(lambda items, least: {"type": "array", "items": items, "minItems": least, "maxItems": least + 1},
                  inner, st.integers(0, 3)),
    ),
    max_leaves=6,
)  # fmt: skip
GRAMMARS = st.builds(
    lambda schema, whitespace: Grammar("json", msgspec.json.encode(schema).decode(), whitespace),
    SCHEMAS, st.sampled_from(["", None]),
) | st.builds(
    lambda texts: Grammar("lark", f"start: ({' | '.join(msgspec.json.encode(text).decode() for text in texts)})+"),
    st.lists(TEXT, min_size=1, max_size=4),
)  # fmt: skip
LONG = st.one_of(
    st.builds(
        lambda letters, most: Grammar("regex", f"[{letters}]{{1,{most}}}"),
        st.sampled_from(["a-zA-Z ,.", "a-zA-Z ", "a-z", "^,", "^\"", r"\w ", "A-Za-z0-9é"]), st.integers(1, 50),
    ),
    st.builds(
        lambda least, more, fields, whitespace: Grammar("json", json.dumps({
            "type": "object", "additionalProperties": {"type": "string", "minLength": least, "maxLength": least + more},
            "maxProperties": fields}), whitespace),
        st.integers(0, 20), st.integers(1, 40), st.integers(1, 2), st.sampled_from(["", None]),
    ),
    st.sampled_from([
        Grammar("json", '{"type": "string"}'), Grammar("lark", 'start: "a" /[^\\n]{1,40}/ "\\n" /[a-z ]+/'),
    ]),
)  # fmt: skip
_numbers = count(1)


@pytest.fixture(scope="module")
def matchers() -> Matchers:
    return Matchers(MODEL, 2048, [EOS])


@pytest.fixture(scope="module")
def walking() -> Iterator[Matchers]:
    """Matchers without classes of tokens, which walk all of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ppengine.grammar.matchers.SLICES", [])
        yield Matchers(MODEL, 2048, [EOS])


def compiled(matchers: Matchers, grammar: Grammar) -> bool:
    """Compile a grammar; return whether it is one."""
    try:
        matchers.keep(grammar, matchers.compile(grammar))
    except GrammarError:
        return False
    return not matchers.answers([Question(1, 0, grammar, [], [])]).errors


class Output:
    """One output in the process; `ask` sends its new tokens."""

    def __init__(self, matchers: Matchers, grammar: Grammar) -> None:
        self._matchers, self._grammar = matchers, grammar
        self._number, self._known = next(_numbers), False

    def ask(self, tokens: list[int], most: int) -> tuple[list[int], list[int]]:
        """Return the forced tokens, and those allowed behind them."""
        grammar, self._known = None if self._known else self._grammar, True
        answers = self._matchers.answers([Question(5, self._number, grammar, tokens, [], most)])
        assert answers.numbers == [5] and not answers.errors
        return answers.forced.get(5, []), allowed(answers.masks[answers.places[0]])


@SETTINGS
@given(
    tokens=st.lists(st.lists(st.integers(0, 199), max_size=6), min_size=1),
    eos=st.lists(st.integers(0, 199), max_size=3),
)
def test_some_token_is_the_last_that_does_not_end_the_text(tokens: list[list[int]], eos: list[int]) -> None:
    rows = [sum(1 << token for token in set(row)).to_bytes(28, "little") for row in tokens]
    masks = np.frombuffer(b"".join(rows), "<i4").reshape(len(rows), 7).copy()
    assert some_tokens(masks, eos) == [max(set(row) - set(eos), default=None) for row in tokens]


@SETTINGS
@given(grammar=GRAMMARS, seed=st.integers(0, 2**32))
def test_forced_tokens_are_the_only_ones_that_masks_allow(matchers: Matchers, grammar: Grammar, seed: int) -> None:
    draw = random.Random(seed)
    if not compiled(matchers, grammar):
        return
    jumping, stepping = Output(matchers, grammar), Output(matchers, grammar)
    new: list[int] = []
    masks = stepping.ask([], 0)[1]
    for _ in range(40):
        most = draw.choice([0, 1, 3, 64])
        forced, last = jumping.ask(new, most)
        assert len(forced) <= most
        for token in forced:
            assert masks == [token]
            if token == EOS:
                return
            masks = stepping.ask([token], 0)[1]
        assert last == masks
        new = [draw.choice(masks)]
        if new == [EOS]:
            return
        masks = stepping.ask(new, 0)[1]


def test_most_of_a_form_is_forced_with_its_end(matchers: Matchers) -> None:
    grammar = Grammar("regex", "The answer is (yes|no), and nothing else\\.")
    assert compiled(matchers, grammar)
    output = Output(matchers, grammar)
    first, choice = output.ask([], 64)
    text = TOKENIZER.decode(first)
    assert "The answer is".startswith(text[:13]) and len(first) > 2 and len(choice) > 1
    tokens = TOKENIZER.encode("The answer is yes, and nothing else.")
    rest, _ = output.ask(tokens[len(first) : len(first) + 1], 64)
    assert TOKENIZER.decode(first + tokens[len(first) : len(first) + 1] + rest[:-1]) == TOKENIZER.decode(tokens)
    assert rest[-1] == EOS


def test_a_limit_cuts_what_is_forced_and_held_tokens_are_not(matchers: Matchers) -> None:
    grammar = Grammar("regex", "abcdefghijklmnopqrstuvwxyz0123456789")
    assert compiled(matchers, grammar)
    whole, _ = Output(matchers, grammar).ask([], 64)
    assert whole[-1] == EOS
    assert Output(matchers, grammar).ask([], 2) == (whole[:2], [whole[2]])
    assert Output(matchers, grammar).ask([], len(whole) - 1) == (whole[:-1], [EOS])
    answers = matchers.answers([Question(5, next(_numbers), grammar, whole[:-1], [EOS], 64)])
    assert not answers.forced and allowed(answers.masks[0]) == [EOS], "a held token is not forced"


@SETTINGS
@given(grammar=LONG | GRAMMARS, seed=st.integers(0, 2**32))
def test_classes_of_tokens_and_kept_masks_change_none(
    matchers: Matchers, walking: Matchers, grammar: Grammar, seed: int
) -> None:
    draw = random.Random(seed)
    assert compiled(matchers, grammar) == compiled(walking, grammar)
    if matchers.lacks(grammar):
        return
    one, twin, other = (Output(each, grammar) for each in (matchers, matchers, walking))
    new: list[int] = []
    for _ in range(20):
        forced, masks = one.ask(new, 64)
        assert (forced, masks) == other.ask(new, 64) == twin.ask(new, 64), "the twin has kept masks"
        new = [draw.choice(masks)]
        if EOS in new or EOS in forced:
            return


@pytest.mark.parametrize(
    "grammar",
    [
        grammar_from("regex", "[a-zA-Z ,.]{40,60}"),
        grammar_from("regex", "[^,]{1,20}"),
        grammar_from("regex", "[A-Za-z0-9 ]{30}"),
        grammar_from("json_schema", '{"type": "string", "minLength": 1, "maxLength": 16}'),
    ],
)
def test_a_class_of_tokens_spares_most_of_the_walk(grammar: str) -> None:
    file = str(MODEL / "tokenizer.json")
    walked = []
    for slices in (SLICES, []):
        tokenizer = LLTokenizer(file, n_vocab=2048, eos_token=EOS, slices=slices)
        interpreter = LLInterpreter(tokenizer, grammar, log_level=0)
        interpreter.start_without_prompt()
        if "maxLength" in grammar:
            interpreter.compute_mask()
            interpreter.commit_token(TOKENIZER.encode('"')[0])
        _, text = interpreter.compute_mask()
        walked.append(json.loads(text)["progress"][0]["stats"]["trie_nodes_walked"])
    assert walked[0] * 2 < walked[1]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the number of masks that llguidance computes, a number a call."""
    real, numbers = matchers_module.fill_next_token_bitmask_par, []

    def fill(executor, good, masks) -> None:
        numbers.append(len(good))
        real(executor, good, masks)

    monkeypatch.setattr(matchers_module, "fill_next_token_bitmask_par", fill)
    return numbers


NAMED = Grammar("json", json.dumps({
    "type": "object", "properties": {"n": {"type": "integer"}, "name": {"type": "string", "maxLength": 12}},
    "required": ["n", "name"], "additionalProperties": False,
}), "")  # fmt: skip
NUMBERS = [[token] for token in TOKENIZER.encode("123456789")]
assert len(NUMBERS) == 9


def named(matchers: Matchers, number: list[int]) -> tuple[Output, list[int]]:
    """Return an output behind the quote of its name, and the tokens that may follow."""
    output = Output(matchers, NAMED)
    output.ask([], 64)
    for token in number:
        output.ask([token], 64)
    return output, output.ask(TOKENIZER.encode(","), 64)[1]


def test_the_first_free_mask_is_computed_once_for_the_same_tokens(matchers: Matchers, computed: list[int]) -> None:
    assert compiled(matchers, NAMED)
    first, masks = named(matchers, NUMBERS[0])
    assert len(masks) > 2048 / 2
    computed.clear()
    second, again = named(matchers, NUMBERS[0])
    assert again == masks
    assert sum(computed) == 2, "those of the beginning and of the number, which are small"
    _, other = named(matchers, NUMBERS[1])
    assert other == masks and sum(computed) == 5, "other tokens"
    computed.clear()
    token = TOKENIZER.encode("king")[:1]
    assert second.ask(token, 64) == first.ask(token, 64)
    assert computed == [1, 1], "behind the first free choice each output has its own"
    assert compiled(matchers, NAMED)
    computed.clear()
    assert named(matchers, NUMBERS[0])[1] == masks
    assert sum(computed) == 3, "the masks go with the compiled grammar"


def test_a_grammar_keeps_few_masks(matchers: Matchers, computed: list[int]) -> None:
    assert compiled(matchers, NAMED)
    numbers = [one + other for one in NUMBERS for other in NUMBERS][: FIRST_MOST + 1]
    for number in numbers:
        named(matchers, number)
    for number, needed in ((numbers[-1], 3), (numbers[0], 4)):
        computed.clear()
        named(matchers, number)
        assert sum(computed) == needed


@pytest.mark.parametrize("text", ['start: "r" a\na: a a\n', "start: a\na: a a\n"])
def test_a_grammar_without_an_end_is_refused_in_plain_words(matchers: Matchers, text: str) -> None:
    grammar = Grammar("lark", text)
    matchers.keep(grammar, matchers.compile(grammar))
    asked = [Question(number, 0, grammar, [], []) for number in (1, 2)]
    for _ in range(2):
        answer = matchers.answers(asked)
        assert answer.errors == dict.fromkeys((1, 2), "no token may follow") and answer.places == [-1, -1]


def test_first_masks_of_many_grammars_are_those_of_each_alone(matchers: Matchers) -> None:
    """Some have no first token, or none behind it, and the others are not moved."""
    grammars = [
        Grammar("regex", "[a-d]{3}"), Grammar("lark", "start: a\na: a a\n"), Grammar("json", '{"const": 7}'),
        Grammar("lark", 'start: "q" a\na: a a\n'), Grammar("regex", "x"), Grammar("regex", "[a-d]{3}"),
    ]  # fmt: skip
    for grammar in dict.fromkeys(grammars):
        matchers.keep(grammar, matchers.compile(grammar))
    answers = matchers.answers([Question(number, 0, grammar, [], []) for number, grammar in enumerate(grammars)])
    assert answers.errors == dict.fromkeys((1, 3), "no token may follow")
    masks = dict(zip(answers.numbers, answers.places, strict=True))
    assert masks[1] == masks[3] == -1
    for number in (0, 2, 4, 5):
        alone = np.frombuffer(matchers.compile(grammars[number]).compute_bitmask(), "<i4")
        assert allowed(answers.masks[masks[number]]) == [
            token for token in range(2048) if alone[token // 32] >> token % 32 & 1
        ]


def test_an_output_that_cannot_go_on_has_the_reason(matchers: Matchers) -> None:
    """A compile looks at two masks, so this grammar passes."""
    grammar, tokens = Grammar("lark", 'start: A A A a\na: a a\nA: "r"\n'), list[int]()
    assert compiled(matchers, grammar)
    for number in range(4):
        answer = matchers.answers([Question(number, 7, None if number else grammar, tokens[-1:], [], 0)])
        if answer.errors:
            break
        place = int(np.frombuffer(answer.masks[0].places, "<i4")[0])
        bits = int(np.frombuffer(answer.masks[0].words, "<u4")[0])
        tokens.append(32 * place + bits.bit_length() - 1)
    assert list(answer.errors.values()) == ["no token may follow"] and tokens
