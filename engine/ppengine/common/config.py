"""Profiles: what an operator writes, and the one place for defaults. Validated by msgspec; nothing is guessed."""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Any, Literal

import msgspec

from ppengine.protocol.kinds import check_kind

DTYPES = ("float64", "float32", "bfloat16", "float16")
DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]


class ConfigError(Exception):
    """A profile or a setting that cannot be used. One line: what, with the value, and what would be right."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which checkpoint. `path` is a Hugging Face folder, relative to the profile; `max_model_len` None: the model's."""

    path: str
    dtype: DType = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: int | None = None
    skip_tokenizer: bool = False


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is cut. `partition`: layers of each stage, in order; None: so that the longest is shortest."""

    pipeline: int = 1
    tensor: int = 1
    partition: list[int] | None = None
    executor: Literal["local", "ray"] = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the stages. auto: a GPU if there is one and `memory.device_mib` is not set, otherwise the CPU."""
    eager: bool = False
    """On a GPU: launch decode steps operation by operation instead of as graphs."""
    peer_to_peer: bool = True
    """On GPUs: messages between stages go from card to card where the cards can reach each other, not through hosts."""
    restart: Literal["auto", "never"] = "auto"
    """Reaction to the death of a stage: `auto` restarts it and recomputes requests, `never` stays degraded."""


class MemoryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory of each stage. `device_mib` replaces the card's memory on a CPU stage; on a GPU it is a limit."""

    utilization: float = 0.9
    device_mib: int | None = None
    swap_space_gib: float = 4.0
    block_size: int = 16


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching. `schedule_ahead`: give a request its next decode step before the last one has retired."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    preemption: Literal["recompute", "swap"] = "recompute"
    schedule_ahead: bool = False
    prefix_caching: bool = True
    chunked_prefill: bool = True
    watermark: float = 0.01


class ConsoleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Watching. `bind` None: local sockets in a 0700 folder."""

    bind: str | None = None
    publish_hz: float = 10.0
    history_minutes: int = 60
    """Minutes of snapshots and events that are kept on disk; 0: none, and no recordings of incidents."""
    history_mib: int = 64
    """Most MiB of them; a large engine gets fewer snapshots a minute in place of fewer minutes."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine."""

    name: str
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    console: ConsoleConfig = ConsoleConfig()
    threads_per_stage: int | None = None
    """Threads that torch computes with on a CPU stage; None: cores divided by stages, at least 1."""

    def __post_init__(self) -> None:
        """Check ranges, and refuse by name the settings that are not built yet."""
        memory, parallel, scheduler = self.memory, self.parallel, self.scheduler
        check_utilization(memory.utilization)
        _at_least("memory.device_mib", memory.device_mib, 1)
        _at_least("parallel.pipeline", parallel.pipeline, 1)
        _at_least("scheduler.max_num_seqs", scheduler.max_num_seqs, 1)
        _at_least("scheduler.max_num_batched_tokens", scheduler.max_num_batched_tokens, 1)
        _at_least("model.max_model_len", self.model.max_model_len, 2)
        _at_least("threads_per_stage", self.threads_per_stage, 1)
        if not 0 <= memory.swap_space_gib < 2**20:
            raise ValueError(f"memory.swap_space_gib is {memory.swap_space_gib}; it must be 0 or more")
        if memory.block_size not in (8, 16, 32, 64, 128):
            raise ValueError(f"memory.block_size is {memory.block_size}; it must be 8, 16, 32, 64 or 128")
        if parallel.tensor != 1:
            raise ValueError(f"parallel.tensor is {parallel.tensor}; only 1 is built so far: raise parallel.pipeline")
        if parallel.partition is not None and len(parallel.partition) != parallel.pipeline:
            raise ValueError(
                f"parallel.partition names {len(parallel.partition)} stages, parallel.pipeline is {parallel.pipeline}"
            )
        if not 0.1 <= self.console.publish_hz <= 100:
            raise ValueError(f"console.publish_hz is {self.console.publish_hz}; it must be 0.1 to 100")
        if self.console.bind is not None:
            raise ValueError(f"console.bind is {self.console.bind!r}; remote sockets are not built yet: leave it out")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A profile made concrete for one boot; every process of the engine reads it from `<run_dir>/engine.json`."""

    id: str
    name: str
    epoch: str
    profile: Profile
    model_path: str
    model_type: str
    layers: list[tuple[int, int]]
    """`[start, end)` of each stage."""
    max_model_len: int
    run_dir: str
    ring_dir: str
    started_wall: float
    allow_faults: bool = False
    """Started with `--allow-faults`: it can be broken on demand."""

    def endpoint(self, name: str) -> str:
        """Return the ipc endpoint of a socket: public `state control bulk`, private `front steps collect report`."""
        return f"ipc://{self.run_dir}/{name}"

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layers)

    @staticmethod
    def load(path: Path) -> EngineConfig:
        """Read what the supervisor wrote."""
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)


def check_utilization(value: float) -> None:
    """Raise ValueError unless `value` can be a memory utilization at all."""
    if not 0.0 < value <= 1.0:
        raise ValueError(f"memory utilization is {value:g}; it must be above 0 and at most 1")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}")


def profiles_dir() -> Path:
    """Return the folder of the bundled profiles: inside the wheel, or beside the packages in an editable install."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "profiles"
    return installed if installed.is_dir() else package.parents[1] / "profiles"


def find_profile(name: str) -> Path:
    """Return the file of a profile named by path or by bundled name. Raises ConfigError with the bundled ones."""
    direct = Path(name)
    if direct.suffix in (".yaml", ".yml") or "/" in name:
        if direct.is_file():
            return direct
        raise ConfigError(f"no profile at {name}")
    bundled = profiles_dir() / f"{name}.yaml"
    if bundled.is_file():
        return bundled
    known = sorted(path.stem for path in profiles_dir().glob("*.yaml"))
    raise ConfigError(f"no profile {name!r}; bundled: {', '.join(known) or 'none'}; or give a path to a .yaml file")


def load_profile(name: str, settings: list[str] | None = None) -> Profile:
    """Return the profile `name` (bundled or a path) with `a.b=c` settings applied. Raises ConfigError."""
    import yaml

    path = find_profile(name)
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a profile is a mapping, this is {type(data).__name__}")
    for setting in settings or []:
        _apply(data, setting, yaml.safe_load)
    return build_profile(data, base=path.parent, where=str(path))


def build_profile(data: dict[str, Any], base: Path, where: str = "profile") -> Profile:
    """Return the validated profile of `data`; the model's path is taken relative to `base`. Raises ConfigError."""
    try:
        _check_keys(data, Profile, "")
        profile = msgspec.convert(data, Profile)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    path = Path(profile.model.path)
    if not path.is_absolute():
        model = msgspec.structs.replace(profile.model, path=str((base / path).resolve()))
        profile = msgspec.structs.replace(profile, model=model)
    return profile


def _apply(data: dict[str, Any], setting: str, parse: Any) -> None:
    key, separator, text = setting.partition("=")
    if not separator:
        raise ConfigError(f"--set {setting}: write it as key=value, for example memory.utilization=0.5")
    *parents, last = key.strip().split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"--set {setting}: {parent} is a value, not a section")
    data[last] = parse(text)


def _check_keys(data: dict[str, Any], kind: type[msgspec.Struct], prefix: str) -> None:
    """Check names and kinds. Raises ConfigError for an unknown key, ValueError for a value of another kind."""
    hints = typing.get_type_hints(kind)
    for key, value in data.items():
        if key not in hints:
            nearest = difflib.get_close_matches(str(key), hints, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {prefix}{key}; did you mean {prefix}{nearest[0]}?")
        section = hints[key]
        if isinstance(section, type) and issubclass(section, msgspec.Struct):
            if not isinstance(value, dict):
                raise ConfigError(f"{prefix}{key} is {value!r}; it is a section of keys")
            _check_keys(value, section, f"{prefix}{key}.")
        else:
            check_kind(f"{prefix}{key}", value, section)
