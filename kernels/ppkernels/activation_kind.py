"""The activations that an MLP can have."""

from enum import Enum


class Activation(Enum):
    """The function applied to the first product of an MLP."""

    RELU = "relu"
    GELU = "gelu"
    SILU_AND_MUL = "silu_and_mul"
    """Takes [gate, up] side by side and returns half the width."""
