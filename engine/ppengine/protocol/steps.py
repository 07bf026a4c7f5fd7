"""Numbered steps from the core to every stage, and what comes back. Integers only: stages rebuild metadata.

A stage executes steps strictly in order of `number`, and inside one step in this order:
`checks`, `release`, `register`, `tables`, `map_blocks`, `moves` (in list order), `rows` (forward, send or sample),
then acknowledges with `Retired`. Because every stage keeps this order, a block that a step moves or reuses was read
and written by all older steps before. Only what `map_blocks` begins may go on beside later steps, until `Mapped`.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

import msgspec

from ppengine.protocol.check_messages import LedgerPicture, ShadowAnswer, ShadowReady, StageFindings
from ppengine.protocol.prompt_scores import PromptScores
from ppengine.protocol.stage_lifecycle import (
    Drained,
    EdgeAddress,
    EdgeSought,
    NewGeneration,
    Shutdown,
    StageFailed,
    StageProgress,
    StageReady,
)
from ppengine.protocol.token_ids import TokenIds
from ppengine.protocol.token_mask import TokenMask

TOKEN_REGISTERED = -2
"""Row.token: the input tokens are the registered ones at `[start, start + count)`."""
TOKEN_GIVEN = -3
"""Row.token: the input tokens are the next list of `Step.given`."""
TOKEN_ON_DEVICE = -1
"""Row.token: the input is what the previous unretired step sampled for this slot; the core has not seen it."""


class MoveKind(IntEnum):
    """Direction of one block copy."""

    DEVICE = 0
    """Device block to device block (copy on write, compaction)."""
    OUT = 1
    """Device block to host block."""
    IN = 2
    """Host block to device block."""
    LOAD = 3
    """As `IN`, of a block that no row or copy uses before all stages have retired the step: rows go on beside it."""

    @property
    def from_host(self) -> bool:
        """Whether the source is a host block."""
        return self in (MoveKind.IN, MoveKind.LOAD)

    @property
    def to_host(self) -> bool:
        """Whether the target is a host block."""
        return self is MoveKind.OUT


class Check(IntFlag):
    """Live checks of a stage; see `Step.checks`."""

    LEDGER = 1
    """Declare hand-offs between streams and threads to the ledger."""
    STRICT = 2
    """Wait for every operation before the next is begun."""
    FINITE = 4
    """Look for values that are not finite where they leave the stage."""
    NO_CHECKSUM = 8
    """Send hidden states without a checksum; the one check that is on unless it is switched off."""


class Move(msgspec.Struct, array_like=True, frozen=True):
    """Copy one block, all layers of the stage."""

    kind: int
    src: int
    dst: int


class Adjustments(msgspec.Struct, array_like=True, frozen=True):
    """Changes of a request's logits before a token is chosen; fields as in `SamplingParams`."""

    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    bad_words_ids: list[list[int]] = []
    allowed_token_ids: list[int] | None = None


class Register(msgspec.Struct, array_like=True):
    """State of a request that every stage keeps under `slot` until it is released.

    `tokens` are prompt and outputs known so far; `prompt_len` separates them. `seed` is always set:
    the sampling stream is keyed by (seed, sample, position), position counted from the first prompt token.
    """

    slot: int
    request: str
    tokens: TokenIds
    prompt_len: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    sample: int
    min_tokens: int
    stop_token_ids: list[int]
    """Tokens (end of sequence among them) that must not be chosen before `min_tokens` outputs."""
    logprobs: int
    """-1: none."""
    adjustments: Adjustments | None = None
    """None: logits are taken as they are."""
    prompt_logprobs: int = -1
    """Number of the best tokens at each position of the prompt that are reported; -1: no position is."""


class Row(msgspec.Struct, array_like=True):
    """Work of one step for one request: tokens at positions `[start, start + count)`.

    `sample`: the last stage samples the token at position `start + count`. `token`: the input of a one-token row,
    or one of the markers above.
    """

    slot: int
    start: int
    count: int
    sample: bool
    token: int


class Mask(msgspec.Struct, array_like=True, frozen=True):
    """Tokens that may be sampled for some rows: most rows of a step have one of few masks."""

    slots: list[int]
    tokens: TokenMask


class Step(msgspec.Struct, tag="step", array_like=True):
    """One micro-batch, or memory work alone (`rows` empty). `number` counts from 1 without gaps."""

    generation: int
    number: int
    revision: int
    release: list[int] = []
    register: list[Register] = []
    tables: list[tuple[int, int, list[int]]] = []
    """(slot, first index, blocks): block table entries from that index on are these."""
    map_blocks: int | None = None
    """Begin to make exactly this many device blocks mapped, from block 0 on; `Mapped` says what came of it.

    Blocks that go cannot be reached from this step on, blocks that come not before all stages have answered; and no
    other change is sent before."""
    moves: list[Move] = []
    rows: list[Row] = []
    checks: int | None = None
    """From this step on exactly these checks (`Check`) are on, on every stage; None: as they are."""
    masks: list[Mask] = []
    """Those of the sampling rows of constrained requests, each once; to the last stage alone."""
    late: list[int] = []
    """Slots of such rows whose masks come behind the step, in `LateMasks`; only the last stage looks at them."""
    given: list[list[int]] = []
    """Input tokens of the rows marked `TOKEN_GIVEN`, in row order: outputs that no stage has sampled."""


class LateMasks(msgspec.Struct, tag="late-masks", array_like=True):
    """Masks of the `late` rows of step `number`, to the last stage alone: it samples when they are there.

    The sample of a late row without a mask is dropped: the core knows a better token, or computes it again.
    """

    generation: int
    number: int
    masks: list[Mask]


class Sampled(msgspec.Struct, array_like=True):
    """One token that the last stage chose. `logprobs`: chosen one first, then (token, value) pairs."""

    slot: int
    token: int
    logprob: float = 0.0
    top: list[tuple[int, float]] = []


class Retired(msgspec.Struct, tag="retired", array_like=True):
    """A place has finished a step, copies included. `sampled`: rank 0 of the last stage only, in row order."""

    generation: int
    number: int
    stage: int
    rank: int
    sampled: list[Sampled] = []
    error: str = ""
    """With `fatal`: why in one line."""
    fatal: bool = False
    """The stage cannot go on."""
    peer: int | None = None
    """With `fatal`: the stage whose end this one has noticed, and which is the cause."""
    peer_rank: int | None = None
    """Tensor rank of that peer; None: this rank's."""
    digest: int = 0
    """Last stage: checksum of its sampled tokens, which are the same on every rank. Rank 0 alone sends them."""
    prompts: list[PromptScores] = []
    """Rank 0 of the last stage only: log-probabilities of prompts that it has computed."""


class Mapped(msgspec.Struct, tag="mapped", array_like=True):
    """A stage has ended the change that step `number` began with `map_blocks`; the step itself may retire later."""

    generation: int
    number: int
    stage: int
    rank: int
    blocks: int
    """Mapped now; fewer than asked when the system refused."""
    error: str = ""
    """The error in one line."""


ToStage = Step | LateMasks | NewGeneration | Shutdown | EdgeAddress
FromStage = (
    Retired
    | Mapped
    | StageReady
    | StageProgress
    | StageFailed
    | Drained
    | EdgeAddress
    | EdgeSought
    | StageFindings
    | LedgerPicture
    | ShadowReady
    | ShadowAnswer
)
