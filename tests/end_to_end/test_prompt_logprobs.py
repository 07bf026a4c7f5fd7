"""Log-probabilities of prompts are those of transformers with the same checkpoint (float64)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, reference_logits
from ppengine import LLM, SamplingParams

TOP = 3


class Case:
    """An engine and its checkpoint."""

    def __init__(self, folder: Path, tensor: int) -> None:
        self.folder = make_checkpoint(folder, "llama", dtype="float64", layers=4)
        self.llm = LLM(
            model=str(self.folder), pipeline_parallel_size=2, tensor_parallel_size=tensor, dtype="float64",
            max_num_batched_tokens=24, enable_prefix_caching=True, skip_tokenizer_init=True,
        )  # fmt: skip


@pytest.fixture(scope="module", params=[1, 2], ids=["lone", "ranks"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    made = Case(tmp_path_factory.mktemp("scored") / "llama", request.param)
    with made.llm:
        yield made


def check(case: Case, prompt: list[int], found: list[object] | None) -> None:
    """Compare the log-probabilities of a prompt, their ranks and the best tokens."""
    expected = torch.log_softmax(reference_logits(case.folder, prompt, torch.float64), -1)
    assert found is not None and found[0] is None and len(found) == len(prompt)
    for at, one in enumerate(found[1:], 1):
        values = expected[at - 1]
        assert one.logprob == pytest.approx(float(values[prompt[at]]), abs=1e-5)
        assert one.rank == 1 + int((values > values[prompt[at]]).sum())
        best = values.topk(TOP)
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_all_positions_are_scored_in_chunks_beside_others_and_without_the_cache(case: Case) -> None:
    """Prompts longer than a step, of one token, with a common prefix that the cache has, and twice the same."""
    shared = [3 + at * 7 % 90 for at in range(50)]
    prompts = [shared, [5], [*shared[:40], 9, 8], shared, [4, 5, 6]]
    case.llm.generate([{"prompt_token_ids": shared}], SamplingParams(max_tokens=2, temperature=0), use_tqdm=False)
    wants = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, prompt_logprobs=TOP)
    plain = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    several = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = case.llm.generate([*several, *several], [wants] * 5 + [plain] * 5, use_tqdm=False)
    for prompt, output, other in zip(prompts, outputs[:5], outputs[5:], strict=True):
        if len(prompt) == 1:
            assert not any(output.prompt_logprobs or [])
        else:
            check(case, prompt, output.prompt_logprobs)
        assert other.prompt_logprobs is None
        assert output.outputs[0].token_ids == other.outputs[0].token_ids[:3]


def test_samples_share_the_scores_of_their_prompt(case: Case) -> None:
    prompt = [3 + at * 5 % 90 for at in range(30)]
    wants = SamplingParams(n=3, max_tokens=2, seed=1, ignore_eos=True, prompt_logprobs=TOP, logprobs=0)
    (output,) = case.llm.generate({"prompt_token_ids": prompt}, wants, use_tqdm=False)
    check(case, prompt, output.prompt_logprobs)
    assert len(output.outputs) == 3
