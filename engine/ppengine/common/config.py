"""Profiles: what an operator writes, and the one place for defaults. Validated by msgspec; nothing is guessed."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ppengine.common.cluster import Cluster, be_node, bind
from ppengine.common.curve import Socket
from ppengine.common.groups import Groups
from ppengine.common.http_address import parse_http
from ppengine.common.model_cache import REVISIONS, model_folder
from ppengine.common.profile_sections import (
    ConsoleConfig,
    HttpConfig,
    MemoryConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SloConfig,
)
from ppengine.common.section_checks import check_keys, check_missing, check_ranges
from ppengine.common.tier_config import BACKENDS_MOST, BackendName, TierConfig
from ppengine.protocol.error_text import shown
from ppengine.protocol.kinds import check_kind
from ppengine.protocol.tcp_address import TcpAddress, check_listen, parse_address

EngineName = Annotated[
    str,
    Meta(
        pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z",
        description="1 to 64 letters, digits, '.', '_' and '-', with no sign first",
    ),
]


class ConfigError(Exception):
    """A profile or a setting that cannot be used. One line: what, with the value, and what would be right."""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine."""

    name: EngineName
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    console: ConsoleConfig = ConsoleConfig()
    http: HttpConfig = HttpConfig()
    slo: SloConfig = SloConfig()
    tiers: TierConfig = TierConfig()
    journal: bool = True
    """Keep requests in a file of the run folder, so that they go on if the core is restarted; off: ids alone."""
    threads_per_stage: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """Threads that torch computes with on a CPU stage; None: cores divided by stages, at least 1."""

    def __post_init__(self) -> None:
        """Check ranges, and settings against each other."""
        check_ranges(self, "")
        _check_source(self.model)
        parallel = self.parallel
        if parallel.partition is not None and len(parallel.partition) != parallel.pipeline:
            raise ValueError(
                f"parallel.partition names {len(parallel.partition)} stages, parallel.pipeline is {parallel.pipeline}"
            )
        for key, listen in (("console", self.console.listen), ("parallel", parallel.listen)):
            try:
                if listen is not None:
                    check_listen(listen)
            except ValueError as error:
                raise ValueError(f"{key}.listen: {error}") from None
        if self.http.listen is not None:
            try:
                parse_http(self.http.listen)
            except ValueError as error:
                raise ValueError(f"http.listen: {error}") from None
        for name in (names := self.http.model_names):
            if names.count(name) > 1:
                raise ValueError(f"http.model_names has {shown(name)} {names.count(name)} times; a name is given once")
        _check_tiers(self.tiers)
        if self.tiers.host and not self.scheduler.prefix_caching:
            raise ValueError("scheduler.prefix_caching is false; tiers.host needs it")
        if self.tiers.host and not self.memory.swap_space_gib:
            raise ValueError("memory.swap_space_gib is 0; tiers.host needs it")


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
    keeper: tuple[int, int] | None = None
    """Pid and start time of the process that starts another supervisor if this one is killed; None: nothing does."""

    cluster: Cluster | None = None
    """How other nodes reach the engine; None: all of it is on one host."""
    node: str = ""
    """Name of the node that this process runs on; empty: the engine's own host."""
    address: str = "127.0.0.1"
    """Address of this node for the edges of its stages."""

    @property
    def model_names(self) -> list[str]:
        """Names of the model over HTTP, its own first: those of the profile, otherwise the name of its folder."""
        return self.profile.http.model_names or [Path(self.model_path).name]

    @property
    def http_roles(self) -> list[str]:
        """Names of the HTTP processes."""
        http = self.profile.http
        return [f"http{number}" for number in range(http.processes)] if http.listen is not None else []

    @property
    def text_roles(self) -> list[str]:
        """Name of the process of texts; none without a tokenizer."""
        return [] if self.profile.model.skip_tokenizer else ["texts"]

    @property
    def store_roles(self) -> list[str]:
        """Names of the stores: one a place, if there are backends."""
        return [place.store_role for place in self.groups.places] if self.profile.tiers.backends else []

    def endpoint(self, name: str) -> str:
        """Return the endpoint of a socket on this node, an ipc one on the engine's host.

        Public ones are `state control bulk`, private ones `front steps collect report agent texts faults stores`.
        """
        return f"ipc://{self.run_dir}/{name}" if self.reaches is None else self.reaches.endpoint(name)

    @property
    def node_name(self) -> str:
        """Name of the node that this process runs on."""
        return self.node or socket.gethostname()

    @property
    def reaches(self) -> Cluster | None:
        """The way to the engine's sockets from another node; None on its own host."""
        return self.cluster if self.node else None

    def connect(self, link: Socket, name: str) -> None:
        """Connect `link` to the engine. On another node it is a CURVE client. Raises KeyFileError, zmq.ZMQError."""
        if self.reaches is not None:
            be_node(link, Path(self.run_dir))
        link.connect(self.endpoint(name))

    def listen_for_nodes(self, link: Socket, name: str) -> None:
        """Bind `link` for other nodes too, if there are any. Raises OSError, KeyFileError."""
        if self.cluster is not None:
            bind(link, Path(self.run_dir), self.cluster.endpoint(name))

    @property
    def listen(self) -> TcpAddress | None:
        """The address for consoles on other hosts; None: there is none."""
        listen = self.profile.console.listen
        return None if listen is None else parse_address(listen)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.layers)

    @property
    def groups(self) -> Groups:
        """The places of the engine: a process each."""
        return Groups(len(self.layers), self.profile.parallel.tensor)

    @staticmethod
    def load(path: Path) -> EngineConfig:
        """Read what the supervisor wrote."""
        return msgspec.json.decode(path.read_bytes(), type=EngineConfig)


def _check_source(model: ModelConfig) -> None:
    """Raise ValueError for a hub without a model, and for a folder with what belongs to a hub."""
    if model.source != "folder" and model.id is None:
        raise ValueError(f"model.source is {model.source}; it needs model.id, as ORG/NAME")
    for key in ("id", "revision"):
        if model.source == "folder" and getattr(model, key) is not None:
            raise ValueError(f"model.{key} is {getattr(model, key)}; it needs model.source: {' or '.join(REVISIONS)}")


def _check_tiers(tiers: TierConfig) -> None:
    """Raise ValueError for backends that cannot be."""
    if len(tiers.backends) > BACKENDS_MOST:
        raise ValueError(f"tiers.backends has {len(tiers.backends)} entries; at most {BACKENDS_MOST} are possible")
    for name, backend in tiers.backends.items():
        check_kind("tiers.backends: a name", name, BackendName)
        check_ranges(backend, f"tiers.backends.{name}.")
        same = [one for one, other in tiers.backends.items() if other.place == backend.place is not None]
        if same[1:]:
            raise ValueError(f"tiers.backends: {' and '.join(same)} are at one place; a quota counts all chunks of it")
    if tiers.backends and not tiers.host:
        raise ValueError("tiers.host is false; tiers.backends needs it")


def check_utilization(value: float) -> None:
    """Raise ValueError unless `value` can be a memory utilization at all."""
    if not 0.0 < value <= 1.0:
        raise ValueError(f"memory utilization is {value:g}; it must be above 0 and at most 1")


def profiles_dir() -> Path:
    """Return the folder of the bundled profiles: inside the wheel, or beside the packages in an editable install."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "profiles"
    return installed if installed.is_dir() else package.parents[1] / "profiles"


_MODEL_KEYS = "model.path, the folder of a model, or model.source and model.id of a hub"


def find_profile(name: str) -> Path:
    """Return the file of a profile named by path or by bundled name. Raises ConfigError with the bundled ones."""
    direct = Path(name)
    if direct.suffix in (".yaml", ".yml") or "/" in name:
        if _is_file(direct):
            return direct
        raise ConfigError(f"no profile at {name}; a profile is a .yaml file with {_MODEL_KEYS}")
    bundled = profiles_dir() / f"{name}.yaml"
    if _is_file(bundled):
        return bundled
    known = sorted(path.stem for path in profiles_dir().glob("*.yaml"))
    raise ConfigError(
        f"no profile {shown(name)}; bundled: {', '.join(known) or 'none'}; or give a path to a .yaml file"
    )


def _is_file(path: Path) -> bool:
    """Return whether there is a file; a name that no file can have is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def load_profile(name: str, settings: list[str] | None = None) -> Profile:
    """Return the profile `name` (bundled or a path) with `a.b=c` settings applied. Raises ConfigError."""
    from ppengine.common.yaml_reader import BYTES_MOST, YamlError, read_yaml

    path = find_profile(name)
    try:
        with path.open("rb") as file:
            data = read_yaml(file.read(BYTES_MOST + 1))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except YamlError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a profile is a mapping, this is {type(data).__name__}")
    for setting in settings or []:
        key, separator, text = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {shown(setting)}: write it as key=value, for example memory.utilization=0.5")
        try:
            _apply(data, key.strip(), read_yaml(text.encode("utf-8", "surrogateescape")))
        except ValueError as error:
            raise ConfigError(f"--set {shown(key)}: {error}") from None
    return build_profile(data, base=path.parent, where=str(path))


def build_profile(data: dict[str, Any], base: Path, where: str = "profile") -> Profile:
    """Return the validated profile of `data`; the model's path is taken relative to `base`. Raises ConfigError."""
    try:
        check_keys(data, Profile, "")
        data = _with_folder(data)
        check_missing(data, Profile, "")
        profile = msgspec.convert(data, Profile)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    path = Path(profile.model.path)
    if not path.is_absolute():
        model = msgspec.structs.replace(profile.model, path=str((base / path).resolve()))
        profile = msgspec.structs.replace(profile, model=model)
    return profile


def _with_folder(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` with the path of a hub's model, if it has none; keys were checked one by one."""
    model = data.get("model", {})
    if "path" in model or model.get("id") is None or model.get("source") not in REVISIONS:
        return data
    path = model_folder(model["source"], model["id"], model.get("revision"))
    return {**data, "model": {**model, "path": str(path)}}


def _apply(data: dict[str, Any], key: str, value: Any) -> None:
    """Change one key, named with its sections. Raises ValueError for an unknown one and a value that cannot be."""
    *parents, last = key.split(".")
    nested: Any = {last: value}
    for parent in reversed(parents):
        nested = {parent: nested}
    check_keys(nested, Profile, "")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ValueError(f"{parent} is a value, not a section")
    data[last] = value
