"""Tests that need an NVIDIA GPU; everywhere else each is skipped, with the reason."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu" in item.path.as_posix():
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and a CUDA build of torch"))
