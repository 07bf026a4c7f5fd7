"""A real supervisor over stand-ins: `python -m standins.supervisor NAME STAGES`."""

import os
import sys
import time

import msgspec
from ppengine.common import lifeline
from ppengine.common.cluster import Cluster, free_ports
from ppengine.common.config import EngineConfig, Profile
from ppengine.common.profile_sections import ModelConfig
from ppengine.common.tier_config import BackendConfig, TierConfig
from ppengine.protocol import discovery
from ppengine.protocol.reports import ProcessInfo
from ppengine.supervisor.announcements import announce, tell
from ppengine.supervisor.claims import new_id
from ppengine.supervisor.launch.local import LocalExecutor
from ppengine.supervisor.launch.ray_launcher import RayExecutor
from ppengine.supervisor.supervise import Modules, Supervisor
from ppengine.supervisor.wakeup import Wakeup


class Elsewhere(LocalExecutor):
    """The last stage seems to be on node `b`, where its store has ended."""

    def poll(self) -> list[ProcessInfo]:
        infos = [msgspec.structs.replace(info, node="b" if info.stage == stages - 1 else "") for info in super().poll()]
        end = {"exit_code": -9, "detail": "killed by SIGKILL", "node": "b"}
        return [*infos, ProcessInfo(role=f"store{stages - 1}", stage=None, rank=None, pid=1, **end)]


wakeup = Wakeup()
wakeup.install()
name, stages = sys.argv[1], int(sys.argv[2])
lifeline.adopt(
    int(sys.argv[4]) if len(sys.argv) > 3 else None, on_close=lambda: wakeup.ask("its program has ended or closed it")
)
stores = os.environ.get("STANDIN_STORES")
tiers = TierConfig(host=True, backends={"m": BackendConfig(kind="memory")}) if stores else TierConfig()
nodes = os.environ.get("STANDIN_NODES")
engine_id = os.environ.get("STANDIN_ID") or new_id()
config = EngineConfig(
    id=engine_id,
    name=name,
    epoch="e" * 32,
    profile=Profile(name=name, model=ModelConfig(path="/nowhere", skip_tokenizer=True), tiers=tiers),
    model_path="/nowhere",
    model_type="llama",
    layers=[(stage, stage + 1) for stage in range(stages)],
    max_model_len=8,
    run_dir=str(discovery.runtime_dir() / engine_id),
    ring_dir=str(discovery.ring_dir(engine_id)),
    started_wall=time.time(),
    cluster=Cluster("127.0.0.1", free_ports("127.0.0.1")) if nodes else None,
)
modules = Modules("standins.gateway", "standins.core", "standins.agent")
stage = os.environ.get("STANDIN_STAGE", "standins.stage")
local = Elsewhere(stage) if nodes else LocalExecutor(stage)
executor = RayExecutor() if os.environ.get("STANDIN_EXECUTOR") == "ray" else local
within = os.environ.get("STANDIN_WITHIN")
end = Supervisor(config, executor, wakeup, modules, within_s=float(within) if within else None).run()
tell(f"error: {end.reason}" if end.code else f"stopped: {end.reason}")
announce("stopped", code=end.code, reason=end.reason)
sys.exit(end.code)
