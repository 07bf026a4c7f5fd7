"""Sampling on a GPU: the tokens, the kept sets and the log-probabilities of the reference."""

from __future__ import annotations

import math

import pytest
import torch
from ppengine.protocol.sampling import MOST_TOKEN
from ppkernels import sampling
from ppkernels.gpu.sampling import DeviceSampling, Parameters, choose
from ppkernels.sampling import sample, sample_reference, uniform
from ppkernels.sampling_inputs import SamplingInputs
from torch import Tensor

MORE = 1024 if torch.cuda.is_available() else 8
"""Rows of the tests that draw; the interpreter takes a tenth of a second for one."""

# Rows that are not finite are part of the tests; numpy, which interprets, warns of them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def logits(rows: int, vocabulary: int, dtype: torch.dtype, seed: int = 0, scale: float = 4) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, vocabulary), generator=generator).mul_(scale).to(dtype)


def inputs(rows: int, **fields: object) -> SamplingInputs:
    """Parameters of `rows` rows; a single value stands for all of them."""
    values: dict[str, object] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 7, "sample": 0, **fields}
    values.setdefault("position", list(range(rows)))
    wide = {key: [value] * rows if isinstance(value, (int, float)) else value for key, value in values.items()}
    return SamplingInputs(**wide)  # type: ignore[arg-type]


def both(rows: Tensor, device: torch.device, **fields: object) -> tuple[list[int], list[int]]:
    """Return the tokens of the kernel and those of the reference on a CPU."""
    parameters = inputs(len(rows), **fields)
    return sample(rows.to(device), parameters).tokens.tolist(), sample_reference(rows, parameters).tokens.tolist()


@dtypes
@pytest.mark.parametrize("vocabulary", [3, 1000, 20011])
def test_greedy_takes_the_lowest_of_the_best(device: torch.device, dtype: torch.dtype, vocabulary: int) -> None:
    rows = logits(6, vocabulary, dtype, seed=vocabulary)
    rows[2, vocabulary // 3 :: 7] = 60.0
    rows[4] = -math.inf
    kernel, reference = both(rows, device, temperature=0.0)
    assert kernel == reference
    assert kernel[2] == vocabulary // 3


CUTS: dict[str, dict[str, object]] = {
    "temperature": {"temperature": [0.2, 0.7, 1.0, 1.5, 4.0, 1e-50, 0.0, 30.0]},
    "top-k": {"top_k": [1, 2, 5, 50, 999, 1000, 4097, -1]},
    "top-p": {"top_p": [1e-50, 0.1, 0.5, 0.9, 0.99, 0.9999, 1.0, 0.3]},
    "both": {"top_k": [1, 3, 100, 400, 5, 20, 5000, 0], "top_p": [0.5, 0.6, 0.9, 0.2, 0.97, 1.0, 0.8, 0.7]},
}


@pytest.mark.parametrize(
    ("cut", "dtype"),
    [(cut, torch.float16) for cut in CUTS] + [("both", torch.float32), ("both", torch.bfloat16)],
    ids=str,
)
def test_a_seed_gives_the_tokens_of_the_reference(device: torch.device, cut: str, dtype: torch.dtype) -> None:
    # Halves have many equal logits here, also at the edges of the cuts.
    times = MORE // 8
    rows = logits(8 * times, 3001, dtype, seed=3)
    fields = {key: list(values) * times for key, values in CUTS[cut].items()}  # type: ignore[call-overload]
    kernel, reference = both(rows, device, **fields)
    assert kernel == reference
    planted = sample_reference(rows, inputs(len(rows), **{**fields, "seed": 8})).tokens.tolist()
    assert kernel != planted, "a wrong seed is seen"


@dtypes
def test_rows_of_several_tiles(device: torch.device, dtype: torch.dtype) -> None:
    # The second row has more candidates than there is room for.
    rows = logits(2, 12000, dtype, seed=5)
    cuts = {"top_k": [0, 9000], "top_p": [0.9, 0.999], "temperature": [3.0, 20.0]}
    kernel, reference = both(rows, device, **cuts)
    assert kernel == reference


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (0, 0.75), (2, 1.0), (2, 0.5), (4, 0.8), (3, 0.2), (5, 0.95)])
def test_the_kept_set_is_that_of_the_reference_with_ties(device: torch.device, top_k: int, top_p: float) -> None:
    """Weights are powers of two here and sums exact, so the edges of the cuts fall onto groups of equals."""
    row = torch.tensor([0.0, -1, 0, -2, -1, 0, -2, -2]).mul_(math.log(2))
    kept = sampling._keep(row.unsqueeze(0), [top_k], torch.tensor([[top_p]]))[0].nonzero().flatten()
    ends = torch.softmax(row[kept].double(), 0).cumsum(0).tolist()
    # For each token kept, a number near the lower end of its interval and one near the upper end.
    wanted, seeds = [], []
    for token, low, high in zip(kept.tolist(), [0.0, *ends], ends, strict=False):
        width = (high - low) / 10
        for least in (low, high - width):
            seeds.append(next(seed for seed in range(10**6) if least + 1e-5 < uniform(seed, 0, 0) < least + width))
            wanted.append(token)
    count = len(seeds)
    parameters = inputs(count, seed=seeds, position=[0] * count, top_k=top_k, top_p=top_p)
    assert sample(row.expand(count, -1).to(device), parameters).tokens.tolist() == wanted


def test_frequencies_are_the_probabilities(device: torch.device) -> None:
    """Chi-square of draws that the seed fixes, so the outcome is the same each time."""
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    count = 3 * MORE if MORE > 8 else 12
    tokens = sample(row.expand(count, -1).to(device), inputs(count, top_k=3)).tokens
    counts = torch.bincount(tokens.cpu(), minlength=4).double()
    assert counts[3] == 0
    expected = torch.tensor([4 / 9, 3 / 9, 2 / 9], dtype=torch.float64) * count
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < 9.2, "1 % of honest seeds are beyond"


def test_parameters_are_those_of_the_slot(device: torch.device) -> None:
    rows = logits(4, 500, torch.float32, seed=6)
    table = DeviceSampling(9, device)
    table.set([7, 2], [Parameters(temperature=1.0, seed=5, top_k=9), Parameters(temperature=2.0, seed=6, top_p=0.8)])
    slots, positions = torch.tensor([2, 0, 7, 7], device=device), torch.tensor([3, 3, 4, 5], device=device)
    out = torch.full((4,), -1, device=device)
    given = rows.to(device)
    assert choose(given, table, slots, positions, greedy=False, out=out) is out
    expected = SamplingInputs([2.0, 0, 1.0, 1.0], [0.8, 1, 1, 1], [0, 0, 9, 9], [6, 0, 5, 5], [0] * 4, [3, 3, 4, 5])
    assert out.tolist() == sample_reference(rows, expected).tokens.tolist()
    newest = torch.full((9,), -7, dtype=torch.int32, device=device)
    greedy = choose(given, table, slots.int(), positions.int(), greedy=True, newest=newest)
    seventh = int(newest[7])  # two rows share this slot: one of their tokens
    assert seventh in greedy[2:].tolist()
    assert newest.tolist() == [int(greedy[1]), -7, int(greedy[0]), -7, -7, -7, -7, seventh, -7]
    assert greedy.tolist() == rows.argmax(-1).tolist()


def test_the_table_has_room_for_the_largest_values_that_are_taken(device: torch.device) -> None:
    table = DeviceSampling(1, device)
    largest = Parameters(temperature=1.0, top_k=MOST_TOKEN, banned=[MOST_TOKEN], banned_until=2 * MOST_TOKEN)
    table.set([0], [largest])
    assert table.table[0].tolist()[2:] == largest.packed(table.banned)[2:]


def test_a_row_does_not_depend_on_what_shares_the_batch(device: torch.device) -> None:
    rows = logits(6, 700, torch.float16, seed=7).to(device)
    fields = {
        "temperature": [0.0, 1.0, 2.0, 1.0, 0.0, 0.5],
        "top_p": [1, 0.9, 0.8, 1, 1, 0.7],
        "top_k": [0, 0, 9, 4, 1, 0],
    }
    whole = sample(rows, inputs(6, **fields)).tokens.tolist()
    for row in range(6):
        own = {key: [values[row]] for key, values in fields.items()}
        assert sample(rows[row : row + 1], inputs(1, position=[row], **own)).tokens.tolist() == whole[row : row + 1]


@dtypes
def test_banned_tokens_do_not_come_and_logits_stay(device: torch.device, dtype: torch.dtype) -> None:
    rows = logits(4, 600, dtype, seed=8)
    best = rows.float().argsort(-1, descending=True)[:, :9].tolist()
    banned = {0: [*best[0][:5], 10**6, best[0][0]], 2: best[2], 3: best[3][1:]}
    fields = {"temperature": [0.0, 0.0, 0.0, 0.01], "banned": banned}
    given = rows.to(device)
    tokens = sample(given, inputs(4, **fields)).tokens.tolist()
    assert tokens == sample_reference(rows, inputs(4, **fields)).tokens.tolist()
    assert not set(tokens[2:3]) & set(best[2])
    assert torch.equal(given.cpu(), rows)


def test_a_ban_ends(device: torch.device) -> None:
    rows = torch.zeros((3, 8), device=device)
    table = DeviceSampling(1, device, banned=2)
    table.set([0], [Parameters(banned=[0, 1], banned_until=5)])
    tokens = choose(
        rows, table, torch.zeros(3, dtype=torch.int64, device=device), torch.arange(3, 6, device=device), greedy=True
    )
    assert tokens.tolist() == [2, 2, 0]
    with pytest.raises(ValueError, match="3 banned tokens do not fit a table with room for 2"):
        table.set([0], [Parameters(banned=[0, 1, 2], banned_until=5)])


@dtypes
def test_logprobs_are_those_of_the_reference(device: torch.device, dtype: torch.dtype) -> None:
    rows = logits(4, 5000, dtype, seed=9)
    rows[1, 70:4990:70] = 30.0
    fields = {"temperature": [0.0, 0.4, 3.0, 1.0], "top_k": 2, "banned": {0: [1]}, "logprobs": [0, 6, 3, -1]}
    kernel, reference = sample(rows.to(device), inputs(4, **fields)), sample_reference(rows, inputs(4, **fields))
    assert kernel.tokens.tolist() == reference.tokens.tolist()
    assert list(kernel.logprobs) == list(reference.logprobs) == [0, 1, 2]
    for row, (chosen, best) in kernel.logprobs.items():
        exact = torch.log_softmax(rows[row].double(), -1)
        assert chosen == pytest.approx(float(exact[kernel.tokens[row]]), abs=1e-5)
        order = exact.argsort(descending=True, stable=True).tolist()
        assert [token for token, _ in best] == order[: {0: 0, 1: 6, 2: 3}[row]]
        assert all(value == pytest.approx(float(exact[token]), abs=1e-5) for token, value in best)


def test_more_logprobs_than_tokens(device: torch.device) -> None:
    rows = torch.tensor([[1.0, -math.inf, 1.0, 2.0]], device=device)
    output = sample(rows, inputs(1, temperature=0.0, logprobs=9))
    assert [token for token, _ in output.logprobs[0][1]] == [3, 0, 2, 1]
    assert output.logprobs[0][1][3][1] == -math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_still_gives_a_token_of_the_vocabulary(device: torch.device, bad: float) -> None:
    rows = torch.full((4, 30), bad, device=device)
    cuts = {"temperature": [0.0, 1.0, 1.0, 1.0], "top_k": [0, 0, 3, 0], "top_p": [1, 1, 1, 0.5]}
    assert all(0 <= token < 30 for token in sample(rows, inputs(4, **cuts)).tokens.tolist())


def test_keys_of_64_bits(device: torch.device) -> None:
    keys = {"seed": [2**63 - 1, 2**64 - 1, -1, 0], "sample": [63, 0, 0, 2**40], "position": [2**31, 1, 1, 2**50]}
    kernel, reference = both(logits(4, 900, torch.float32, seed=10), device, **keys)
    assert kernel == reference


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs need a GPU")
def test_a_graph_reads_new_parameters(device: torch.device) -> None:
    rows = logits(5, 3000, torch.bfloat16, seed=11)
    given, table = rows.to(device), DeviceSampling(5, device)
    slots, positions = torch.arange(5, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    out = choose(given, table, slots, positions, greedy=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(given, table, slots, positions, greedy=False, out=out)
    table.set(range(5), [Parameters(temperature=1.0, top_p=0.9, seed=seed) for seed in range(5)])
    positions.fill_(17)
    graph.replay()
    expected = inputs(5, top_p=0.9, seed=list(range(5)), position=[17] * 5)
    assert out.tolist() == sample_reference(rows, expected).tokens.tolist()
