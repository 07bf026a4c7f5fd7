"""The offline API on its own: what an interrupted call leaves behind does not end up in the next one."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path

import msgspec
import numpy
import pytest
import torch
import zmq
from hub_server import Hub, served
from ppengine.checkpoint.tokenizer import Tokenizer
from ppengine.common.config import ConfigError
from ppengine.hub.transfer import Transfer
from ppengine.offline import launch, prompts
from ppengine.offline.arguments import ARGUMENTS, make_profile, profile_of
from ppengine.offline.launch import EngineError, LocalEngine
from ppengine.offline.llm import LLM, RequestOutput
from ppengine.offline.llm_engine import LLMEngine
from ppengine.offline.open_requests import OpenRequests
from ppengine.offline.program_texts import ProgramTexts
from ppengine.offline.request_seeds import checked_seed
from ppengine.offline.vllm_arguments import FOREIGN, OF_CALLS
from ppengine.protocol.offline import AbortMany, Added
from ppengine.protocol.sampling import SamplingParams

MODELS = Path(__file__).resolve().parents[2] / "profiles" / "models"
TINY = MODELS / "tiny"
TOKENIZER = Tokenizer.load(TINY)


class Left:
    """An engine that still holds the end of a request that an interrupted call had aborted."""

    def add_many(self, prompts, params, ids=(), priority=None):
        self.answers = [["r-old"], ["r-1"]]
        return ["r-1"]

    def step(self, *, finished_only=False):
        return [RequestOutput(name, None, [1], [], True) for name in self.answers.pop(0)]


def test_the_end_of_an_interrupted_call_is_not_taken_for_an_output():
    llm = LLM.__new__(LLM)
    llm._turn = threading.RLock()
    llm.llm_engine = Left()
    assert [output.request_id for output in llm.generate("x", use_tqdm=False)] == ["r-1"]


class Ended:
    """A supervisor that was killed."""

    def poll(self):
        return -9


@pytest.mark.timeout(60)
def test_messages_for_an_engine_that_has_ended_are_an_error(tmp_path):
    """Its socket takes a thousand of them."""
    made = LocalEngine.__new__(LocalEngine)
    made._closed, made._process, made._errors = False, Ended(), (tmp_path / "errors").open("w+")
    with zmq.Context() as context, context.socket(zmq.DEALER) as made._socket, made._errors:
        made._socket.linger = 0
        made._socket.connect(f"ipc://{tmp_path}/front")
        with pytest.raises(EngineError, match="was killed by SIGKILL"):
            for _ in range(5000):
                made.send(AbortMany(session="s", requests=["r"]))


def test_an_engine_without_a_process_for_it_is_an_error_and_leaves_nothing_open(monkeypatch):
    def refused(*arguments):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(launch, "run_supervisor", refused)
    gc.collect()
    before, starts = len(list(Path("/proc/self/fd").iterdir())), 8
    for _ in range(starts):
        with pytest.raises(EngineError, match=r"the engine cannot be started: .*temporarily unavailable") as caught:
            LocalEngine(make_profile(str(TINY)))
        del caught
    # Threads of this process may open some meanwhile, and close what an earlier test has left.
    assert len(list(Path("/proc/self/fd").iterdir())) < before + starts


def test_last_words_that_are_no_utf8_are_still_words(monkeypatch, tmp_path):
    words = r"os.write(2, b'error: /m/\xff\xfe has no config.json\n'); os.write(1, b'\xff\n')"
    (tmp_path / "dying.py").write_text(f"import os; {words}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    real = launch.run_supervisor
    monkeypatch.setattr(launch, "run_supervisor", lambda _, errors, line: real(["dying"], errors, line))
    with pytest.raises(EngineError, match=r"^/m/\ufffd\ufffd has no config\.json$"):
        LocalEngine(make_profile(str(TINY)))


def test_a_call_that_fails_ends_its_requests_by_one_message():
    class Failing:
        def __init__(self):
            self.aborted = []

        def add_many(self, prompts, params, ids=(), priority=None):
            return [f"r-{number}" for number in range(len(prompts))]

        def step(self, *, finished_only=False):
            raise EngineError("gone")

        def abort_request(self, request_id):
            self.aborted.append(list(request_id))

    llm = LLM.__new__(LLM)
    llm._turn = threading.RLock()
    llm.llm_engine = Failing()
    with pytest.raises(EngineError, match="gone"):
        llm.generate(["x"] * 3, use_tqdm=False)
    assert llm.llm_engine.aborted == [["r-0", "r-1", "r-2"]]


@pytest.mark.parametrize("at", [1, 2])
def test_a_call_that_is_interrupted_while_it_adds_requests_ends_them(at, monkeypatch):
    monkeypatch.setattr(prompts, "PORTION_CHARACTERS", 10)
    made, sent, number = engine(), [], itertools.count(1)

    def ask(message, kind):
        made._engine.message = message
        if message.nonce == at:
            raise KeyboardInterrupt
        return Added(nonce=message.nonce, requests=[f"r-{message.nonce}"])

    made._engine.ask, made._engine.send, made._engine.nonce = ask, sent.append, number.__next__
    with pytest.raises(KeyboardInterrupt):
        made.add_many(["the first one"] * 3, [SamplingParams()] * 3)
    before = [f"r-{nonce}" for nonce in range(1, at)]
    assert sent == [AbortMany(session="s", requests=before, messages=[at])]
    made.add_many(["the next call"], [SamplingParams()])
    assert len(sent) == 1 and made._adding is None


class OneCallAtATime:
    """An engine whose `step` gives all outputs that have ended to the thread that calls it: it has one queue."""

    def __init__(self):
        self.ended, self.count = [], 0

    def add_many(self, prompts, params, ids=(), priority=None):
        self.count += 1
        self.ended.append(f"r-{self.count}")
        time.sleep(0.01)
        return self.ended[-1:]

    def step(self, *, finished_only=False):
        ended, self.ended = self.ended, []
        if not ended:
            raise AssertionError("another thread took the output")
        return [RequestOutput(name, None, [1], [], True) for name in ended]


def test_calls_of_several_threads_take_turns():
    llm = LLM.__new__(LLM)
    llm._turn = threading.RLock()
    llm.llm_engine = OneCallAtATime()
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: llm.generate("x", use_tqdm=False)[0].request_id, range(12)))
    assert sorted(outputs) == sorted(f"r-{number}" for number in range(1, 13))


class Listener:
    """An engine that takes everything and remembers it."""

    def nonce(self):
        return 1

    def ask(self, message, kind):
        self.message = message
        return Added(nonce=1, requests=[f"r-{index}" for index in range(len(message.submissions))])


def engine(*, absent: bool = False, longest: int = 1024) -> LLMEngine:
    made = LLMEngine.__new__(LLMEngine)
    made._engine, made._session, made._cursor = Listener(), "s", -1
    made._texts = ProgramTexts(TINY, longest, absent=absent)
    made._open = OpenRequests(lambda: made._texts.tokenizer)
    return made


def prompts_sent(message) -> list[list[int]]:
    """Return the token ids of the prompts of a message."""
    arrays = [tokens.tolist() for tokens in message.tokens] or [[]] * len(message.submissions)
    return [ids or one.prompt_token_ids for ids, one in zip(arrays, message.submissions, strict=True)]


def test_token_ids_of_an_array_are_taken():
    made = engine()
    made.add_many([{"prompt_token_ids": numpy.array([1, 2])}, "text"], [SamplingParams()] * 2)
    message = made._engine.message
    assert [tokens.tolist() for tokens in message.tokens] == [[1, 2], TOKENIZER.encode("text")]
    assert all(each.prompt is None and each.prompt_token_ids is None for each in message.submissions)


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**40])
def test_a_token_that_no_array_can_hold_goes_to_the_core_as_a_number(wrong):
    made = engine()
    made.add_many([{"prompt_token_ids": [1, wrong]}, {"prompt_token_ids": []}], [SamplingParams()] * 2)
    message = made._engine.message
    assert [each.prompt_token_ids for each in message.submissions] == [[1, wrong], []] and message.tokens == []


@pytest.mark.parametrize("wrong", [2**63, 2**64, 10**30, -(10**30)])
def test_a_token_that_no_message_can_hold_is_named(wrong):
    with pytest.raises(ValueError, match=rf"prompt 1: token id {wrong} is not in the vocabulary"):
        engine().add_many(["text", {"prompt_token_ids": [1, wrong]}], [SamplingParams()] * 2)


def test_a_bad_word_that_is_not_utf8_is_named():
    with pytest.raises(ValueError, match=r"prompt 0: bad_words\[1\] is not UTF-8 at offset 1: byte 0x80"):
        engine().add_many(["text"], [SamplingParams(bad_words=["good", "a\udc80"])])


def test_much_text_goes_in_portions_and_all_or_none_of_it_is_taken(monkeypatch):
    monkeypatch.setattr(prompts, "PORTION_CHARACTERS", 5)
    made = engine()
    sent, dropped = [], []

    def ask(message, kind):
        names = [each.request for each in message.submissions]
        sent.append((message.first, prompts_sent(message)))
        bad = prompts_sent(message)[-1] == TOKENIZER.encode("bad")
        return Added(nonce=1, requests=[] if bad else names, error="prompt 3: no" if bad else "")

    made._engine.ask, made._engine.send = ask, dropped.append
    texts = ["abc", {"prompt_token_ids": [1] * 99}, "de", "fghijk", "l"]
    params = [SamplingParams()] * 5
    ids = [[1] * 99 if isinstance(each, dict) else TOKENIZER.encode(each) for each in texts]
    assert made.add_many(texts, params, list("vwxyz")) == list("vwxyz")
    assert sent == [(0, ids[:3]), (3, ids[3:4]), (4, ids[4:])] and dropped == []
    opened = made._open._requests
    assert {name: one.prompt for name, one in opened.items()} == {
        "v": "abc", "w": None, "x": "de", "y": "fghijk", "z": "l"
    }  # fmt: skip
    assert [one.prompt_ids.tolist() for one in opened.values()] == ids
    opened.clear()
    with pytest.raises(ValueError, match="prompt 3: no"):
        made.add_many(["abcde", "fg", "h", "bad"], params[:4], list("abcd"))
    assert [message.requests for message in dropped] == [["a"]]
    assert not made.has_unfinished_requests()


def test_many_prompts_go_in_portions_that_the_core_takes_in_a_moment():
    made, sent = engine(), []

    def ask(message, kind):
        sent.append((message.first, len(message.submissions)))
        return Added(nonce=1, requests=[f"r-{message.first + place}" for place in range(len(message.submissions))])

    made._engine.ask = ask
    count = 2 * prompts.PORTION_PROMPTS + 5
    names = made.add_many([[1, 2, 3]] * count, [SamplingParams()] * count)
    assert sent == [(0, 1000), (1000, 1000), (2000, 5)] and names == [f"r-{place}" for place in range(count)]


def test_a_check_sends_all_prompts_and_leaves_none_open(monkeypatch):
    monkeypatch.setattr(prompts, "PORTION_CHARACTERS", 5)
    made = engine()
    sent = []

    def ask(message, kind):
        priorities = [one.priority for one in message.submissions]
        sent.append((message.check, message.first, prompts_sent(message), priorities))
        return Added(nonce=1, requests=[], error="" if message.first == 0 else "prompt 2: no")

    made._engine.ask = ask
    with pytest.raises(ValueError, match="prompt 2: no"):
        made.check_many(["abc", "de", "f"], [SamplingParams()] * 3, [1, 2, 3])
    abc, de, f = map(TOKENIZER.encode, ("abc", "de", "f"))
    assert sent == [(True, 0, [abc, de], [1, 2]), (True, 2, [f], [3])]
    assert not made.has_unfinished_requests()
    with pytest.raises(ValueError, match="2 prompts and 1 priorities"):
        made.check_many(["a", "b"], [SamplingParams()] * 2, [1])


def test_the_first_prompt_that_is_refused_is_named_whether_here_or_by_the_core():
    made, checks = engine(longest=8), []
    params = [SamplingParams()] * 3
    long = "x" * 1000
    limit = r"max_model_len is 8 tokens of at most 13 characters; at most 104 would fit"

    def ask(message, kind):
        checks.append((message.check, len(message.submissions)))
        bad = message.submissions[0].prompt_token_ids == [-1]
        return Added(nonce=1, requests=[], error="prompt 0: no" if bad else "")

    made._engine.ask = ask
    with pytest.raises(ValueError, match=f"^prompt 1: the prompt has 1000 characters, {limit}$"):
        made.add_many(["a", long, [-1]], params)
    with pytest.raises(ValueError, match=r"^prompt 0: no$"):
        made.add_many([[-1], long, "a"], params)
    assert checks == [(True, 1), (True, 1)], "none was queued"
    with pytest.raises(ValueError, match=f"^prompt 0: the prompt has 1000 characters, {limit}$"):
        made.add_many([long], params[:1])
    assert len(checks) == 2 and not made.has_unfinished_requests()


def test_texts_of_the_sampling_stay_here_and_bad_words_go_as_tokens():
    made = engine()
    params = SamplingParams(stop=["END"], bad_words=["the king"], bad_words_ids=[[5]], seed=3)
    made.add_many(["a", [1]], [params, SamplingParams(detokenize=False)])
    first, second = (one.sampling for one in made._engine.message.submissions)
    banned = [[5], *TOKENIZER.encode_bad_word("the king")]
    assert (first.stop, first.bad_words, first.bad_words_ids, first.seed) == ([], [], banned, 3)
    assert second == SamplingParams(detokenize=False)
    with pytest.raises(ValueError, match=r"prompt 1: bad_words_ids holds .* sequences"):
        made.add_many(["a", "b"], [params, SamplingParams(bad_words=[f"w{number}" for number in range(200)])])


def test_token_ids_need_no_tokenizer_until_there_is_text_to_make():
    made = engine()
    made.add_many([[1, 2]], [SamplingParams()])
    assert "tokenizer" not in vars(made._texts)
    assert made.get_tokenizer().decode(made.get_tokenizer().encode("The king")) == "The king"


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ("a", {}, "this engine was started without a tokenizer: give prompt_token_ids"),
        ([1], {"stop": ["x"]}, "stop texts need a tokenizer; this engine was started without one: use stop_token_ids"),
        ([1], {"bad_words": ["x"]}, "bad_words need a tokenizer; .*: use bad_words_ids"),
    ],
)
def test_an_engine_without_a_tokenizer_refuses_texts_by_their_number(prompt, params, says):
    made = engine(absent=True)
    with pytest.raises(ValueError, match=f"prompt 1: {says}"):
        made.add_many([[5], prompt], [SamplingParams(), SamplingParams(**params)])
    assert made._engine.message.check, "the prompts before it were looked at"
    with pytest.raises(ValueError, match="this engine was started without a tokenizer"):
        made.get_tokenizer()


@pytest.mark.parametrize("prompt", [{"prompt": 5}, {}, 7, {"prompt_token_ids": [1], "multi_modal_data": {}}])
def test_a_prompt_of_another_kind_is_named(prompt):
    with pytest.raises(ValueError, match="prompt 1: a prompt is a text, token ids"):
        engine().add_many(["fine", prompt], [SamplingParams()] * 2)


@pytest.mark.parametrize("ids", [[1.5], ["a"], 5])
def test_token_ids_that_are_none_are_named(ids):
    with pytest.raises(ValueError, match="prompt 0: token ids are whole numbers"):
        engine().add_many([{"prompt_token_ids": ids}], [SamplingParams()])


def test_a_prompt_has_any_form_of_vllms():
    made = engine()
    made.add_many(["a", {"prompt": "b"}, [1, 2], {"prompt_token_ids": [3], "prompt": "c"}], [SamplingParams()] * 4)
    message = made._engine.message
    assert prompts_sent(message) == [TOKENIZER.encode("a"), TOKENIZER.encode("b"), [1, 2], [3]]
    assert [one.prompt for one in made._open._requests.values()] == ["a", "b", None, "c"]
    assert [prompts.prompts_of(each) for each in ("a", {"prompt": "b"}, [1, 2])] == [["a"], [{"prompt": "b"}], [[1, 2]]]
    assert prompts.prompts_of([[1], [2]]) == [[1], [2]] and prompts.prompts_of([]) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((3,), "prompts is 3; it must be a text, token ids, .*, or a list of these"),
        ((None,), "prompts is None; it must be"),
        ((b"abc",), "prompts is b'abc'; it must be"),
        (("x", {"temperature": 0}), "sampling_params is {'temperature': 0}; it must be SamplingParams, or a list"),
        (("x", 0.5), r"sampling_params is 0\.5; it must be SamplingParams"),
        ((["x", "y"], [SamplingParams(), {}]), "prompt 1: sampling params are SamplingParams, not {}"),
    ],
)
def test_an_argument_of_generate_of_another_kind_is_named(given, says):
    llm = LLM.__new__(LLM)
    llm._turn = threading.RLock()
    llm.llm_engine = engine()
    with pytest.raises(ValueError, match=says):
        llm.generate(*given)
    with pytest.raises(ValueError, match="priority is 5; it must be a list with one number a prompt"):
        llm.generate(["x"], priority=5)


def test_an_id_or_sampling_of_another_kind_is_refused_as_the_core_could_not_read_it():
    made = engine()
    for wrong in (5, None):
        with pytest.raises(ValueError, match=rf"request_id is \[{wrong}\]; it must be a list of texts"):
            made.add_request(wrong, "x", SamplingParams())
        with pytest.raises(ValueError, match=rf"request_id is \[{wrong}\]; it must be a list of texts"):
            made.abort_request([wrong])
    made._seed = 7
    with pytest.raises(ValueError, match=r"prompt 0: sampling params are SamplingParams, not {'n': 2}"):
        made.add_request("a", "x", {"n": 2})
    assert not hasattr(made._engine, "message")


def test_an_abort_takes_one_id_or_several():
    made, sent = engine(), []
    made._engine.send = lambda message: sent.append(message.requests)
    made.abort_request("abc")
    made.abort_request(["abc", "d"])
    assert sent == [["abc"], ["abc", "d"]]


def test_a_seed_of_the_engine_seeds_each_request_by_its_number():
    def seeds(seed, *calls):
        made = engine()
        made._seed, found = checked_seed(seed), []
        for params in calls:
            made.add_many(["x"] * len(params), params)
            found += [each.sampling.seed for each in made._engine.message.submissions]
        return found

    free, own, greedy = SamplingParams(), SamplingParams(seed=3), SamplingParams(temperature=0.0)
    found = seeds(7, [free, own, greedy], [free])
    assert found == seeds(7, [free], [own, greedy, free]) and found[1:3] == [3, None]
    assert found[0] != found[3] and None not in (found[0], found[3])
    assert seeds(8, [free])[0] != found[0] and seeds(None, [free, own]) == [None, 3]
    with pytest.raises(ConfigError, match=r"LLM: seed is '1\.5'; it must be a whole number, or None"):
        checked_seed(1.5)


def test_lists_of_unequal_length_are_refused_with_their_lengths():
    for params, ids in (([], []), ([SamplingParams()], ["a", "b"])):
        with pytest.raises(ValueError, match=f"1 prompts, {len(params)} sampling params and {len(ids)} request ids"):
            engine().add_many(["x"], params, ids)


def test_each_prompt_has_its_priority_and_a_list_of_another_length_is_refused():
    made = engine()
    made.add_many(["x", {"prompt_token_ids": [1]}], [SamplingParams()] * 2, priority=[3, -1])
    assert [each.priority for each in made._engine.message.submissions] == [3, -1]
    made.add_request("a", "x", SamplingParams(), priority=7)
    assert [each.priority for each in made._engine.message.submissions] == [7]
    made.add_many(["x"], [SamplingParams()])
    assert [each.priority for each in made._engine.message.submissions] == [0]
    llm = LLM.__new__(LLM)
    llm._turn = threading.RLock()
    llm.llm_engine = made
    with pytest.raises(ValueError, match="2 prompts and 3 priorities; give one a prompt"):
        llm.generate(["x", "y"], priority=[1, 2, 3])
    with pytest.raises(ValueError, match="1 prompts and 0 priorities"):
        llm.generate(["x"], priority=[])
    with pytest.raises(ValueError, match=r"priority is 1\.5; it must be a whole number"):
        llm.generate(["x"], priority=[1.5])


def test_a_text_that_is_not_utf8_is_refused_before_any_is_sent():
    made = engine()
    with pytest.raises(ValueError, match="prompt 1 is not UTF-8 at offset 1: byte 0x9b"):
        made.add_many(["fine", "a\udc9b"], [SamplingParams()] * 2)
    assert not hasattr(made._engine, "message")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of auto, float64, float32, bfloat16, float16"),
        ({"load_format": "gguf"}, "load_format is 'gguf'; it must be one of auto, dummy"),
        ({"distributed_executor_backend": "x"}, "distributed_executor_backend is 'x'; it must be one of local, ray"),
        ({"block_size": 17}, "block_size is 17; it must be one of 8, 16, 32, 64, 128"),
        ({"revision": "main"}, "revision is that of a hub's model; give source='huggingface' or 'modelscope' too"),
        ({"source": "hf"}, "source is 'hf'; it must be one of folder, huggingface, modelscope"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size is '2'; it must be a whole number, 1 to 256"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0; it must be 1 to 256"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0; it must be 1 to 64"),
        ({"gpu_memory_utilization": 2}, "gpu_memory_utilization is 2; it must be above 0 and at most 1"),
        ({"swap_space": "4"}, "swap_space is '4'; it must be a number, 0 to 65536"),
        ({"max_model_len": 1.5}, "max_model_len is 1.5; it must be a whole number, 2 to 4194304"),
        ({"enforce_eager": "no"}, "enforce_eager is 'no'; it must be true or false"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_the_name_of_the_argument(arguments, says):
    with pytest.raises(ConfigError) as refused:
        make_profile("m", **arguments)
    assert str(refused.value) == f"LLM: {says}"


@pytest.mark.parametrize(
    ("model", "arguments", "requests"),
    [
        ("llama-8b", {}, 512),
        ("llama-8b", {"pipeline_parallel_size": 4}, 2048),
        ("llama-8b", {"dtype": "float32"}, 256),
        ("llama-8b", {"max_num_seqs": 7}, 7),
        ("opt-6.7b", {"pipeline_parallel_size": 2}, 512),
        ("no such folder", {}, 256),
    ],
)
def test_a_model_whose_kv_cache_is_small_takes_more_requests_at_a_time(model, arguments, requests):
    assert make_profile(str(MODELS / model), **arguments).scheduler.max_num_seqs == requests


def test_a_type_that_is_none_is_refused_whatever_the_model_is():
    with pytest.raises(ConfigError, match=r"dtype is .*; it must be one of auto, float64"):
        make_profile(str(MODELS / "llama-8b"), dtype=["float16"])


@pytest.mark.parametrize(("name", "foreign"), FOREIGN.items())
def test_an_argument_of_vllm_is_taken_where_it_changes_nothing_and_refused_with_a_reason(name, foreign):
    model = str(MODELS / "llama-8b")
    plain = msgspec.structs.replace(make_profile(model), name="x")
    for value in (None, *foreign.taken):
        assert msgspec.structs.replace(profile_of(model, {name: value}), name="x") == plain
    with pytest.raises(ConfigError) as refused:
        profile_of(model, {name: "other"})
    assert str(refused.value) == f"LLM: {name}='other' is refused: {foreign.reason or 'give True or False'}"
    assert name not in inspect.signature(make_profile).parameters


def test_values_of_vllm_that_have_another_name_here():
    model = str(MODELS / "llama-8b")
    given = {"dtype": torch.float16, "distributed_executor_backend": "mp", "load_format": "safetensors"}
    profile = profile_of(model, {**given, "tokenizer": model, "block_size": 32, "enable_chunked_prefill": False})
    assert (profile.model.dtype, profile.parallel.executor, profile.model.load_format) == ("float16", "local", "auto")
    assert profile.memory.block_size == 32 and not profile.scheduler.chunked_prefill
    assert profile_of(model, {"dtype": "half"}).model.dtype == "float16"
    assert profile_of(model, {"swap_space": None}).memory.swap_space_gib == 4.0
    for name, nearest in (("max_num_seq", "max_num_seqs"), ("max_logprob", "max_logprobs")):
        with pytest.raises(TypeError, match=rf"LLM has no argument {name}; did you mean {nearest}\?"):
            profile_of(model, {name: 5})
    with pytest.raises(ConfigError, match="enable_lora=True is refused: this engine has no LoRA"):
        profile_of(model, {"enable_lora": True})


@pytest.mark.parametrize(("name", "foreign"), OF_CALLS.items())
def test_an_argument_of_a_call_is_taken_where_it_changes_nothing_and_refused_with_a_reason(name, foreign):
    llm = LLM.__new__(LLM)
    llm._turn = threading.RLock()
    calls = [llm.chat] if name.startswith(("chat_", "continue_")) else [llm.chat, llm.generate]
    for call in calls:
        for value in (None, *foreign.taken):
            llm.llm_engine = Left()
            llm.llm_engine.chat_prompts = lambda chats: ["x"]
            prompt = [{"role": "user", "content": "x"}] if call == llm.chat else "x"
            assert [output.request_id for output in call(prompt, use_tqdm=False, **{name: value})] == ["r-1"]
        with pytest.raises(ValueError, match=re.escape(f"{name}='other' is refused: {foreign.reason}")):
            call("x", **{name: "other"})
    if calls == [llm.chat]:
        with pytest.raises(TypeError, match=rf"LLM\.generate has no argument {name}"):
            llm.generate("x", **{name: None})
    with pytest.raises(TypeError, match=r"LLM\.chat has no argument temperature"):
        llm.chat([], temperature=0)


def test_a_name_of_a_hub_is_refused_with_the_argument_that_downloads_it():
    with pytest.raises(ConfigError, match="there is no folder org/model; to download a model of that name, add source"):
        make_profile("org/model")


@pytest.mark.parametrize("source", ["huggingface", "modelscope"])
def test_a_model_of_a_hub_is_downloaded_and_its_settings_count(tmp_path, monkeypatch, capsys, source):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("no_proxy", "*")
    files = {"config.json": (MODELS / "llama-8b" / "config.json").read_bytes(), "model.safetensors": b"weights"}
    with served(hub := Hub(files)) as address:
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", address)
        profile = make_profile("org/model", source=source)
        assert (Path(profile.model.path) / "model.safetensors").read_bytes() == b"weights"
        assert "downloading org/model from" in capsys.readouterr().err
        assert profile.scheduler.max_num_seqs == 512
        assert profile_of(profile, {}) is profile and capsys.readouterr().err == ""
        with contextlib.suppress(EngineError):
            make_profile("org/model", source=source, revision="v1")
        assert "v1" in hub.requests[-1][0]
    monkeypatch.setattr(Transfer, "__init__", partialmethod(Transfer.__init__, pause_s=0.0))
    with pytest.raises(EngineError, match="Connection refused"):
        make_profile("org/other", source=source)


def test_every_argument_but_the_refused_ones_has_its_name_in_errors():
    known = set(inspect.signature(make_profile).parameters)
    assert known - set(ARGUMENTS.values()) == {"trust_remote_code"}
    with pytest.raises(ConfigError, match="model is 5; it must be the path of a Hugging Face folder"):
        make_profile(5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"stop": 5}, "stop is 5; it must be a list of texts"),
        ({"stop": ["END", 5]}, "stop is ['END', 5]; it must be a list of texts"),
        ({"stop_token_ids": "x"}, "stop_token_ids is 'x'; it must be a list of whole numbers"),
        ({"n": "two"}, "n is 'two'; it must be a whole number"),
        ({"temperature": None}, "temperature is None; it must be a number"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"temperature": numpy.float32(0.5)}, "temperature is np.float32(0.5); it must be a number"),
        ({"stop_token_ids": numpy.array([1])}, "stop_token_ids is array([1]); it must be a list of whole numbers"),
    ],
)
def test_sampling_of_another_kind_is_refused_by_name(arguments, says):
    with pytest.raises(ValueError) as refused:
        SamplingParams(**arguments)
    assert str(refused.value) == says


def test_one_stop_text_needs_no_list():
    assert SamplingParams(stop="END") == SamplingParams(stop=["END"])


def test_a_list_that_vllm_has_none_for_may_be_none():
    params = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)
    assert params == SamplingParams() and (params.stop, params.stop_token_ids, params.bad_words) == ([], [], [])
    with pytest.raises(ValueError, match="bad_words_ids is None; it must be a list"):
        SamplingParams(bad_words_ids=None)


def test_an_engine_that_cannot_start_names_the_argument_and_not_the_key_of_a_profile():
    with pytest.raises(EngineError, match=r"^pipeline_parallel_size is 99; the model has 8 layers"):
        LLM(str(TINY), pipeline_parallel_size=99)
    with pytest.raises(EngineError, match=r"^max_model_len is 5000; this model serves at most 1024 tokens"):
        LLMEngine(str(TINY), max_model_len=5000, device="cpu")
    profile = make_profile(str(TINY), tensor_parallel_size=3, device="cpu")
    with pytest.raises(EngineError, match=r"^parallel\.tensor is 3; "):
        LLM(profile)


def test_an_engine_that_was_closed_says_so():
    made = LLM.__new__(LLM)
    made._turn = threading.RLock()
    made.llm_engine = engine()
    local = made.llm_engine._engine = LocalEngine.__new__(LocalEngine)
    local._closed, local._nonce, made.llm_engine._cursor = True, 0, 0
    for call in (lambda: made.generate("x"), made.llm_engine.step, lambda: made.llm_engine.abort_request("r-1")):
        with pytest.raises(EngineError, match="the engine is closed"):
            call()
    made.close()
