"""Block arithmetic against the figures of real logs: OPT-6.7B in float16 on cards of 48,677 MiB."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ppengine.common.memory_arithmetic import (
    StageBudget,
    block_bytes,
    fewest_blocks,
    plan_memory,
    shortage,
    utilization_needed,
)
from ppengine.core.scheduler.block_tables import BlockTables
from ppengine.core.scheduler.step_log import StepLog

MIB = 1 << 20
GIB = 1 << 30
TOTAL = 48_677 * MIB
PEAK_WHOLE = 13_438 * MIB
SHARDED_PEAK = {1: 13_438 * MIB, 2: 7_292 * MIB, 4: 4_220 * MIB}


def opt_6_7b(layers=32, tensor=1):
    return block_bytes(
        block_size=16, layers=layers, kv_heads=32, head_dim=128, dtype_bytes=2, tensor_parallel_size=tensor
    )


def blocks(pipeline, utilization, peak):
    size = opt_6_7b(32 // pipeline)
    return plan_memory([StageBudget(TOTAL, peak, size)] * pipeline, utilization).blocks


def test_block_of_opt_6_7b_is_8_mib():
    assert opt_6_7b() == 8 * MIB
    assert opt_6_7b() // 16 == 512 * 1024


@pytest.mark.parametrize(
    ("pipeline", "utilization", "expected"), [(1, 0.9, 3796), (2, 0.9, 7592), (4, 0.9, 15185), (4, 0.5, 5450)]
)
def test_logged_blocks_with_unsharded_weights(pipeline, utilization, expected):
    assert blocks(pipeline, utilization, PEAK_WHOLE) == expected


@pytest.mark.parametrize(
    ("pipeline", "utilization", "expected"),
    [(1, 0.9, 3796), (2, 0.9, 9129), (4, 0.9, 19794), (4, 0.3, 5191), (4, 0.4, 7625), (1, 0.3, 145), (1, 0.4, 754)],
)
def test_blocks_with_sharded_weights(pipeline, utilization, expected):
    assert blocks(pipeline, utilization, SHARDED_PEAK[pipeline]) == expected


def test_tensor_parallel_blocks():
    # The peak is solved from the log: 3,926 and 3,927 MiB are the whole ones that give it.
    assert opt_6_7b(tensor=4) == 2 * MIB
    assert plan_memory([StageBudget(TOTAL, 3_926 * MIB, opt_6_7b(tensor=4))], 0.9).blocks == 19941


@pytest.mark.parametrize(("pipeline", "expected"), [(1, 512), (2, 1024), (4, 2048)])
def test_host_blocks_of_4_gib_a_stage(pipeline, expected):
    assert 4 * GIB // opt_6_7b(32 // pipeline) == expected


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "expected"),
    [
        pytest.param(32, 32, 80, 819, id="OPT-2.7B"),
        pytest.param(40, 40, 128, 327, id="OPT-13B and LLaMA-13B"),
        pytest.param(48, 56, 128, 195, id="OPT-30B"),
        pytest.param(32, 8, 128, 2048, id="Mistral-7B and Llama-3-8B"),
        pytest.param(32, 32, 128, 512, id="LLaMA-7B"),
    ],
)
def test_host_blocks_tell_models_apart(layers, kv_heads, head_dim, expected):
    size = block_bytes(block_size=16, layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype_bytes=2)
    assert 4 * GIB // size == expected


def test_llama_7b_has_the_host_blocks_of_opt_but_not_its_device_blocks():
    # 12,852 MiB of weights and the same 738 MiB of activations.
    assert plan_memory([StageBudget(TOTAL, (12_852 + 738) * MIB, opt_6_7b())], 0.9).blocks == 3777


@pytest.mark.parametrize(("count", "expected"), [(3796, 37), (15185, 151), (19794, 197)])
def test_watermark(count, expected):
    tables = BlockTables(
        StepLog(), block_size=16, num_blocks=count, num_host_blocks=0, watermark=0.01, prefix_caching=False
    )
    assert tables.watermark == expected


def test_minimum_is_taken_in_blocks_not_in_bytes():
    # Stage 0 has more bytes left, and fewer blocks, because it has more layers.
    plan = plan_memory([StageBudget(1000, 200, 100), StageBudget(1000, 500, 25)], 1.0)
    assert plan.capacities == (8, 20)
    assert (plan.blocks, plan.binding) == (8, 0)


def test_quantum_is_the_least_common_multiple():
    plan = plan_memory([StageBudget(10_000, 0, 10, quantum=4), StageBudget(10_000, 0, 11, quantum=6)], 1.0)
    assert (plan.blocks, plan.quantum, plan.mapped, plan.binding) == (909, 12, 900, 1)


def test_reserved_addresses_bound_the_capacity():
    assert StageBudget(1000, 0, 10, reserved=30).capacity(1.0) == 30


def test_no_room_for_the_peak_is_no_blocks():
    assert StageBudget(1000, 900, 10).capacity(0.5) == 0


def test_decimal_utilization_is_exact():
    # In binary 0.29 x 100 is 28.999999999999996.
    assert StageBudget(100, 0, 1).capacity(0.29) == 29


def test_shortage_names_stage_bytes_and_what_would_fit():
    stages = [StageBudget(1000, 100, 10), StageBudget(1000, 250, 10)]
    found = shortage(stages, 0.30, blocks=12)
    assert (found.name, found.short_bytes, found.utilization) == ("stage 1", 70, 0.37)
    assert found.text == "stage 1 is short by 0.1 KiB; at least 0.37 would fit"
    assert shortage(stages, 0.37, blocks=12) is None


def test_shortage_that_no_utilization_cures():
    found = shortage([StageBudget(1000, 900, 50)], 0.5, blocks=3)
    assert found.utilization is None
    assert "no utilization would fit" in found.text


def test_fewest_blocks_serve_one_longest_request():
    assert fewest_blocks(2048, 16) == 129
    assert fewest_blocks(2049, 16) == 130


@given(
    st.lists(
        st.builds(
            StageBudget, st.integers(10_000, 10**6), st.integers(0, 5000), st.integers(1, 3000), st.integers(1, 8)
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 200),
)
def test_utilization_needed_is_the_smallest_that_fits(stages, count):
    needed = utilization_needed(stages, count)
    if needed is None:
        assert plan_memory(stages, 1.0).mapped < count
    else:
        assert plan_memory(stages, needed).mapped >= count
        below = round(needed - 0.01, 2)
        assert below <= 0 or plan_memory(stages, below).mapped < count
