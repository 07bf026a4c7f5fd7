"""A stage's record of each request, by slot, and how the rows of a step become attention metadata.

The core sends deltas; block tables live in one persistent matrix, so that a decode batch is a row
index into it. Work per token and per block is done by a compiled function, work per row by
comprehensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from msgspec.structs import astuple
from numpy.typing import NDArray
from ppkernels.batch import Batch
from ppkernels.cpu.rows import lay_out
from ppkernels.shared_prefixes import find_shared

from ppengine.protocol.steps import TOKEN_GIVEN, TOKEN_ON_DEVICE, TOKEN_REGISTERED, Register, Row

Ints = NDArray[np.int64]
_FIRST_SLOTS = 64
_ROW_NUMBERS = len(Row.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step's rows, ready for the model."""

    batch: Batch
    slots: Ints
    """[B]"""
    starts: Ints
    """[B]"""
    ends: Ints
    """[B]: position after the last one of each row, which a sampled token takes."""
    tokens: Ints
    """[B]: `Row.token`, markers included."""
    query_start: Ints
    """[B + 1]"""
    sampled: Ints
    """[R]: rows that sample."""

    @property
    def sampled_slots(self) -> Ints:
        """[R]"""
        return self.slots[self.sampled]

    @property
    def last_tokens(self) -> Ints:
        """[R]: for each sampled row the index, in the batch, of its last token."""
        return self.query_start[1:][self.sampled] - 1

    def by_token(self) -> Plan:
        """Return the step with a row for each token: each reads what the rows before it have written in the same step.

        `sampled` are the rows of the tokens that sample.
        """
        batch = self.batch
        owners = np.repeat(np.arange(len(self.slots)), np.diff(self.query_start))
        positions, count = batch.positions.numpy(), len(owners)
        starts = np.arange(count + 1)
        rows = Batch(
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            query_start=torch.from_numpy(starts),
            query_lens=[1] * count,
            seq_lens=torch.from_numpy(positions + 1),
            block_tables=torch.from_numpy(batch.block_tables.numpy()[owners]),
            decode_only=True,
            block_size=batch.block_size,
        )
        return Plan(rows, self.slots[owners], positions, positions + 1, self.tokens[owners], starts, self.last_tokens)

    def shared_prefixes(self, worth: int) -> Ints | None:
        """Return the prefixes that rows with one token share, as `SharedPrefixes` has them.

        None if that saves reading fewer than `worth` tokens.
        """
        tables = self.batch.block_tables.numpy()
        return find_shared(tables, self.ends, np.diff(self.query_start), self.batch.block_size, worth)


class BatchState:
    """Requests by slot. Slots are small integers that the core chooses; the tables grow with them."""

    def __init__(self, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.requests: dict[int, Register] = {}
        self.scored: set[int] = set()
        """Slots of requests whose prompt has log-probabilities: few, so that most steps need not look."""
        self._max_blocks = -(-max_model_len // block_size)
        self._tables: Ints = np.zeros((_FIRST_SLOTS, self._max_blocks), np.int64)
        self._tokens: dict[int, Ints] = {}
        self._given: list[list[int]] = []

    def release(self, slots: list[int]) -> None:
        """Forget requests."""
        for slot in slots:
            self._check(slot)
            del self.requests[slot], self._tokens[slot]
            self.scored.discard(slot)

    def register(self, registers: list[Register]) -> None:
        """Take requests in; one that is there already starts over."""
        for register in registers:
            slot = register.slot
            self.requests[slot] = register
            (self.scored.discard if register.prompt_logprobs < 0 else self.scored.add)(slot)
            self._tokens[slot] = np.asarray(register.tokens, np.int64)
            if slot >= len(self._tables):
                more = max(slot + 1, 2 * len(self._tables)) - len(self._tables)
                self._tables = np.vstack([self._tables, np.zeros((more, self._max_blocks), np.int64)])
            self._tables[slot] = 0

    def set_tables(self, tables: list[tuple[int, int, list[int]]]) -> None:
        """Apply block table entries (slot, first index, blocks)."""
        for slot, first, blocks in tables:
            self._check(slot)
            if first + len(blocks) > self._max_blocks:
                raise ValueError(f"slot {slot}: {first + len(blocks)} blocks, a table holds {self._max_blocks}")
            self._tables[slot, first : first + len(blocks)] = blocks

    def give(self, tokens: list[list[int]]) -> None:
        """Take the input tokens of the rows of the next plan that are marked TOKEN_GIVEN, in row order."""
        self._given = tokens

    def plan(self, rows: list[Row]) -> Plan:
        """Return metadata of a step's rows; positions and slots are rebuilt from this stage's own tables."""
        for row in rows:
            self._check(row.slot)
        numbers = chain.from_iterable(map(astuple, rows))
        table: Ints = np.fromiter(numbers, np.int64, _ROW_NUMBERS * len(rows)).reshape(-1, _ROW_NUMBERS)
        positions, slot_mapping, query_start, block_tables = lay_out(table, self._tables, self.block_size)
        slots, starts, counts, sample, tokens = table.T
        if len(block_tables) < len(rows):
            raise ValueError(f"a row needs {block_tables.shape[1]} blocks, a table holds {self._max_blocks}")
        ends = starts + counts
        batch = Batch(
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slot_mapping),
            query_start=torch.from_numpy(query_start),
            query_lens=counts.tolist(),
            seq_lens=torch.from_numpy(ends),
            block_tables=torch.from_numpy(block_tables),
            decode_only=len(positions) == len(rows),
            block_size=self.block_size,
        )
        return Plan(batch, slots, starts, ends, tokens, query_start, np.flatnonzero(sample))

    def _check(self, slot: int) -> None:
        if slot not in self.requests:
            raise ValueError(f"slot {slot} is not registered")

    def input_ids(self, plan: Plan, on_device: Ints) -> Ints:
        """Return the input tokens [T]. `on_device`: values for the rows marked TOKEN_ON_DEVICE, in row order."""
        ids: Ints = np.empty(plan.query_start[-1], np.int64)
        first = plan.query_start[:-1]
        known = plan.tokens >= 0
        ids[first[known]] = plan.tokens[known]
        ids[first[plan.tokens == TOKEN_ON_DEVICE]] = on_device
        for row in np.flatnonzero(plan.tokens == TOKEN_REGISTERED):
            begin, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
            slot, start = int(plan.slots[row]), int(plan.starts[row])
            registered = self._tokens[slot]
            if start + end - begin > len(registered):
                raise ValueError(
                    f"slot {slot}: tokens [{start}, {start + end - begin}) are wanted, {len(registered)} are registered"
                )
            ids[begin:end] = registered[start : start + end - begin]
        given = np.flatnonzero(plan.tokens == TOKEN_GIVEN)
        for row, tokens in zip(given, self._given, strict=True):
            begin, end = int(plan.query_start[row]), int(plan.query_start[row + 1])
            if len(tokens) != end - begin:
                raise ValueError(f"slot {plan.slots[row]}: {end - begin} tokens are wanted, {len(tokens)} are given")
            ids[begin:end] = tokens
        return ids
