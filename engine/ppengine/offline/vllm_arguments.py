"""Arguments of vLLM's `LLM` that this one does not have: values that change nothing are taken, others are refused."""

from __future__ import annotations

from typing import Any, NamedTuple

from ppengine.common.config import ConfigError
from ppengine.protocol.sampling import MAX_LOGPROBS


class _Foreign(NamedTuple):
    """An argument that this engine does not have."""

    taken: tuple[object, ...]
    """Values that change nothing, beside None."""
    reason: str
    """Reason why others are refused, or the other way to the same end."""


_BOTH = (False, True)
_LORA = "this engine has no LoRA adapters; merge them into the weights"
_FOLDER = "the tokenizer is tokenizer.json in the folder of the model"
_SETTINGS = "the settings are config.json in the folder of the model"
_MASKS = "llguidance makes the masks of structured outputs"
_MEDIA = "models read text alone"
_KEYS = "the KV cache has the type of the model; give dtype"
_BLOCKS = "gpu_memory_utilization decides the number of blocks; a Profile has memory.device_mib as a limit"
_OFFLOAD = "weights stay on the device; more pipeline stages hold a larger model"
_SPECULATION = "this engine does not speculate"
_EXPERTS = "this engine runs no mixture of experts"
_GRAPHS = "decode steps are CUDA graphs; enforce_eager=True runs them without"

FOREIGN: dict[str, _Foreign] = {
    "additional_config": _Foreign(({},), "it is for other platforms of vLLM"),
    "allowed_local_media_path": _Foreign(("",), _MEDIA),
    "async_scheduling": _Foreign(_BOTH, ""),
    "attention_backend": _Foreign((), "this engine has its own attention kernels"),
    "compilation_config": _Foreign(({}, 0, 1, 2, 3), _GRAPHS),
    "config_format": _Foreign(("auto", "hf"), _SETTINGS),
    "convert": _Foreign(("auto", "none"), "this engine generates text alone"),
    "cpu_offload_gb": _Foreign((0,), _OFFLOAD),
    "cuda_graph_sizes": _Foreign(([],), _GRAPHS),
    "data_parallel_size": _Foreign((1,), "start an engine a copy, each with its own LLM"),
    "disable_cascade_attn": _Foreign(_BOTH, ""),
    "disable_custom_all_reduce": _Foreign(_BOTH, ""),
    "disable_log_requests": _Foreign(_BOTH, ""),
    "disable_log_stats": _Foreign(_BOTH, ""),
    "disable_sliding_window": _Foreign((False,), "the model's config.json decides"),
    "download_dir": _Foreign((), "XDG_CACHE_HOME names the cache of models"),
    "enable_expert_parallel": _Foreign((False,), _EXPERTS),
    "enable_lora": _Foreign((False,), _LORA),
    "enable_prompt_embeds": _Foreign((False,), "prompts are texts or token ids"),
    "enable_sleep_mode": _Foreign((False,), "this engine does not sleep; close it, or lower its memory by set-memory"),
    "fully_sharded_loras": _Foreign((False,), _LORA),
    "generation_config": _Foreign(("vllm",), "SamplingParams says all; stop tokens of the checkpoint are always read"),
    "guided_decoding_backend": _Foreign(("auto", "guidance"), _MASKS),
    "hf_overrides": _Foreign(({},), _SETTINGS),
    "hf_token": _Foreign((), "HF_TOKEN in the environment is read"),
    "kv_cache_dtype": _Foreign(("auto",), _KEYS),
    "kv_cache_memory_bytes": _Foreign((), _BLOCKS),
    "kv_transfer_config": _Foreign((), "a Profile has KV tiers: tiers.host and tiers.backends"),
    "limit_mm_per_prompt": _Foreign(({},), _MEDIA),
    "logits_processors": _Foreign(([],), "SamplingParams has penalties, logit_bias and bad_words"),
    "max_logprobs": _Foreign(tuple(range(MAX_LOGPROBS + 1)), f"at most {MAX_LOGPROBS} log-probabilities a token"),
    "max_lora_rank": _Foreign((16,), _LORA),
    "max_loras": _Foreign((1,), _LORA),
    "max_seq_len_to_capture": _Foreign((8192,), _GRAPHS),
    "mm_processor_kwargs": _Foreign(({},), _MEDIA),
    "model_impl": _Foreign(("auto", "vllm"), "this engine has its own layers"),
    "num_gpu_blocks_override": _Foreign((), _BLOCKS),
    "num_speculative_tokens": _Foreign((0,), _SPECULATION),
    "override_generation_config": _Foreign(({},), "SamplingParams says all"),
    "prefix_caching_hash_algo": _Foreign(("builtin", "sha256", "sha256_cbor", "xxhash"), "it has one hash of its own"),
    "quantization": _Foreign((), "weights are those of safetensors in float64, float32, bfloat16 or float16"),
    "reasoning_parser": _Foreign(("",), "the HTTP port alone splits off reasoning"),
    "rope_scaling": _Foreign(({},), _SETTINGS),
    "runner": _Foreign(("auto", "generate"), "this engine generates text alone"),
    "safetensors_load_strategy": _Foreign(("lazy", "eager"), "stages read their share of safetensors"),
    "scheduling_policy": _Foreign(("fcfs", "priority"), "requests start by priority, then by arrival"),
    "served_model_name": _Foreign((), "offline requests name no model"),
    "speculative_config": _Foreign((), _SPECULATION),
    "speculative_model": _Foreign((), _SPECULATION),
    "structured_outputs_config": _Foreign(({}, {"backend": "auto"}, {"backend": "guidance"}), _MASKS),
    "task": _Foreign(("auto", "generate"), "this engine generates text alone"),
    "tokenizer": _Foreign((), _FOLDER),
    "tokenizer_mode": _Foreign(("auto", "hf"), _FOLDER),
    "tokenizer_revision": _Foreign((), _FOLDER),
    "use_tqdm_on_load": _Foreign(_BOTH, ""),
}
"""By name; one whose reason is empty has no value that changes tokens."""
OF_CALLS: dict[str, _Foreign] = {
    "chat_template": _Foreign((), "the chat template is that of the checkpoint; generate takes texts of any other"),
    "chat_template_content_format": _Foreign(("auto", "string"), "templates get the text of a message as a string"),
    "continue_final_message": _Foreign((False,), "the template ends a message; generate takes a text that goes on"),
    "lora_request": _Foreign((), _LORA),
    "mm_processor_kwargs": _Foreign(({},), _MEDIA),
    "tokenization_kwargs": _Foreign(({},), "prompts are neither cut nor padded; give token ids"),
}
"""Those of `generate` and `chat`."""
_CHAT_ALONE = ("chat_", "continue_")
_ALIASES: dict[str, dict[object, object]] = {
    "distributed_executor_backend": {"mp": "local", "uni": "local"},
    "dtype": {"half": "float16", "float": "float32"},
    "load_format": {"safetensors": "auto"},
}
"""Values of vLLM that are another value here."""


def own_arguments(model: object, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that this engine has, with its own values. None is the default. Raises ConfigError."""
    own = {}
    for name, value in arguments.items():
        if value is None:
            continue
        foreign = FOREIGN.get(name)
        if foreign is None:
            own[name] = _own_value(name, value)
        elif value not in foreign.taken and not (name == "tokenizer" and str(value) == str(model)):
            raise ConfigError(f"LLM: {name}={value!r:.80} is refused: {foreign.reason or 'give True or False'}")
    return own


def check_others(call: str, others: dict[str, Any]) -> None:
    """Check the further arguments of `generate` or `chat`. Raises ValueError with the reason; TypeError: unknown."""
    for name, value in others.items():
        foreign = OF_CALLS.get(name)
        if foreign is None or (call == "generate" and name.startswith(_CHAT_ALONE)):
            raise TypeError(f"LLM.{call} has no argument {name}")
        if value is not None and value not in foreign.taken:
            raise ValueError(f"{name}={value!r:.80} is refused: {foreign.reason}")


def _own_value(name: str, value: Any) -> Any:
    aliases = _ALIASES.get(name, {})
    if not isinstance(value, str):
        # torch.float16 prints its own name.
        text = str(value)
        return text.removeprefix("torch.") if name == "dtype" and text.startswith("torch.") else value
    return aliases.get(value, value)
