"""Rotary embedding of a checkpoint, read from its config.json."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from ppengine.checkpoint.config_json import FieldError, count, number, typed
from ppengine.common.profile_sections import MODEL_LEN_MOST
from ppengine.protocol.error_text import shown

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_FACTOR_MOST = 1e6


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding; which fields count depends on `kind`, one of `ROPE_KINDS`."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Cosines and sines are multiplied by this (yarn)."""
    width: int = 0
    """Dimensions of a head that turn, the first ones; 0: all of them."""
    interleaved: bool = False
    """Neighbouring dimensions are a pair (GLM); otherwise dimension i and i + half of the head are."""

    @property
    def stretched(self) -> int:
        """Positions that yarn makes of those that the model was trained for; 0 for other kinds."""
        return int(self.factor * self.original_max_position) if self.kind == "yarn" else 0


def read_rope(data: dict[str, Any], max_position: int, head_dim: int, *, glm: bool) -> RopeSpec:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before). Raises FieldError."""
    if head_dim % 2:
        raise FieldError(f"head_dim is {head_dim}; it must be even: rotary embeddings turn pairs")
    given = _given(data)
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind not in ROPE_KINDS or any(isinstance(value, dict) for value in given.values()):
        raise FieldError(f"rope type {shown(kind)} is not supported; these work: {', '.join(ROPE_KINDS)}")
    both = {**data, **given}
    width = _width(both, head_dim) if glm else 0
    if not glm and number(both, "partial_rotary_factor", 1.0, 1) != 1.0:
        raise FieldError("partial_rotary_factor is not supported; it must be 1")
    theta = number(both, "rope_theta", 10_000.0, 1e12, least=2)
    if kind == "default":
        return RopeSpec(theta=theta, width=width, interleaved=glm)
    original = count({**given, **data}, "original_max_position_embeddings", MODEL_LEN_MOST, default=max_position)
    if given.get("factor") is None and kind != "yarn":
        raise FieldError(f"rope type {kind} needs a factor")
    factor = number({"rope factor": given.get("factor")}, "rope factor", max_position / original, _FACTOR_MOST)
    if factor == 0:
        raise FieldError("rope factor is 0; it must be above 0")
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
    rope = RopeSpec(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_position=original,
        attention_factor=_yarn_attention(given, factor) if kind == "yarn" else 1.0,
        width=width,
        interleaved=glm,
        truncate=given.get("truncate") is not False,
        **{name: number(given, name, 0.0, _FACTOR_MOST) for name in optional if given.get(name)},
    )
    if kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise FieldError(f"low_freq_factor is {rope.low_freq_factor:g}; it must be below {rope.high_freq_factor:g}")
    if rope.stretched > MODEL_LEN_MOST:
        raise FieldError(f"rope factor {factor:g} makes {rope.stretched} positions; at most {MODEL_LEN_MOST}")
    return rope


def _given(data: dict[str, Any]) -> dict[str, Any]:
    """Return the object with the parameters. Raises FieldError for two that differ: one of them would be ignored."""
    new, old = (typed(data, key, dict, dict[str, Any]()) for key in ("rope_parameters", "rope_scaling"))
    if new and any(new.get(key) != value for key, value in old.items()):
        raise FieldError("rope_parameters and rope_scaling differ; write all into rope_parameters, remove the other")
    return new or old


def _width(both: dict[str, Any], head_dim: int) -> int:
    """Return the dimensions of a head that turn; GLM's configs leave the factor out where it is a half."""
    factor = number(both, "partial_rotary_factor", 0.5, 1)
    width = int(head_dim * factor)
    if width < 2 or width % 2:
        raise FieldError(
            f"partial_rotary_factor {factor:g} turns {width} of the {head_dim} dimensions of a head; "
            f"it must turn an even number, at least 2"
        )
    return width


def _yarn_attention(given: dict[str, Any], factor: float) -> float:
    """Return the scale of cosines and sines (YaRN, arXiv 2309.00071, equation 22; `mscale` as DeepSeek writes it)."""
    if given.get("attention_factor") is not None:
        return number(given, "attention_factor", 1.0, _FACTOR_MOST)

    def scale(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    above, below = (number(given, key, 0.0, _FACTOR_MOST) for key in ("mscale", "mscale_all_dim"))
    return scale(above) / scale(below) if above and below else scale(1.0)
