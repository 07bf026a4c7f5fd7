"""Profiles of small engines for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppengine.common.config import Profile, build_profile


def small(
    folder: Path, *, stages: int = 2, threads: int = 1, name: str = "test", **sections: dict[str, Any]
) -> Profile:
    """Return a float64 profile of `folder` with `threads` a stage; `sections` override single keys."""
    data: dict[str, Any] = {
        "name": name,
        "model": {"path": str(folder), "dtype": "float64", "skip_tokenizer": True, "max_model_len": 256},
        "parallel": {"pipeline": stages},
        "memory": {"device_mib": 32, "utilization": 0.9, "swap_space_gib": 0.01},
        "scheduler": {"max_num_seqs": 32, "max_num_batched_tokens": 128},
        "threads_per_stage": threads,
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return build_profile(data, base=folder)
