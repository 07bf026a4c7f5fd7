"""The CPU time of a step beside the layers, measured with a whole engine of one layer that computes next to nothing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

from ppengine.bench.costs import Curve, HostTimes
from ppengine.bench.process_cpu import cpu_by_module
from ppengine.bench.sides import run_engine
from ppengine.bench.workload import random_jobs
from ppengine.common.config import build_profile
from ppengine.offline.llm import LLM

_ROWS = 32
_OUTPUT = {1: 128, _ROWS: 64}
"""Tokens of each request, by the number of requests."""
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": 512, "torch_dtype": "float32", "eos_token_id": 0,
}  # fmt: skip


class CpuSeconds(NamedTuple):
    """CPU seconds of an engine's processes."""

    stage: float
    core: float
    others: float


def write_small(folder: Path) -> None:
    """Write the config.json of the small model into `folder`."""
    (folder / "config.json").write_text(json.dumps(_MODEL))


def measured_host(folder: Path, computed: Curve) -> HostTimes:
    """Return the host times of this machine. Raises EngineError if no engine starts.

    `folder` has the small model, `computed` the seconds that its layer and head take by rows: they do not count.
    """
    profile = build_profile(
        {
            "name": f"host-{os.getpid()}", "journal": False, "threads_per_stage": 1,
            "model": {"path": str(folder), "load_format": "dummy", "skip_tokenizer": True},
            "memory": {"device_mib": 256, "swap_space_gib": 0}, "scheduler": {"schedule_ahead": True},
        },
        base=folder,
    )  # fmt: skip
    with LLM(profile) as llm:
        alone, many = (_a_step(llm, rows) for rows in (1, _ROWS))
    step, steps = alone.stage - computed.at(1), many.stage - computed.at(_ROWS)
    row, core_row = (max(0.0, each) / (_ROWS - 1) for each in (steps - step, many.core - alone.core))
    return HostTimes(
        step_s=max(0.0, step - row), row_s=row, core_step_s=max(0.0, alone.core - core_row), core_row_s=core_row,
        others=many.others,
    )  # fmt: skip


def _a_step(llm: LLM, rows: int) -> CpuSeconds:
    """Return the CPU seconds of stage and core a step, and the cores that the other processes keep busy."""
    output = _OUTPUT[rows]
    run_engine(llm, random_jobs(_MODEL["vocab_size"], rows, 1, 1, output, 0))  # type: ignore[arg-type]
    before, begun = cpu_by_module(llm.llm_engine.supervisor_pid), time.perf_counter()
    run_engine(llm, random_jobs(_MODEL["vocab_size"], rows, 1, 1, output, 1))  # type: ignore[arg-type]
    seconds, after = time.perf_counter() - begun, cpu_by_module(llm.llm_engine.supervisor_pid)
    took = {module: after[module] - before[module] for module in after}
    stage, core = took.pop("stage"), took.pop("core")
    return CpuSeconds(stage / output, core / output, sum(took.values()) / seconds)
