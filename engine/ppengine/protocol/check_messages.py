"""Messages of the live checks: findings of the stages, and the work of the reference behind `shadow`."""

from __future__ import annotations

import msgspec

from ppengine.protocol.reports import Finding, StageLedger


class StageFindings(msgspec.Struct, tag="findings", array_like=True, kw_only=True):
    """All that one check of a stage has found, sent by the control thread when it changes.

    `steps`: for each finding the step in which it was first seen, 0 where that is not known.
    """

    generation: int
    stage: int
    rank: int
    check: int
    findings: list[Finding]
    steps: list[int]


class LedgerPicture(msgspec.Struct, tag="ledger", array_like=True, kw_only=True):
    """The ledger of a stage, sent by the control thread once a second while it is on."""

    generation: int
    ledger: StageLedger


class ShadowTask(msgspec.Struct, tag="shadow-task", array_like=True, kw_only=True):
    """To the reference: repeat a greedy request from its tokens, and compare the outputs from `first` on."""

    nonce: int
    step: int
    request: str
    prompt_ids: list[int]
    output_ids: list[int]
    first: int
    min_tokens: int
    stop_token_ids: list[int]


class ShadowReady(msgspec.Struct, tag="shadow-ready", array_like=True, kw_only=True):
    """The reference has loaded the checkpoint."""

    weights_bytes: int


class ShadowAnswer(msgspec.Struct, tag="shadow-answer", array_like=True, kw_only=True):
    """Result of a task. `difference`: the first token that the same-tokens rule does not allow."""

    nonce: int
    compared: int
    difference: Finding | None = None
