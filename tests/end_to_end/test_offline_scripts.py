"""Scripts of vLLM's users on the bundled model, with two stages and with two ranks; transformers is the judge."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import reference
from engines import wait_until
from ppengine import LLM, EngineError, SamplingParams, StructuredOutputsParams
from ppengine.common.config import profiles_dir
from ppengine.protocol.metrics import CoreMetrics, MetricsQuery
from transformers import AutoTokenizer

TINY = profiles_dir() / "models" / "tiny"
STEPS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Tell a story"},
    {"role": "assistant", "content": "Once upon a time"},
    {"role": "user", "content": [{"type": "text", "text": "Go on"}]},
]


@pytest.fixture(scope="module", params=[(2, 1), (1, 2)], ids=["stages", "ranks"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    stages, ranks = request.param
    with LLM(
        model=str(TINY), dtype="float64", pipeline_parallel_size=stages, tensor_parallel_size=ranks,
        gpu_memory_utilization=0.05, max_num_seqs=16, seed=7, tokenizer=str(TINY), quantization=None,
    ) as made:  # fmt: skip
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def rendered(tokenizer: Any, chat: list[dict[str, Any]], **options: Any) -> tuple[str, list[int]]:
    """Return the text and the tokens of a chat by transformers."""
    plain = [
        {**one, "content": "".join(part["text"] for part in one["content"])}
        if isinstance(one["content"], list) else one
        for one in chat
    ]  # fmt: skip
    text = tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True, **options)
    return text, tokenizer.encode(text, add_special_tokens=False)


def test_a_conversation_and_many_are_answered_as_by_transformers(llm: LLM, tokenizer: Any) -> None:
    many = [[{"role": "user", "content": f"Tell story {number} {'x' * number}"}] for number in range(80)]
    (alone,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
    outputs = llm.chat(many, GREEDY, use_tqdm=False)
    for chat, output in zip([CHAT, *many], [alone, *outputs], strict=True):
        assert (output.prompt, output.prompt_token_ids) == rendered(tokenizer, chat)
    for output in [alone, *outputs[:3], outputs[-1]]:
        tokens = output.outputs[0].token_ids
        assert tokens == reference.greedy(TINY, output.prompt_token_ids, STEPS, draft=tokens)


def test_a_refused_conversation_is_named_and_the_next_call_is_answered(llm: LLM) -> None:
    bad = [CHAT, [{"role": "tool", "content": "no"}], CHAT]
    with pytest.raises(ValueError, match="conversation 1: chat template: the roles are system, user and assistant"):
        llm.chat(bad, GREEDY)
    (output,) = llm.chat(CHAT, GREEDY, use_tqdm=False)
    assert output.finished and len(output.outputs[0].token_ids) == STEPS


def test_a_batch_of_all_forms_of_prompts_with_params_of_their_own(llm: LLM, tokenizer: Any) -> None:
    ids = tokenizer.encode("The king said")
    prompts = ["The king said", {"prompt": "The king said"}, ids, {"prompt_token_ids": ids, "prompt": "The king said"}]
    outputs = llm.generate(prompts, [GREEDY] * 4, use_tqdm=False, priority=[3, 2, 1, 0])
    assert [output.prompt for output in outputs] == ["The king said", "The king said", None, "The king said"]
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    (alone,) = llm.generate(ids, GREEDY, use_tqdm=False)
    for output in [*outputs, alone]:
        assert output.outputs[0].token_ids == reference.greedy(TINY, ids, STEPS)


def test_the_reason_of_each_end(llm: LLM) -> None:
    (free,) = llm.generate("Once upon a time", GREEDY, use_tqdm=False)
    tokens, text = free.outputs[0].token_ids, free.outputs[0].text
    assert (free.outputs[0].finish_reason, free.outputs[0].stop_reason) == ("length", None)
    word = text.split()[2]
    stops = [
        SamplingParams(temperature=0.0, max_tokens=STEPS, stop=["?!", word]),
        SamplingParams(temperature=0.0, max_tokens=STEPS, stop_token_ids=[tokens[2]]),
        SamplingParams(max_tokens=STEPS, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
    ]
    by_text, by_token, by_end = llm.generate(["Once upon a time"] * 3, stops, use_tqdm=False)
    assert by_text.outputs[0].text == text[: text.index(word)]
    assert (by_text.outputs[0].finish_reason, by_text.outputs[0].stop_reason) == ("stop", word)
    assert (by_token.outputs[0].finish_reason, by_token.outputs[0].stop_reason) == ("stop", tokens[2])
    assert by_end.outputs[0].text in ("yes", "no")
    assert (by_end.outputs[0].finish_reason, by_end.outputs[0].stop_reason) == ("stop", None)


def cut(tokenizer: Any, tokens: list[int], stop: str) -> tuple[str, list[int], str]:
    """Return text, tokens and reason of a sample whose tokens these are, by transformers' text of the whole."""
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    if stop not in text:
        return text, tokens, "length"
    parts = (tokens[:count] for count in range(1, len(tokens) + 1))
    kept = next(part for part in parts if stop in tokenizer.decode(part, skip_special_tokens=True))
    return text[: text.index(stop)], kept, "stop"


def test_characters_over_several_tokens_and_stop_texts_among_them(llm: LLM, tokenizer: Any) -> None:
    """The first are bytes at random, which make few characters; the others are characters of several bytes."""
    alphabet = [token for token in range(10, 500) if "\ufffd" in tokenizer.decode([token])]
    characters = StructuredOutputsParams(regex="(漢|字|🙂|🚀|é|“){60}")
    common = {"n": 4, "max_tokens": 80, "seed": 5, "ignore_eos": True, "temperature": 5.0}
    params = [
        SamplingParams(**common, allowed_token_ids=alphabet), SamplingParams(**common, structured_outputs=characters)
    ]  # fmt: skip
    whole = llm.generate(["Once", "漢字が"], params, use_tqdm=False)
    for output in whole:
        for sample in output.outputs:
            assert sample.text == tokenizer.decode(sample.token_ids, skip_special_tokens=True)
    assert "\ufffd" in whole[0].outputs[0].text
    text = whole[1].outputs[1].text
    stop = next(text[at : at + 3] for at in range(5, 20) if len(text[at : at + 3].encode()) > 8)
    wanted = [[cut(tokenizer, sample.token_ids, stop) for sample in output.outputs] for output in whole]
    stops = [msgspec.structs.replace(one, stop=["never", stop]) for one in params]
    stopped = llm.generate(["Once", "漢字が"], stops, use_tqdm=False)
    found = [[(one.text, one.token_ids, one.finish_reason) for one in output.outputs] for output in stopped]
    assert found == wanted
    assert stopped[1].outputs[1].stop_reason == stop and stopped[1].metrics is not None


def test_an_interrupted_call_leaves_nothing_running(llm: LLM) -> None:
    endless = SamplingParams(max_tokens=900, ignore_eos=True, stop=["never"])
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["Once"] * 8, endless, use_tqdm=False)
    begun = time.monotonic()
    (output,) = llm.generate("The king said", GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == reference.greedy(TINY, output.prompt_token_ids, STEPS)
    wait_until(lambda: not (llm.llm_engine.step() or llm.llm_engine.has_unfinished_requests()), "the others have ended")
    assert output.metrics is not None and time.monotonic() - begun < 60


def test_a_call_that_is_interrupted_while_it_adds_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = llm.llm_engine._engine

    def interrupted(timeout_ms: int) -> None:
        raise KeyboardInterrupt

    def aborted() -> int:
        return local.ask(MetricsQuery(nonce=local.nonce()), CoreMetrics).finished.get("abort", 0)

    before = aborted()
    with monkeypatch.context() as patch:
        patch.setattr(local, "receive", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["Once"] * 8, SamplingParams(max_tokens=900, ignore_eos=True), use_tqdm=False)
    wait_until(lambda: aborted() == before + 8, "those that were added have ended")


def test_the_tokenizer_of_the_checkpoint_is_at_hand(llm: LLM, tokenizer: Any) -> None:
    ours = llm.get_tokenizer()
    assert ours.encode("The king 漢") == tokenizer.encode("The king 漢")
    assert ours.decode(ours.encode("The king 漢")) == "The king 漢"


def test_log_probabilities_several_samples_and_times(llm: LLM) -> None:
    wants = SamplingParams(n=3, max_tokens=6, logprobs=2)
    scored, plain = llm.generate(["The king said", "The king"], [wants, GREEDY], use_tqdm=False)
    assert len(scored.outputs) == 3 and plain.outputs[0].cumulative_logprob is None
    for sample in scored.outputs:
        assert sample.finished()
        rows = reference.log_probabilities(TINY, scored.prompt_token_ids, sample.token_ids)
        total = sum(float(row[token]) for row, token in zip(rows, sample.token_ids, strict=True))
        assert sample.cumulative_logprob == pytest.approx(total, abs=1e-4)
    times = scored.metrics
    assert times is not None and times.admitted is not None and times.first_token is not None
    assert all(a <= b for a, b in pairwise([times.arrival, times.admitted, times.first_token, times.ended]))


def test_the_cached_part_of_a_prompt_is_counted(llm: LLM) -> None:
    prefix = "There was a house behind the river, and the miller who lived there had seven sons and a cat. "
    first, second = (
        llm.generate(prefix + text, GREEDY, use_tqdm=False)[0] for text in ("The youngest", "One day the cat")
    )
    assert first.num_cached_tokens == 0
    pairs = zip(first.prompt_token_ids, second.prompt_token_ids, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    assert second.num_cached_tokens == shared // 16 * 16 > 0


@pytest.mark.usefixtures("forked_llm")
def test_a_chat_without_an_engine_is_no_fault_of_its_messages() -> None:
    with LLM(str(TINY), gpu_memory_utilization=0.05) as one:
        folder = Path(one.llm_engine.run_dir)
        os.kill(one.llm_engine.supervisor_pid, signal.SIGKILL)
        wait_until(lambda: not folder.exists(), "the gateway removes the run folder")
        with pytest.raises(EngineError, match="the supervisor of the engine was killed by SIGKILL"):
            one.chat(CHAT)


@pytest.mark.usefixtures("forked_llm")
def test_a_seed_of_the_engine_makes_requests_reproducible_on_any_cut() -> None:
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    own = SamplingParams(max_tokens=8, ignore_eos=True, seed=3)

    def tokens(stages: int, seed: int | None) -> list[list[int]]:
        with LLM(str(TINY), pipeline_parallel_size=stages, gpu_memory_utilization=0.05, seed=seed) as one:
            outputs = one.generate(["Once", "Once", "Once"], [free, free, own], use_tqdm=False)
            outputs += one.generate("Once", free, use_tqdm=False)
            folder = one.llm_engine.run_dir
        assert not Path(folder).exists()
        with pytest.raises(EngineError, match="the engine is closed"):
            one.chat(CHAT)
        return [output.outputs[0].token_ids for output in outputs]

    first, second, other = tokens(1, 7), tokens(2, 7), tokens(1, 8)
    assert first == second, "the same seed"
    assert len({tuple(each) for each in first}) == 4, "each request has a seed of its own"
    assert first[2] == other[2] and first[0] != other[0] and first[3] != other[3]
