"""Arguments of vLLM's `LLM` that this one does not have: values that change nothing are taken, others are refused."""

from __future__ import annotations

from typing import Any

from ppengine.common.config import ConfigError
from ppengine.protocol.foreign_arguments import Foreign
from ppengine.protocol.sampling import MAX_LOGPROBS

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

FOREIGN: dict[str, Foreign] = {
    "additional_config": Foreign(({},), "it is for other platforms of vLLM"),
    "allowed_local_media_path": Foreign(("",), _MEDIA),
    "async_scheduling": Foreign(_BOTH, ""),
    "attention_backend": Foreign((), "this engine has its own attention kernels"),
    "compilation_config": Foreign(({}, 0, 1, 2, 3), _GRAPHS),
    "config_format": Foreign(("auto", "hf"), _SETTINGS),
    "convert": Foreign(("auto", "none"), "this engine generates text alone"),
    "cpu_offload_gb": Foreign((0,), _OFFLOAD),
    "cuda_graph_sizes": Foreign(([],), _GRAPHS),
    "data_parallel_size": Foreign((1,), "start an engine a copy, each with its own LLM"),
    "disable_cascade_attn": Foreign(_BOTH, ""),
    "disable_custom_all_reduce": Foreign(_BOTH, ""),
    "disable_log_requests": Foreign(_BOTH, ""),
    "disable_log_stats": Foreign(_BOTH, ""),
    "disable_sliding_window": Foreign((False,), "the model's config.json decides"),
    "download_dir": Foreign((), "XDG_CACHE_HOME names the cache of models"),
    "enable_expert_parallel": Foreign((False,), _EXPERTS),
    "enable_lora": Foreign((False,), _LORA),
    "enable_prompt_embeds": Foreign((False,), "prompts are texts or token ids"),
    "enable_sleep_mode": Foreign((False,), "this engine does not sleep; close it, or lower its memory by set-memory"),
    "fully_sharded_loras": Foreign((False,), _LORA),
    "generation_config": Foreign(("vllm",), "SamplingParams says all; stop tokens of the checkpoint are always read"),
    "guided_decoding_backend": Foreign(("auto", "guidance"), _MASKS),
    "hf_overrides": Foreign(({},), _SETTINGS),
    "hf_token": Foreign((), "HF_TOKEN in the environment is read"),
    "kv_cache_dtype": Foreign(("auto",), _KEYS),
    "kv_cache_memory_bytes": Foreign((), _BLOCKS),
    "kv_transfer_config": Foreign((), "a Profile has KV tiers: tiers.host and tiers.backends"),
    "limit_mm_per_prompt": Foreign(({},), _MEDIA),
    "logits_processors": Foreign(([],), "SamplingParams has penalties, logit_bias and bad_words"),
    "max_logprobs": Foreign(tuple(range(MAX_LOGPROBS + 1)), f"at most {MAX_LOGPROBS} log-probabilities a token"),
    "max_lora_rank": Foreign((16,), _LORA),
    "max_loras": Foreign((1,), _LORA),
    "max_seq_len_to_capture": Foreign((8192,), _GRAPHS),
    "mm_processor_kwargs": Foreign(({},), _MEDIA),
    "model_impl": Foreign(("auto", "vllm"), "this engine has its own layers"),
    "num_gpu_blocks_override": Foreign((), _BLOCKS),
    "num_speculative_tokens": Foreign((0,), _SPECULATION),
    "override_generation_config": Foreign(({},), "SamplingParams says all"),
    "prefix_caching_hash_algo": Foreign(("builtin", "sha256", "sha256_cbor", "xxhash"), "it has one hash of its own"),
    "quantization": Foreign((), "weights are those of safetensors in float64, float32, bfloat16 or float16"),
    "reasoning_parser": Foreign(("",), "the HTTP port alone splits off reasoning"),
    "rope_scaling": Foreign(({},), _SETTINGS),
    "runner": Foreign(("auto", "generate"), "this engine generates text alone"),
    "safetensors_load_strategy": Foreign(("lazy", "eager"), "stages read their share of safetensors"),
    "scheduling_policy": Foreign(("fcfs", "priority"), "requests start by priority, then by arrival"),
    "served_model_name": Foreign((), "offline requests name no model"),
    "speculative_config": Foreign((), _SPECULATION),
    "speculative_model": Foreign((), _SPECULATION),
    "structured_outputs_config": Foreign(({}, {"backend": "auto"}, {"backend": "guidance"}), _MASKS),
    "task": Foreign(("auto", "generate"), "this engine generates text alone"),
    "tokenizer": Foreign((), _FOLDER),
    "tokenizer_mode": Foreign(("auto", "hf"), _FOLDER),
    "tokenizer_revision": Foreign((), _FOLDER),
    "use_tqdm_on_load": Foreign(_BOTH, ""),
}
"""By name; one whose reason is empty has no value that changes tokens."""
OF_CALLS: dict[str, Foreign] = {
    "chat_template": Foreign((), "the chat template is that of the checkpoint; generate takes texts of any other"),
    "chat_template_content_format": Foreign(("auto", "string"), "templates get the text of a message as a string"),
    "continue_final_message": Foreign((False,), "the template ends a message; generate takes a text that goes on"),
    "lora_request": Foreign((), _LORA),
    "mm_processor_kwargs": Foreign(({},), _MEDIA),
    "tokenization_kwargs": Foreign(({},), "prompts are neither cut nor padded; give token ids"),
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
