"""The arguments of `LLM`, and the profile that they mean. An impossible argument is refused by its name."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any, Literal

from ppengine.checkpoint.model_spec import CheckpointError, read_spec
from ppengine.common.config import ConfigError, Profile, build_profile
from ppengine.common.memory_arithmetic import block_bytes
from ppengine.common.profile_sections import ModelConfig
from ppengine.hub.fetch import fetch_model
from ppengine.hub.transfer import HubError
from ppengine.offline.launch import EngineError
from ppengine.offline.vllm_arguments import FOREIGN, own_arguments

SEQS_A_STAGE, MORE_SEQS_A_STAGE = 256, 512
SMALL_KV_BYTES = 128 * 1024
"""If a token's keys and values take at most this, a card has room for more requests, and they pay: on an H200
Llama-8B (128 KiB) gained 7 % from 512, OPT-6.7B (512 KiB) lost 3 % to preemptions (docs/performance.md)."""
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
ARGUMENTS = {
    "model.source": "source",
    "model.id": "model",
    "model.revision": "revision",
    "model.dtype": "dtype",
    "model.load_format": "load_format",
    "model.max_model_len": "max_model_len",
    "model.skip_tokenizer": "skip_tokenizer_init",
    "parallel.pipeline": "pipeline_parallel_size",
    "parallel.tensor": "tensor_parallel_size",
    "parallel.executor": "distributed_executor_backend",
    "parallel.eager": "enforce_eager",
    "parallel.device": "device",
    "memory.utilization": "gpu_memory_utilization",
    "memory.swap_space_gib": "swap_space",
    "memory.block_size": "block_size",
    "scheduler.max_num_seqs": "max_num_seqs",
    "scheduler.max_num_batched_tokens": "max_num_batched_tokens",
    "scheduler.prefix_caching": "enable_prefix_caching",
    "scheduler.chunked_prefill": "enable_chunked_prefill",
}
"""Profile keys in error messages, with the argument of `LLM` that each came from."""
_KEYS = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, ARGUMENTS))})(?![\w-])")


def make_profile(
    model: str,
    *,
    source: Literal["folder", "huggingface", "modelscope"] = "folder",
    revision: str | None = None,
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto",
    load_format: Literal["auto", "dummy"] = "auto",
    pipeline_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.9,
    swap_space: float = 4.0,
    block_size: int = 16,
    max_model_len: int | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int = 4096,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    enforce_eager: bool = False,
    distributed_executor_backend: Literal["local", "ray"] = "local",
    device: Literal["auto", "cpu", "cuda"] = "auto",
    skip_tokenizer_init: bool = False,
    trust_remote_code: bool = False,
) -> Profile:
    """Return the profile that the arguments of `LLM` mean. Raises ConfigError; EngineError: no download.

    `model` is a folder, or with `source` the ORG/NAME of a hub's model, which is downloaded unless it is there.
    `gpu_memory_utilization` counts on a CPU too, where a process has the machine's memory divided by stages and ranks.
    `enforce_eager` counts on a GPU: CPU stages always run eagerly. `trust_remote_code` can only be False.
    `max_num_seqs` None: 256 for each stage, since the stages share requests between them, and 512 if a token's keys
    and values take at most 128 KiB; give less if a device has little room beside the weights.
    `max_num_batched_tokens`: a served profile has 2048 by default, which keeps steps short for users that wait
    for their next token; offline there are none.
    """
    if trust_remote_code:
        raise ConfigError("trust_remote_code=True is refused: no code from a checkpoint is ever run")
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(f"model is {str(model)[:80]}; it must be the path of a Hugging Face folder")
    if source == "folder" and revision is not None:
        raise ConfigError("LLM: revision is that of a hub's model; give source='huggingface' or 'modelscope' too")
    if source == "folder" and _HUB_ID.fullmatch(str(model)) and not Path(model).exists():
        hubs = "source='huggingface' or source='modelscope'"
        raise ConfigError(f"LLM: there is no folder {model}; to download a model of that name, add {hubs}")
    from_hub = source in ("huggingface", "modelscope")
    place = {"id": str(model), "revision": revision} if from_hub else {"path": str(Path(model).resolve())}
    stages = pipeline_parallel_size if isinstance(pipeline_parallel_size, int) else 1
    data: dict[str, Any] = {
        # Names are unique on a host, and nobody chose this one.
        "name": f"llm-{secrets.token_hex(3)}",
        "model": {
            **place, "source": source, "dtype": dtype, "load_format": load_format,
            "max_model_len": max_model_len, "skip_tokenizer": skip_tokenizer_init,
        },
        "parallel": {
            "pipeline": pipeline_parallel_size, "tensor": tensor_parallel_size,
            "executor": distributed_executor_backend, "eager": enforce_eager, "device": device,
        },
        "memory": {"utilization": gpu_memory_utilization, "swap_space_gib": swap_space, "block_size": block_size},
        "scheduler": {
            "max_num_seqs": SEQS_A_STAGE * stages if max_num_seqs is None else max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens, "prefix_caching": enable_prefix_caching,
            "chunked_prefill": enable_chunked_prefill, "schedule_ahead": True,
        },
    }  # fmt: skip
    try:
        profile = build_profile(data, base=Path(), where="LLM")
        download(profile)
        if max_num_seqs is None:
            data["scheduler"]["max_num_seqs"] = _seqs_a_stage(profile.model) * stages
        return build_profile(data, base=Path(), where="LLM")
    except ConfigError as error:
        raise ConfigError(with_arguments(str(error))) from None


def with_arguments(text: str) -> str:
    """Return an error with the arguments of `LLM` in place of the profile keys that they came from."""
    return _KEYS.sub(lambda found: ARGUMENTS[found[0]], text)


def download(profile: Profile) -> None:
    """Download the model of a hub, unless it is there; lines of progress go to stderr. Raises EngineError."""
    try:
        fetch_model(profile.model, lambda line: print(line, file=sys.stderr, flush=True))
    except HubError as error:
        raise EngineError(str(error)) from None


def _seqs_a_stage(model: ModelConfig) -> int:
    try:
        spec = read_spec(Path(model.path))
    except (CheckpointError, OSError):
        return SEQS_A_STAGE  # The start of the engine reports the fault of the folder.
    size = {"float64": 8, "float32": 4}.get(spec.dtype if model.dtype == "auto" else model.dtype, 2)
    a_token = block_bytes(
        block_size=1, layers=spec.num_layers, kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype_bytes=size
    )
    return MORE_SEQS_A_STAGE if a_token <= SMALL_KV_BYTES else SEQS_A_STAGE


def profile_of(model: str | Profile, arguments: dict[str, Any]) -> Profile:
    """Return the profile that `LLM(model, **arguments)` means. Raises ConfigError; TypeError: no such argument."""
    known = ["seed", *(name for name in inspect.signature(make_profile).parameters if name != "model")]
    for name in arguments:
        if name not in known and name not in FOREIGN:
            nearest = difflib.get_close_matches(name, [*known, *FOREIGN], n=1, cutoff=0.0)[0]
            raise TypeError(f"LLM has no argument {name}; did you mean {nearest}? known: {', '.join(known)}")
    if isinstance(model, Profile):
        if arguments:
            raise TypeError(f"a Profile says everything; also given: {', '.join(arguments)}")
        download(model)
        return model
    return make_profile(model, **own_arguments(model, arguments))
