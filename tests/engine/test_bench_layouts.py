"""`ppconsole plan`: bytes and blocks as the engine counts them, layouts that are refused, and the estimate by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from ppengine.bench.costs import (
    Costs,
    Curve,
    GivenRates,
    HostTimes,
    Load,
    Pipe,
    ShareTimes,
    Work,
    costs_of_rates,
    micro_batch,
    speed_of,
)
from ppengine.bench.layouts import Layout, Machine, all_layouts, choose, estimate, lay_out
from ppengine.bench.share_sizes import share_bytes
from ppengine.checkpoint.model_shard import refusal, shard_of
from ppengine.checkpoint.model_spec import ModelSpec, read_spec
from ppengine.common.config import Profile
from ppengine.common.memory_arithmetic import StageBudget, plan_memory
from ppengine.common.profile_sections import MemoryConfig, ModelConfig, SchedulerConfig
from ppengine.models import build_stage
from ppengine.stage.backends.base import KvShape
from ppengine.stage.rank_group import LoneRank
from thread_group import make_spec

GIB = 1 << 30
LOAD = Load(requests=16, input=40, output=8)


@pytest.fixture(scope="module", params=FAMILIES)
def family_spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tmp_path_factory.mktemp("model") / request.param
    return read_spec(make_checkpoint(folder, request.param))


def make_profile(**fields: int) -> Profile:
    """A profile whose limits are `fields`."""
    memory = {key: value for key, value in fields.items() if key in MemoryConfig.__struct_fields__}
    scheduler = {key: value for key, value in fields.items() if key in SchedulerConfig.__struct_fields__}
    return Profile(
        name="planned", model=ModelConfig(path="/none"), memory=MemoryConfig(**memory),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(**{"max_num_batched_tokens": 64, **scheduler}),  # type: ignore[arg-type]
    )  # fmt: skip


def cards(places: int, memory: int) -> Machine:
    return Machine(places=places, cards=False, memory=memory, shared=False)


def laid_out(spec: ModelSpec, machine: Machine, load: Load = LOAD, profile: Profile | None = None) -> list[Layout]:
    profile = profile or make_profile()
    return [lay_out(spec, profile, machine, 4, load, *each) for each in all_layouts(machine.places)]


# --- bytes --------------------------------------------------------------------------------------------------


def test_weights_are_those_of_the_stages_that_the_engine_builds(family_spec: ModelSpec) -> None:
    """Every family, tied and not, with ranks of uneven shares, on stages with and without the ends."""
    for tied in (False, True):
        spec = msgspec.structs.replace(family_spec, tie_word_embeddings=tied, vocab_size=129)
        for size in (1, 2, 4):
            for rank in range(size):
                for first, last in ((True, True), (True, False), (False, False), (False, True)):
                    shard = shard_of(spec, rank, size)
                    stage = build_stage(
                        spec, (1, 3), first, last, torch.float32, shard=shard, group=LoneRank(rank, size)
                    )
                    assert share_bytes(spec, shard, 2, 4, first=first, last=last) == stage.weights_bytes


# --- room ---------------------------------------------------------------------------------------------------


@given(
    memory=st.integers(1 << 17, 1 << 22), heads=st.sampled_from([4, 8, 12]), kv=st.sampled_from([1, 2, 4]),
    vocab=st.integers(16, 300), layers=st.integers(1, 6), block_size=st.sampled_from([8, 16]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_blocks_are_those_of_the_engines_arithmetic(
    memory: int, heads: int, kv: int, vocab: int, layers: int, block_size: int
) -> None:
    spec = msgspec.structs.replace(
        make_spec(num_heads=heads, num_kv_heads=kv, vocab_size=vocab), num_layers=layers, max_position=64
    )
    profile = make_profile(block_size=block_size)
    for made in laid_out(spec, cards(6, memory), profile=profile):
        if made.refusal:
            continue
        budgets = []
        for stage, count in enumerate(made.layers):
            shape = KvShape(
                count, block_size, shard_of(spec, 0, made.tensor).num_kv_heads, spec.head_dim, torch.float32
            )
            assert shape.block_bytes == made.block_bytes[stage]
            budgets.append(StageBudget(memory, made.peak_bytes[stage], shape.block_bytes, shape.quantum_blocks()))
        assert made.blocks == plan_memory(budgets, 0.9).mapped
        a_request = -(-(LOAD.input + LOAD.output) // block_size)
        assert 0 < made.at_once * a_request < made.blocks, "the null block is no request's"


@given(
    memory=st.integers(1 << 16, 1 << 22),
    more=st.integers(0, 1 << 20),
    places=st.integers(1, 6),
    kv=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=60, deadline=None)
def test_more_memory_and_more_cards_never_leave_less_room(memory: int, more: int, places: int, kv: int) -> None:
    spec = msgspec.structs.replace(make_spec(num_heads=12, num_kv_heads=kv), num_layers=6)
    small, large = (laid_out(spec, cards(places, size)) for size in (memory, memory + more))
    for before, after in zip(small, large, strict=True):
        assert after.blocks >= before.blocks and after.at_once >= before.at_once
        assert not (after.refusal and not before.refusal)
    wider = laid_out(spec, cards(places + 1, memory))
    assert max(each.at_once for each in wider) >= max(each.at_once for each in small)
    room = {(each.pipeline, each.tensor): each for each in wider}
    for each in wider:
        deeper = room.get((each.pipeline + 1, each.tensor))
        if deeper is not None and each.weights_bytes and deeper.weights_bytes:
            assert max(deeper.weights_bytes) <= max(each.weights_bytes), "a stage more, and no place has more weights"


def test_each_layout_that_cannot_be_says_why() -> None:
    spec = make_spec(num_heads=12, num_kv_heads=4)
    made = {each.name: each for each in laid_out(spec, cards(3, 1 << 20))}
    assert list(made) == ["1 x 1", "1 x 2", "1 x 3", "2 x 1", "3 x 1"]
    assert made["1 x 3"].refusal == refusal(spec, 3)
    assert made["2 x 1"].refusal == "parallel.pipeline is 2; the model has 1 layers, so at most that many"
    assert not made["1 x 1"].refusal and not made["1 x 2"].refusal
    (tight,) = laid_out(spec, cards(1, 30_000))
    # One request of 64 tokens has 4 blocks, the null block comes on top, and pages are filled by 4.
    short = tight.peak_bytes[0] + 8 * tight.block_bytes[0] - 27_000
    assert tight.refusal.startswith("stage 0 is short by ") and f"({short} bytes)" in tight.refusal
    assert "for one request of 64 tokens" in tight.refusal


def test_processes_of_a_host_share_its_memory_and_its_cores() -> None:
    spec = msgspec.structs.replace(make_spec(num_heads=4), num_layers=4)
    shared = Machine(places=4, cards=False, memory=4 << 20, shared=True, cores=4)
    made = {each.name: each for each in laid_out(spec, shared)}
    assert [made[name].threads for name in ("1 x 1", "2 x 1", "2 x 2", "3 x 1")] == [4, 2, 1, 1]
    own = {each.name: each for each in laid_out(spec, cards(4, 1 << 20))}
    assert made["2 x 2"].blocks == own["2 x 2"].blocks


# --- time ---------------------------------------------------------------------------------------------------


def test_a_curve_is_straight_between_its_points_and_goes_on() -> None:
    curve = Curve([(1.0, 2.0), (3.0, 4.0), (5.0, 10.0)])
    assert [curve.at(size) for size in (0, 1, 2, 3, 4, 5, 7)] == [2, 2, 3, 4, 7, 10, 16]
    assert Curve([(4.0, 1.0)]).at(9) == 1
    assert Curve([(0.0, 1.0), (1.0, 0.5)]).at(9) == 0, "never less than nothing"


def made_costs(cores: int, host: HostTimes = HostTimes()) -> Costs:  # noqa: B008
    """A layer of 1 s, half of it for each of two ranks; 0.1 s a hop, 0.01 s an all-reduce; 2 s for the head."""

    def flat(seconds: float) -> Curve:
        return Curve([(0.0, seconds)])

    shares = [
        ShareTimes(
            tensor=size,
            threads=1,
            busy=False,
            layer=flat(1 / size),
            context_s=0.0,
            pair_s=0.0,
            head=flat(2 / size),
            embed=flat(0),
        )
        for size in (1, 2)
    ]
    return Costs(
        device="none", cores=cores, item_bytes=4, shares=shares, hop=flat(0.1), reduce={2: flat(0.01)}, host=host
    )


def pipe(tensor: int, layers: list[int], **fields: int) -> Pipe:
    return Pipe(
        **{"tensor": tensor, "layers": layers, "threads": 1, "ahead": True, "chunk": 64, "at_once": 99, **fields}
    )  # type: ignore[arg-type]


def test_a_micro_batch_by_hand() -> None:
    spec, work = make_spec(), Work(tokens=4, rows=4, context=0, decode=True)
    each = micro_batch(spec, pipe(1, [3, 1]), made_costs(2), work, 2)
    assert dataclasses.astuple(Times(each.latency, each.longest, each.cpu)) == pytest.approx((3 + 3 + 0.2, 3, 6))
    ranks = micro_batch(spec, pipe(2, [4]), made_costs(2), work, 1)
    shared = (2 * 4 + 1 + 1) * 0.01
    assert (ranks.latency, ranks.cpu) == pytest.approx((2 + 1 + shared, 2 * 3 + shared))
    crowded = micro_batch(spec, pipe(2, [4]), made_costs(1, HostTimes(step_s=1.0, core_step_s=0.5)), work, 1)
    assert crowded.latency == pytest.approx(2 * 4 + shared + 0.5), (
        "two ranks take turns on one core, and so does the core"
    )
    on_cards = micro_batch(spec, pipe(1, [3, 1]), made_costs(0), work, 2)
    assert on_cards.cpu == 0


@dataclasses.dataclass
class Times:
    latency: float
    longest: float
    cpu: float


def test_the_time_of_a_workload_by_hand() -> None:
    spec, load = make_spec(), Load(requests=8, input=16, output=5)
    # Two chunks of 64 tokens on two stages of 3 s: 6.2 s, and another one behind it. Then 4 decodes of two halves.
    made = speed_of(spec, pipe(1, [3, 1]), made_costs(0), load).seconds
    assert made == pytest.approx(6.2 + 6.2 / 2 + 4 * 6.2)
    few = speed_of(spec, pipe(1, [3, 1], at_once=2), made_costs(0), load).seconds
    assert few == pytest.approx(6.2 + 6.2 / 2 + 4 * 4 * 6.2), "a quarter of the requests at a time"
    single = speed_of(spec, pipe(1, [3, 1]), made_costs(0), msgspec.structs.replace(load, requests=1))
    assert single.seconds == pytest.approx(6.2 + 4 * 6.2) and single.cpu == 0
    shared = speed_of(spec, pipe(1, [3, 1]), made_costs(1), load)
    assert shared.cpu == pytest.approx(2 * 6 + 4 * 2 * 6) == shared.seconds - 0.2, "two stages on one core"


def test_the_costs_of_given_rates_are_bytes_and_products() -> None:
    spec = make_spec(num_heads=12, num_kv_heads=4)
    rates = GivenRates(gbps=1.0, tflops=1.0, hop_us=5, reduce_us=7, link_gbps=0.5, step_us=3, layer_us=11)
    costs = costs_of_rates(spec, rates, 2, [1, 2, 4], "a card")
    whole, half, _ = costs.shares
    layer = share_bytes(spec, shard_of(spec), 1, 2, first=False, last=False)
    assert whole.layer.at(1) == pytest.approx(3e-6 + layer / 1e9 + layer / 1e12)
    assert whole.layer.at(1000) == pytest.approx((3 + 11) * 1e-6 + layer / 1e9 + 1000 * layer / 1e12)
    assert whole.context_s == pytest.approx(2 * 4 * 2 * 2 / 1e9) and half.context_s == whole.context_s / 2
    assert costs.hop.at(0) == pytest.approx(5e-6) and costs.reduce[2].at(1000) == pytest.approx(7e-6 + 2e-6)
    assert costs.reduce[4].at(1000) == pytest.approx(11e-6 + 1.5 * 2e-6) and 1 not in costs.reduce
    assert costs.host.step_s == 0 and costs.cores == 0


def test_the_fastest_layout_is_taken_and_of_equals_the_smallest() -> None:
    made = [
        Layout(pipeline=1, tensor=1, blocks=9, at_once=1, tokens_s=99.0, single_tokens_s=20.0),
        Layout(pipeline=2, tensor=1, blocks=9, at_once=1, tokens_s=100.0, single_tokens_s=10.0),
        Layout(pipeline=1, tensor=2, blocks=9, at_once=1, tokens_s=50.0, single_tokens_s=30.0),
        Layout(pipeline=2, tensor=2, refusal="no"),
    ]
    take, why = choose(made)
    assert take is made[0]
    assert why == (
        "99 tokens/s expected, 0.99 of 2 x 1 with 1 places fewer; for one request alone 1 x 2 is 1.50 as fast"
    )
    made[1].tokens_s = 150.0
    assert choose(made)[0] is made[1]
    assert choose(made[3:]) == (None, "no layout fits")
    assert choose(made[1:2]) == (made[1], "the only layout that fits: 150 tokens/s expected")


def test_an_estimate_of_a_model_on_cards(tmp_path: Path) -> None:
    """More cards are faster for many requests; ranks alone make one request faster."""
    spec = msgspec.structs.replace(
        make_spec(num_heads=32, num_kv_heads=8, intermediate_size=14_336, vocab_size=128_256), num_layers=32,
        hidden_size=4096, head_dim=128, max_position=8192,
    )  # fmt: skip
    machine = Machine(places=4, cards=True, memory=139 * GIB, shared=False, granule=2 << 20)
    profile, load = (
        make_profile(max_num_batched_tokens=4096, max_num_seqs=512),
        Load(requests=512, input=288, output=256),
    )
    layouts = {(p, t): lay_out(spec, profile, machine, 2, load, p, t) for p, t in all_layouts(4) if t != 3}
    rates = GivenRates(gbps=4277, tflops=700, hop_us=20, reduce_us=5.3, link_gbps=200, step_us=200, layer_us=30)
    costs = costs_of_rates(spec, rates, 2, [1, 2, 4], "cards")
    for each in layouts.values():
        estimate(each, spec, profile, costs, load)
    speeds = {key: each.tokens_s or 0.0 for key, each in layouts.items()}
    slow = costs_of_rates(spec, msgspec.structs.replace(rates, gbps=1e-4, tflops=1e-5), 2, [1, 2, 4], "slow cards")
    for each in layouts.values():
        estimate(each, spec, profile, slow, load)
    best = max(layouts.values(), key=lambda each: each.tokens_s or 0.0)
    assert 0.0 < (best.tokens_s or 0.0) < 0.05
    assert choose(list(layouts.values()))[0] is best
    for each in layouts.values():
        estimate(each, spec, profile, costs, load)
    singles = {key: each.single_tokens_s or 0.0 for key, each in layouts.items()}
    assert speeds[1, 1] < speeds[2, 1] < speeds[4, 1]
    assert singles[1, 1] < singles[1, 2] < singles[1, 4] and singles[2, 1] < singles[1, 1]
