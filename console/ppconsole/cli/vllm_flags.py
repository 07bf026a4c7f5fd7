"""Flags of `vllm serve`, and their counterparts in `ppconsole serve`."""

from __future__ import annotations

KEYS = {
    "--api-server-count": "http.processes",
    "--async-scheduling": "scheduler.schedule_ahead",
    "--allowed-origins": "http.allowed_origins",
    "--block-size": "memory.block_size",
    "--device": "parallel.device",
    "--distributed-executor-backend": "parallel.executor",
    "--dtype": "model.dtype",
    "--enable-chunked-prefill": "scheduler.chunked_prefill",
    "--enable-prefix-caching": "scheduler.prefix_caching",
    "--enforce-eager": "parallel.eager",
    "--generation-config": "http.generation_config",
    "--gpu-memory-utilization": "memory.utilization",
    "--load-format": "model.load_format",
    "--max-model-len": "model.max_model_len",
    "--max-num-batched-tokens": "scheduler.max_num_batched_tokens",
    "--max-num-seqs": "scheduler.max_num_seqs",
    "--pipeline-parallel-size": "parallel.pipeline",
    "--reasoning-parser": "http.reasoning",
    "--revision": "model.revision",
    "--served-model-name": "http.model_names",
    "--skip-tokenizer-init": "model.skip_tokenizer",
    "--stream-interval": "http.stream_interval",
    "--swap-space": "memory.swap_space_gib",
    "--tensor-parallel-size": "parallel.tensor",
    "-p": "parallel.pipeline",
    "-t": "parallel.tensor",
}
"""Keys of a profile by flag. click takes `-tp` and `-pp` as their first letters."""
_FLAGS = frozenset({
    "--async-scheduling", "--enable-chunked-prefill", "--enable-prefix-caching", "--enforce-eager",
    "--skip-tokenizer-init",
})  # fmt: skip
"""Those without a value."""
_LISTS = frozenset({"--allowed-origins", "--served-model-name"})
"""Those with several values."""
OTHERS = {
    "--api-key": "API keys are in PPCONSOLE_API_KEY, or in a file: --set http.keys=FILE",
    "--chat-template": "the template is the checkpoint's: chat_template.jinja in its folder",
    "--data-parallel-size": "start an engine for each copy",
    "--enable-auto-tool-choice": "tool calls are read without it; --tool-parser NAME names their form",
    "--enable-lora": "this engine has no LoRA adapters; merge them into the weights",
    "--host": "it is --http HOST:PORT",
    "--kv-transfer-config": "KV tiers are keys of a profile, tiers.host and tiers.backends",
    "--model": "a profile names the model, as model.path, or model.source and model.id",
    "--port": "it is --http HOST:PORT",
    "--quantization": "weights are those of safetensors in float64, float32, bfloat16 or float16",
    "--speculative-config": "this engine does not speculate",
    "--ssl-certfile": "the port has no TLS; a proxy in front of it has",
    "--ssl-keyfile": "the port has no TLS; a proxy in front of it has",
    "--tokenizer": "the tokenizer is the checkpoint's: tokenizer.json in its folder",
    "--tool-call-parser": "it is --tool-parser NAME",
    "--trust-remote-code": "code from checkpoints never runs",
    "--uds": "it is --http unix:/PATH",
}
"""Other flags, each with its counterpart or the reason why there is none."""


def counterpart(option: str) -> str:
    """Return the counterpart of a flag of vLLM in a few words; empty: it is none of those."""
    flag = option.replace("_", "-")
    plain = flag.replace("--no-", "--", 1)
    if (key := KEYS.get(plain)) is None:
        return OTHERS.get(flag, "")
    if plain in _LISTS:
        return f"it is --set '{key}=[VALUE, ...]'"
    value = ("true" if flag == plain else "false") if plain in _FLAGS else "VALUE"
    return f"it is --set {key}={value}"
