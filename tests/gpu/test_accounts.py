"""The parts of a stage's memory against what NVML says, next to another process on the same card."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from real import needs_gpu

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings (extra gpu)")

HOLD = """
from cuda.bindings import driver as d
d.cuInit(0)
d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1])
assert int(d.cuMemAlloc(3 << 30)[0]) == 0
print("held", flush=True)
input()
"""
GIB = 2**30
pytestmark = needs_gpu


def test_parts_add_up_to_what_nvml_says(tmp_path: Path) -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    torch.cuda.empty_cache()
    other = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        script = Path(__file__).with_name("account_stage.py")
        out = subprocess.run(
            [sys.executable, str(script), uuid, str(tmp_path / "store")], capture_output=True, text=True, check=False
        )
        assert out.returncode == 0, out.stderr[-2000:]
    finally:
        other.communicate("\n", timeout=30)
    found = json.loads(out.stdout.splitlines()[-1])
    print(json.dumps(found, indent=1))
    named = sum(value for name, value in found.items() if name not in ("unexplained", "nvml_used", "own", "total"))
    assert abs(named - found["nvml_used"]) <= 0.02 * found["nvml_used"], "the named parts are off by more than 2 %"
    assert found["kv_mapped"] == 20 * GIB and found["weights"] == 60 * 4096 * 12288 * 2
    assert 3 * GIB <= found["other_processes"] <= 5 * GIB
    # A context with kernels is a few hundred MiB; a graph and a communicator take something too.
    assert 200 * 2**20 < found["context"] < 2 * GIB
    assert found["graphs"] > 0 and found["communicator"] > 0 and found["activations"] >= 0
