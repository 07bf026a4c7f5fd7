"""A model of stages that execute steps and remember what every block holds, to catch a wrong read at once.

The KV of a token is stood for by a digest of the token and everything before it. A row may read a position only
if the block of the table holds exactly the digest of the request's true tokens there. The "model" samples a token
that is a function of the digest it reads, so that the right continuation of a prompt is known without a scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ppengine.protocol.steps import (
    TOKEN_GIVEN,
    TOKEN_ON_DEVICE,
    TOKEN_REGISTERED,
    LateMasks,
    MoveKind,
    Register,
    Sampled,
    Step,
)

VOCABULARY = 50


class WrongRead(AssertionError):
    """A row read KV that was not written for its tokens."""


def chain(parent: int, token: int) -> int:
    """Return the content of the position after `parent`."""
    return hash((parent, token))


def contents(tokens):
    """Return the content of each position of `tokens`."""
    found = [0]
    for token in tokens:
        found.append(chain(found[-1], token))
    return found[1:]


def next_token(content: int, seed: int, sample: int) -> int:
    """Return the token that the model samples after `content`; integers alone hash the same in every process."""
    return hash((content, seed, sample, 1)) % VOCABULARY


def continuation(prompt, count, *, seed, sample=0, stops=frozenset(), min_tokens=0):
    """Return the outputs of an undisturbed run."""
    content = 0
    for token in prompt:
        content = chain(content, token)
    outputs = []
    while len(outputs) < count:
        token = pick(content, seed, sample, len(outputs), stops, min_tokens)
        outputs.append(token)
        if token in stops:
            break
        content = chain(content, token)
    return outputs


def pick(content, seed, sample, produced, stops, min_tokens):
    """Return the sampled token; banned ones are stepped over before `min_tokens`."""
    token = next_token(content, seed, sample)
    while produced < min_tokens and token in stops:
        token = (token + 1) % VOCABULARY
    return token


@dataclass
class StageState:
    """One stage: blocks by id, each a list of contents; what it keeps of every slot."""

    mapped: int
    block_size: int
    device: dict[int, list] = field(default_factory=dict)
    step: int = 0
    """The step that it executes."""
    loads: dict[int, int] = field(default_factory=dict)
    """By block: the newest step that loads it, beside rows and copies of later ones."""
    host: dict[int, list] = field(default_factory=dict)
    registered: dict[int, Register] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)
    inputs: dict[int, dict[int, int]] = field(default_factory=dict)
    """By slot: input token at each position that a row has brought."""
    chains: dict[int, list[int]] = field(default_factory=dict)
    """By slot: content of each position up to some one, of its input tokens."""


class StageModel:
    """Stages that execute steps in order, each at its own pace, never before the stage in front of it."""

    def __init__(self, stages: int, num_blocks: int, block_size: int) -> None:
        self.stages = [StageState(num_blocks, block_size) for _ in range(stages)]
        self.steps: list[Step] = []
        self.done = [0] * stages
        self.sampled: dict[int, list[Sampled]] = {}
        self.on_device: dict[int, tuple[int, int]] = {}
        """By slot: (step, token) of the newest sample, as the token return edge brings it."""
        self.retired = 0
        self.retired_before: list[int] = []
        """By step: the newest one that had retired when it was sent."""
        self.reads = 0
        self.late: dict[int, LateMasks] = {}
        """Masks that came behind their steps, by step."""
        self.whole: dict[tuple[int, int], list] = {}
        """Content that a step must copy to a host slot, by both: that of the tokens whose digest the slot gets."""

    def send(self, step: Step) -> None:
        if step.number != len(self.steps) + 1:
            raise AssertionError(f"step {step.number} after {len(self.steps)}")
        self.steps.append(step)
        self.retired_before.append(self.retired)

    def can_run(self, stage: int) -> bool:
        """Whether the stage has a step whose inputs are there."""
        position = self.done[stage]
        if position >= len(self.steps) or (stage and self.done[stage - 1] <= position):
            return False
        if stage == len(self.stages) - 1 and self.steps[position].late and position + 1 not in self.late:
            return False
        last = self.done[-1]
        ahead = any(row.token == TOKEN_ON_DEVICE for row in self.steps[position].rows)
        if not ahead:
            return True
        slots = {row.slot for row in self.steps[position].rows if row.token == TOKEN_ON_DEVICE}
        return not any(row.slot in slots for step in self.steps[last:position] for row in step.rows if row.sample)

    def run(self, stage: int) -> None:
        """Let one stage execute its next step."""
        step = self.steps[self.done[stage]]
        state = self.stages[stage]
        state.step = step.number
        for slot in step.release:
            del state.registered[slot]
            state.tables.pop(slot, None)
            state.inputs.pop(slot, None)
            state.chains.pop(slot, None)
        for entry in step.register:
            if entry.slot in state.registered:
                raise AssertionError(f"slot {entry.slot} is registered twice")
            state.registered[entry.slot] = entry
            state.tables[entry.slot] = []
            state.inputs[entry.slot] = dict(enumerate(entry.tokens))
            state.chains[entry.slot] = []
        for slot, first, blocks in step.tables:
            table = state.tables[slot]
            if first > len(table):
                raise AssertionError(f"table of slot {slot} has {len(table)} entries, the delta begins at {first}")
            table[first:] = blocks
        if step.map_blocks is not None:
            state.mapped = step.map_blocks
            for block in [block for block in state.device if block >= step.map_blocks]:
                del state.device[block]
        for move in step.moves:
            self._move(state, move)
        self._give(state, step)
        sampled = [token for row in step.rows if (token := self._row(state, stage, step, row)) is not None]
        if stage == len(self.stages) - 1:
            self._check_masks(step)
            masked = {slot for mask in self._masks(step) for slot in mask.slots}
            for answer in sampled:
                if answer.slot in step.late and answer.slot not in masked:
                    answer.token = VOCABULARY  # The core must drop it.
            self.sampled[step.number] = sampled
            for answer in sampled:
                self.on_device[answer.slot] = (step.number, answer.token)
        self.done[stage] += 1

    def _masks(self, step: Step):
        return step.masks + (self.late[step.number].masks if step.late else [])

    def _check_masks(self, step: Step) -> None:
        """Check that each mask is that of the next token of its row: masks are named by the position of their token."""
        samples = {row.slot: row for row in step.rows if row.sample}
        prompts = {slot: entry.prompt_len for slot, entry in self.stages[-1].registered.items()}
        slots = [slot for mask in self._masks(step) for slot in mask.slots]
        if len(set(slots)) < len(slots) or not samples.keys() >= {*slots, *step.late}:
            raise AssertionError(f"step {step.number} has masks of {slots} and late {step.late}")
        for mask in self._masks(step):
            for slot in mask.slots:
                output = samples[slot].start + samples[slot].count - prompts[slot]
                if mask.tokens.words != b"%d" % output:
                    raise AssertionError(f"step {step.number} masks output {output} by the mask of {mask.tokens}")

    def _block(self, state: StageState, block: int) -> list:
        if not 0 < block < state.mapped:
            raise WrongRead(f"block {block} of {state.mapped} mapped ones is touched")
        return state.device.setdefault(block, [None] * state.block_size)

    def _of_row(self, state: StageState, block: int) -> list:
        if (load := state.loads.get(block, 0)) > self.retired_before[state.step - 1]:
            raise WrongRead(f"step {state.step} touches block {block}, which step {load} may still load")
        return self._block(state, block)

    def _move(self, state: StageState, move) -> None:
        # A copy waits for those before it that touch its blocks.
        if move.kind == MoveKind.DEVICE:
            self._block(state, move.dst)[:] = self._block(state, move.src)
        elif move.kind == MoveKind.OUT:
            state.host[move.dst] = list(self._block(state, move.src))
            if state.host[move.dst] != self.whole.get((state.step, move.dst), state.host[move.dst]):
                raise WrongRead(f"step {state.step} copies block {move.src} to the host, which holds something else")
        else:
            self._block(state, move.dst)[:] = state.host[move.src]
            if move.kind == MoveKind.LOAD:
                state.loads[move.dst] = state.step

    @staticmethod
    def _give(state: StageState, step: Step) -> None:
        rows = [row for row in step.rows if row.token == TOKEN_GIVEN]
        for row, tokens in zip(rows, step.given, strict=True):
            if len(tokens) != row.count:
                raise WrongRead(f"step {step.number} gives {len(tokens)} tokens to a row of {row.count}")
            for position, token in enumerate(tokens, row.start):
                if state.inputs[row.slot].setdefault(position, token) != token:
                    raise WrongRead(f"step {step.number} gives slot {row.slot} another token at {position}")

    def _row(self, state: StageState, stage: int, step: Step, row) -> Sampled | None:
        entry, table, inputs = state.registered[row.slot], state.tables[row.slot], state.inputs[row.slot]
        if row.token >= 0:
            known = inputs.setdefault(row.start, row.token)
            if known != row.token:
                raise WrongRead(f"step {step.number} gives {entry.request} another token at {row.start}")
        elif row.token == TOKEN_ON_DEVICE:
            token = self.on_device[row.slot][1]
            if inputs.get(row.start) != token:
                del state.chains[row.slot][row.start :]
            inputs[row.start] = token
        elif row.token == TOKEN_REGISTERED and row.start + row.count > len(entry.tokens):
            raise WrongRead(f"step {step.number} reads tokens of {entry.request} that were never registered")
        end, size, known = row.start + row.count, state.block_size, state.chains[row.slot]
        for position in range(len(known), end):
            known.append(chain(known[-1] if known else 0, inputs[position]))
        for first in range(0, end, size):
            block, held = self._of_row(state, table[first // size]), known[first : min(first + size, end)]
            read = min(max(row.start - first, 0), len(held))
            if block[:read] != held[:read]:
                wrong = next(place for place in range(read) if block[place] != held[place])
                raise WrongRead(
                    f"step {step.number} stage {stage}: {entry.request} reads block {table[first // size]} at "
                    f"position {first + wrong}, which holds something else"
                )
            block[read : len(held)] = held[read:]
        self.reads += end
        # What is beyond the row may be anything; a second row of the same step must not have been there before.
        if not row.sample:
            return None
        produced = row.start + row.count - entry.prompt_len
        stops = frozenset(entry.stop_token_ids)
        token = pick(known[end - 1] if end else 0, entry.seed, entry.sample, produced, stops, entry.min_tokens)
        return Sampled(row.slot, token)

    def lose(self, stage: int) -> None:
        """Lose one stage and start it anew: what was sent is dropped, and no stage keeps anything but its mapping."""
        for index, state in enumerate(self.stages):
            mapped = 1 if index == stage else state.mapped
            self.stages[index] = StageState(mapped, state.block_size)
        self.done = [len(self.steps)] * len(self.stages)
        self.retired = len(self.steps)
        self.on_device.clear()

    def retirable(self) -> int | None:
        """Return the number of the next step that every stage has executed, None if there is none."""
        return self.retired + 1 if min(self.done) > self.retired else None

    def drain(self) -> None:
        """Let all stages execute all that was sent."""
        while any(self.can_run(stage) for stage in range(len(self.stages))):
            for stage in range(len(self.stages)):
                if self.can_run(stage):
                    self.run(stage)
