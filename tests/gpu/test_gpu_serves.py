"""Which tensors the GPU kernels take, and that the interpreter stays inside these tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
from ppkernels import gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_serves_the_types_of_models(device: torch.device, dtype: torch.dtype) -> None:
    assert gpu.serves(torch.empty(1, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
def test_leaves_other_types_to_torch(device: torch.device, dtype: torch.dtype) -> None:
    assert not gpu.serves(torch.empty(1, dtype=dtype, device=device))


def test_leaves_the_cpu_alone_unless_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "interpreted", False)
    assert not gpu.serves(torch.empty(1))


def test_the_library_of_triton_is_interpreted_where_there_is_no_gpu(device: torch.device) -> None:
    """Otherwise a `tl.sum` in a kernel fails, with a message that does not say why."""
    interpreted = type(triton.language.sum).__name__ == "InterpretedFunction"
    assert interpreted == (device.type == "cpu")


def test_operations_on_a_cpu_load_no_triton() -> None:
    program = (
        "import sys, torch; from ppkernels import activation, norms, rotary, sampling;"
        "norms.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6); activation.silu_and_mul(torch.ones(2, 4));"
        "print('triton' in sys.modules)"
    )
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.strip() == "False"
