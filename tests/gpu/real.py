"""Tests of memory and streams need a real GPU: no interpreter stands in for the driver."""

import pytest
import torch

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch")
