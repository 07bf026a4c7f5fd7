"""Attention metadata is rebuilt from deltas: against a plain computation, and with what must not be reachable."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from forks import fork
from ppengine.protocol.steps import TOKEN_GIVEN, TOKEN_ON_DEVICE, TOKEN_REGISTERED, Register, Row
from ppengine.stage.batch_state import BatchState

SIZE = 16


def register(slot: int, tokens: list[int]) -> Register:
    return Register(slot, f"r{slot}", tokens, len(tokens), 0.0, 1.0, 0, 0, 0, 0, [], -1)


def test_plan_equals_a_plain_computation() -> None:
    draw = random.Random(3)
    state = BatchState(256, SIZE)
    tables = {slot: draw.sample(range(1, 500), 16) for slot in (0, 1, 5, 200)}
    state.register([register(slot, [slot] * 256) for slot in tables])
    state.set_tables([(slot, 0, blocks) for slot, blocks in tables.items()])
    for _ in range(50):
        slots = draw.sample(sorted(tables), draw.randint(1, 4))
        most = draw.choice((1, 60))
        rows = [Row(slot, draw.randrange(190), draw.randint(1, most), draw.random() < 0.5, -2) for slot in slots]
        plan = state.plan(rows)
        positions = [position for row in rows for position in range(row.start, row.start + row.count)]
        mapped = [
            tables[row.slot][position // SIZE] * SIZE + position % SIZE
            for row in rows
            for position in range(row.start, row.start + row.count)
        ]
        assert plan.batch.positions.tolist() == positions
        assert plan.batch.slot_mapping.tolist() == mapped
        assert plan.batch.query_lens == [row.count for row in rows]
        assert plan.batch.seq_lens.tolist() == [row.start + row.count for row in rows]
        assert plan.batch.decode_only == all(row.count == 1 for row in rows)
        assert plan.query_start.tolist() == np.cumsum([0, *plan.batch.query_lens]).tolist()
        assert plan.sampled_slots.tolist() == [row.slot for row in rows if row.sample]
        assert [positions[index] for index in plan.last_tokens] == [r.start + r.count - 1 for r in rows if r.sample]


def test_stale_table_entries_point_at_the_null_block() -> None:
    state = BatchState(256, SIZE)
    state.register([register(0, [1] * 40), register(1, [1] * 100)])
    state.set_tables([(0, 0, [11, 12, 13]), (1, 0, [21, 22, 23, 24, 25, 26, 27])])
    # Slot 0 begins anew with less; slot 1 has one block moved.
    state.register([register(0, [1] * 10)])
    state.set_tables([(0, 0, [31]), (1, 2, [9])])
    plan = state.plan([Row(0, 9, 1, True, 5), Row(1, 99, 1, True, 5)])
    assert plan.batch.block_tables.tolist() == [[31, 0, 0, 0, 0, 0, 0], [21, 22, 9, 24, 25, 26, 27]]
    assert state.plan([Row(1, 40, 1, True, 5)]).batch.block_tables.tolist() == [[21, 22, 9]]


def test_input_tokens_come_from_four_places() -> None:
    state = BatchState(64, SIZE)
    state.register([register(0, [10, 11, 12, 13]), register(1, [20]), register(2, [30]), register(3, [40])])
    rows = [
        Row(1, 1, 1, True, TOKEN_ON_DEVICE), Row(0, 1, 3, True, TOKEN_REGISTERED),
        Row(2, 1, 1, True, 77), Row(3, 1, 2, True, TOKEN_GIVEN),
    ]  # fmt: skip
    state.give([[41, 42]])
    assert state.input_ids(state.plan(rows), np.array([5])).tolist() == [5, 11, 12, 13, 77, 41, 42]
    state.give([[41, 42, 43]])
    with pytest.raises(ValueError, match="slot 3: 2 tokens are wanted, 3 are given"):
        state.input_ids(state.plan(rows), np.array([5]))
    state.give([])
    beyond = state.plan([Row(0, 2, 3, True, TOKEN_REGISTERED)])
    with pytest.raises(ValueError, match=r"slot 0: tokens \[2, 5\) are wanted, 4 are registered"):
        state.input_ids(beyond, np.array([], np.int64))


def test_what_the_core_must_not_send_is_refused() -> None:
    state = BatchState(64, SIZE)
    state.register([register(0, [1])])
    with pytest.raises(ValueError, match="slot 0: 5 blocks, a table holds 4"):
        state.set_tables([(0, 3, [7, 8])])
    with pytest.raises(ValueError, match="slot 3 is not registered"):
        state.release([3])
    with pytest.raises(ValueError, match="slot 3 is not registered"):
        state.set_tables([(3, 0, [7])])
    state.release([0])
    with pytest.raises(ValueError, match="slot 0 is not registered"):
        state.plan([Row(0, 0, 1, True, 1)])


def main() -> None:
    """Print, in a process forked from a fork server, the modules that the first plan of a stage loads."""
    before = set(sys.modules)
    state = BatchState(64, SIZE)
    state.register([register(0, [1])])
    state.plan([Row(0, 0, 1, True, 1)])
    print(sorted(set(sys.modules) - before), flush=True)


def test_the_first_step_of_a_stage_loads_nothing_that_the_fork_server_could(tmp_path: Path) -> None:
    child = fork("test_stage_batch_state", [], tmp_path / "log")
    assert child.wait(30) == 0
    assert (tmp_path / "log").read_text().splitlines()[-1] == "[]"
    child.close()
