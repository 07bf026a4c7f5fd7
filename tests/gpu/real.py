"""Tests of memory and streams need a real GPU: no interpreter stands in for the driver."""

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch")

pipelines = [
    1,
    2,
    pytest.param(4, marks=pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")),
]
"""Stages to test with: four only where each has a card of its own."""
