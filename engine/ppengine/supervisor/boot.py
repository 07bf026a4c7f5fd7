"""From a profile to the concrete configuration of one boot, all that can be refused before a process is started."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import msgspec

from ppengine.checkpoint.model_shard import refusal
from ppengine.checkpoint.model_spec import check_weights, read_spec
from ppengine.common import cluster
from ppengine.common.cluster import Cluster
from ppengine.common.config import ConfigError, EngineConfig, EngineName, Profile, build_profile
from ppengine.common.partition import partition_layers
from ppengine.protocol import discovery
from ppengine.protocol.allowed_keys import allowed_path, read_allowed
from ppengine.protocol.error_text import shown
from ppengine.protocol.keys import KeyFileError
from ppengine.protocol.kinds import check_kind
from ppengine.protocol.tcp_address import parse_address
from ppengine.supervisor.announcements import tell
from ppengine.supervisor.claims import new_id
from ppengine.supervisor.http_port import check_http


def parse_profile(text: bytes) -> Profile:
    """Return the profile in JSON `text`; its model path is taken relative to the working folder. Raises ConfigError."""
    try:
        data = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise ConfigError(f"--profile-json: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"--profile-json: a profile is an object, this is {type(data).__name__}")
    return build_profile(data, base=Path.cwd(), where="--profile-json")


def check_keys(profile: Profile) -> None:
    """Raise ConfigError for an engine that other hosts could reach while no key there is allowed."""
    listen = profile.console.listen
    if listen is None or parse_address(listen).loopback:
        return
    try:
        keys, _ = read_allowed(allowed_path())
    except KeyFileError as error:
        raise ConfigError(f"console.listen is {listen}, and its keys cannot be read: {error}") from None
    if not keys:
        text = "no key is allowed that could use it: ppconsole key allow NAME KEY --role ROLE"
        raise ConfigError(f"console.listen is {listen}, which other hosts can reach, and {text}")


def engine_config(
    profile: Profile, name: str | None, *, allow_faults: bool = False, keeper: tuple[int, int] | None = None
) -> EngineConfig:
    """Return the configuration of a new boot of `profile` under `name` (None: the profile's).

    Reads the model's config.json and, unless the weights are dummies, the headers of its weight files.
    Raises ConfigError for the profile, CheckpointError for the model's folder.
    """
    name = profile.name if name is None else name
    try:
        check_kind("engine name", name, EngineName)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    check_keys(profile)
    check_http(profile)
    folder = Path(profile.model.path)
    spec = read_spec(folder)
    if profile.model.load_format != "dummy":
        check_weights(folder)
    parallel = profile.parallel
    layers = partition_layers(spec.num_layers, parallel.pipeline, parallel.partition, head=spec.head_layers)
    if text := refusal(spec, parallel.tensor):
        raise ConfigError(text)
    longest = spec.max_model_len if profile.model.max_model_len is None else profile.model.max_model_len
    if longest > spec.max_model_len:
        raise ConfigError(f"model.max_model_len is {longest}; this model serves at most {spec.max_model_len} tokens")
    if profile.model.max_model_len is None and spec.length_note:
        tell(f"note: {spec.length_note}")
    engine_id, reach = new_id(), reach_of(profile)
    return EngineConfig(
        id=engine_id,
        name=name,
        epoch=uuid.uuid4().hex,
        profile=profile,
        model_path=str(folder),
        model_type=spec.model_type,
        layers=layers,
        max_model_len=longest,
        run_dir=str(discovery.runtime_dir() / engine_id),
        ring_dir=str(discovery.ring_dir(engine_id)),
        started_wall=time.time(),
        allow_faults=allow_faults,
        keeper=keeper,
        cluster=reach,
        address="127.0.0.1" if reach is None else reach.address,
    )


def reach_of(profile: Profile) -> Cluster | None:
    """Return how stages on other nodes reach the engine; None if all of them are on this host. Raises ConfigError."""
    parallel, ray = profile.parallel, os.environ.get("RAY_ADDRESS", "")
    if parallel.executor != "ray":
        for key in ("placement", "listen"):
            if getattr(parallel, key) is not None:
                raise ConfigError(f"parallel.{key} is set; it needs parallel.executor=ray")
        return None
    if parallel.placement == "STRICT_PACK" or (parallel.placement is None and not ray):
        return None
    if not ray:
        raise ConfigError(f"parallel.placement is {parallel.placement}; it needs a Ray cluster: set RAY_ADDRESS")
    try:
        if parallel.listen is not None:
            listen = parse_address(parallel.listen)
            if listen.six or listen.loopback or listen.host == "0.0.0.0":
                raise ConfigError(f"parallel.listen is {listen}; it must have an IPv4 address that other nodes reach")
            if listen.port + len(cluster.NAMES) > 65_536:
                raise ConfigError(
                    f"parallel.listen is {listen}: it is the first of {len(cluster.NAMES)} ports up to 65535"
                )
            return Cluster(listen.host, {name: listen.port + place for place, name in enumerate(cluster.NAMES)})
        address = cluster.own_address("" if ray == "auto" else ray.removeprefix("ray://"))
        return Cluster(address, cluster.free_ports(address))
    except (OSError, ValueError) as error:
        remedy = "set parallel.listen=tcp://ADDRESS:PORT"
        raise ConfigError(f"no address for other nodes on the way to {shown(ray)}: {error}; {remedy}") from None
