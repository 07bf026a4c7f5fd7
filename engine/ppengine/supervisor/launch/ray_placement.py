"""The placement group of an engine: a bundle a stage, and the strategy that spreads them over nodes."""

from __future__ import annotations

from ppengine.common.config import EngineConfig
from ppengine.supervisor.launch.ray_session import load_ray

_HERE = 0.001
"""Share of the resource that Ray gives each node: it ties a bundle to the node and takes nothing."""


def strategy(config: EngineConfig) -> str:
    """Return Ray's name of the strategy."""
    if config.cluster is None:
        return "STRICT_PACK"
    return config.profile.parallel.placement or "STRICT_SPREAD"


def bundles(config: EngineConfig) -> list[dict[str, float]]:
    """Return the resources of each stage; without other nodes all of them are on this host."""
    bundle: dict[str, float] = {"CPU": float(config.groups.tensor)}
    if config.cluster is not None and config.profile.parallel.device == "cuda":
        bundle["GPU"] = float(config.groups.tensor)
    if config.cluster is None:
        # Its stages share the cards of this host, as those of other executors do.
        bundle[f"node:{load_ray().util.get_node_ip_address()}"] = _HERE
    return [dict(bundle) for _ in range(config.stages)]


def unplaced(config: EngineConfig, seconds: float) -> str:
    """Return one line about a group that Ray has not placed in time: the need, the room, the remedy."""
    ray = load_ray()
    free, wanted = ray.available_resources(), bundles(config)[0]
    nodes = sum(bool(one["Alive"]) for one in ray.nodes())
    need = " and ".join(f"{wanted[name]:g} {name}" for name in ("CPU", "GPU") if name in wanted)
    have = " and ".join(f"{free.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name in wanted)
    text = f"Ray has not placed {config.stages} stages by {strategy(config)} in {seconds:g} s: each needs {need}, "
    if config.cluster is None:
        return f"{text}this host's cluster has {have} free; free some, or set parallel.executor=local"
    return f"{text}the {nodes} nodes have {have} free; free some, or set parallel.placement to another one"
