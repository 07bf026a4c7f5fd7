"""From a profile to the concrete configuration of one boot, all that can be refused before a process is started."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import msgspec

from ppengine.checkpoint.model_spec import check_weights, read_spec
from ppengine.common.config import ConfigError, EngineConfig, EngineName, Profile, build_profile
from ppengine.common.partition import partition_layers
from ppengine.protocol import discovery
from ppengine.protocol.allowed_keys import allowed_path, read_allowed
from ppengine.protocol.keys import KeyFileError
from ppengine.protocol.kinds import check_kind
from ppengine.protocol.tcp_address import parse_address
from ppengine.supervisor.announcements import tell
from ppengine.supervisor.claims import new_id


def parse_profile(text: str) -> Profile:
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
    folder = Path(profile.model.path)
    spec = read_spec(folder)
    if profile.model.load_format != "dummy":
        check_weights(folder)
    parallel = profile.parallel
    layers = partition_layers(spec.num_layers, parallel.pipeline, parallel.partition, head=spec.head_layers)
    longest = spec.max_model_len if profile.model.max_model_len is None else profile.model.max_model_len
    if longest > spec.max_model_len:
        raise ConfigError(f"model.max_model_len is {longest}; this model serves at most {spec.max_model_len} tokens")
    if profile.model.max_model_len is None and spec.length_note:
        tell(f"note: {spec.length_note}")
    engine_id = new_id()
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
    )
