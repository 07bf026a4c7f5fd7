"""Sections of a profile, with their defaults and ranges."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

DTYPES = ("float64", "float32", "bfloat16", "float16")
DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]

ModelId = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}\Z",
        description="ORG/NAME of letters, digits, '.', '_' and '-', with no sign first",
    ),
]
Revision = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z",
        description="1 to 128 letters, digits, '.', '_' and '-', with no sign first",
    ),
]
Origin = Annotated[
    str,
    Meta(
        pattern=r"\A(\*|[a-z][a-z0-9+.-]{0,31}://[^\s/?#,]{1,255})\Z",
        description="* or SCHEME://HOST[:PORT], without a slash at its end",
    ),
]
ServedName = Annotated[
    str,
    Meta(
        pattern=r"\A[^\s\x00-\x1f\x7f-\x9f]{1,256}\Z",
        description="1 to 256 characters without spaces",
    ),
]
LAYERS_MOST = 1024
MODEL_LEN_MOST = 2**22
"""Tokens of the longest sequence that any model may have."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint: a folder, or a model of a hub. `max_model_len` None: the model's."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """A Hugging Face folder, relative to the profile. For a hub: the folder that keeps the download, which may be
    left out: it is in ppconsole/models/ of the user's cache then."""
    source: Literal["folder", "huggingface", "modelscope"] = "folder"
    """Origin of the checkpoint. From a hub it is downloaded before the engine starts, unless it is there."""
    id: ModelId | None = None
    """Name of a hub's model, as `ORG/NAME`."""
    revision: Revision | None = None
    """Branch, tag or commit at the hub. None: main, at ModelScope master, as it is at the first download."""
    dtype: DType = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: Annotated[int, Meta(ge=2, le=MODEL_LEN_MOST)] | None = None
    skip_tokenizer: bool = False


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is cut. `partition`: layers of each stage, in order; None: so that the longest is shortest."""

    pipeline: Annotated[int, Meta(ge=1, le=256)] = 1
    tensor: Annotated[int, Meta(ge=1, le=64)] = 1
    """Tensor-parallel ranks of each stage, one process each."""
    partition: (
        Annotated[list[Annotated[int, Meta(ge=1, le=LAYERS_MOST)]], Meta(min_length=1, max_length=256)] | None
    ) = None
    executor: Literal["local", "ray"] = "local"
    placement: Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"] | None = None
    """Ray's strategy for the nodes of the stages. STRICT_PACK: all on the engine's host.

    None: STRICT_SPREAD in the cluster at RAY_ADDRESS, STRICT_PACK without one."""
    listen: str | None = None
    """`tcp://ADDRESS:PORT` of this host for its stages on other nodes, the first of five ports.

    None: the address on the way to RAY_ADDRESS, and free ports."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the stages. auto: a GPU if there is one and `memory.device_mib` is not set, otherwise the CPU."""
    eager: bool = False
    """On a GPU: launch decode steps operation by operation instead of as graphs."""
    peer_to_peer: bool = True
    """On GPUs: messages between stages go from card to card where the cards can reach each other, not through hosts."""
    edges: Literal["tcp", "rdma", "auto"] = "tcp"
    """Carrier of hidden states between hosts. rdma: adapters for InfiniBand or RoCE, with the extra `rdma`.

    auto: RDMA where both hosts of an edge have it, otherwise TCP."""
    restart: Literal["auto", "never"] = "auto"
    """Reaction to the death of a stage: `auto` restarts it and recomputes requests, `never` stays degraded."""
    restart_limit_s: Annotated[float, Meta(ge=1, le=86_400)] = 60.0
    """Seconds in which a restarted stage must come up; then requests end as `lost`, and the tries go on."""


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of each stage. `device_mib` replaces the card's memory on a CPU stage; on a GPU it is a limit."""

    utilization: Annotated[float, Meta(gt=0, le=1)] = 0.9
    device_mib: Annotated[int, Meta(ge=1, le=2**24)] | None = None
    swap_space_gib: Annotated[float, Meta(ge=0, le=2**16)] = 4.0
    """Host memory of each stage and rank, for swapped requests and the host cache of `tiers.host` together."""
    block_size: Literal[8, 16, 32, 64, 128] = 16


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching.

    `max_num_batched_tokens`: of a step. With several stages, steps are smaller if few prompt tokens are left.
    `schedule_ahead`: give a request its next decode step before the last one has retired.
    """

    max_num_seqs: Annotated[int, Meta(ge=1, le=65_536)] = 256
    max_num_batched_tokens: Annotated[int, Meta(ge=1, le=32_768)] = 2048
    preemption: Literal["recompute", "swap"] = "recompute"
    schedule_ahead: bool = False
    prefix_caching: bool = True
    chunked_prefill: bool = True
    watermark: Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    """Share of the blocks that stays free for running requests when another one is admitted."""


class ConsoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Watching."""

    listen: str | None = None
    """`tcp://ADDRESS:PORT` for consoles on other hosts, the first of three ports; null: local sockets alone."""
    publish_hz: Annotated[float, Meta(ge=0.1, le=100)] = 10.0
    history_minutes: Annotated[int, Meta(ge=0, le=1440)] = 60
    """Minutes of snapshots and events that are kept on disk; 0: none, and no recordings of incidents."""
    history_mib: Annotated[int, Meta(ge=1, le=65_536)] = 64
    """Most MiB of them; a large engine gets fewer snapshots a minute in place of fewer minutes."""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's API."""

    listen: str | None = None
    """`HOST:PORT` of the API, or `unix:/PATH`; null: there is none. Port 0: a free one."""
    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    """Processes that share the port; a Unix socket has one."""
    model_names: Annotated[list[ServedName], Meta(max_length=64)] = []
    """Names by which requests call the model, as `/v1/models` lists them; none: its folder, or its id on a hub.

    The first is in answers, and `model_name` of metrics.
    """
    keys: Annotated[str, Meta(min_length=1, max_length=4096)] | None = None
    """File of API keys, a line each as `NAME KEY [LIMIT=N ...]`, beside PPCONSOLE_API_KEY; null: that one, or none.

    A key has 16 characters or more. Limits are `requests_per_minute`, `tokens_per_minute` and `concurrent`; keys of
    one name share them.
    """
    allowed_origins: Annotated[list[Origin], Meta(max_length=64)] = []
    """Origins of web pages that may read answers, as `https://chat.example.org`; `*`: those of all."""
    most_open: Annotated[int, Meta(ge=1, le=65_536)] = 1024
    """Requests that may be open at once in each process; later ones are refused with status 429."""
    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "glm4", "glm45", "qwen3_coder"] = "auto"
    """Form in which the model writes tool calls; auto: the one that its chat template shows."""
    reasoning: Literal["auto", "none", "think", "mistral"] = "auto"
    """Tags of reasoning in front of replies: `<think>`, or Mistral's `[THINK]`; auto: those of the chat template."""
    generation_config: Literal["auto", "none"] = "auto"
    """Sampling of requests that leave it out; auto: by `generation_config.json` of the model, none: OpenAI's."""
    stream_interval: Annotated[int, Meta(ge=1, le=1024)] = 1
    """Tokens of an answer that share an event, after its first; more take less CPU time a token."""
    otlp_traces_endpoint: Annotated[str, Meta(pattern="^https?://", max_length=2048)] | None = None
    """URL that takes OpenTelemetry traces by OTLP over HTTP (`http://HOST:4318/v1/traces`); null: there are none."""


class SloConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Service level objectives: a request that ends has met them or not. They change nothing that is scheduled."""

    ttft_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None
    """Most milliseconds from the arrival to the first token; null: any."""
    itl_ms: Annotated[float, Meta(gt=0, le=600_000)] | None = None
    """Most milliseconds between two tokens of a request, in the mean; null: any."""

    @property
    def set(self) -> bool:
        """Whether there is an objective."""
        return self.ttft_ms is not None or self.itl_ms is not None
