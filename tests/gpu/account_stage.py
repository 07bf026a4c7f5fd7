"""A process that comes up as a stage does, and prints the parts of its card's memory as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from ppengine.stage.backends.cuda.memory_accounts import Account, Card


def main(uuid: str, store: str) -> None:
    card = Card(uuid)
    account = Account(card.read())
    import torch
    import torch.distributed as dist
    from ppengine.stage.backends.base import KvShape
    from ppengine.stage.backends.cuda.driver_api import Driver
    from ppengine.stage.backends.cuda.elastic_kv_cache import CudaKvCache
    from ppengine.stage.backends.cuda.streams import Stream

    driver = Driver(0)
    torch.mm(*torch.randn(2, 512, 512, device="cuda", dtype=torch.bfloat16))
    account.close("context", card.read())
    dist.init_process_group("nccl", store=dist.FileStore(store, 1), rank=0, world_size=1)
    dist.all_reduce(torch.ones(64 * 2**20, device="cuda"))
    torch.cuda.synchronize()
    account.close("communicator", card.read())
    weights = [torch.randn(4096, 12288, device="cuda", dtype=torch.bfloat16) for _ in range(60)]
    x = torch.randn(256, 4096, device="cuda", dtype=torch.bfloat16)
    torch.mm(x, weights[0])
    torch.cuda.synchronize()
    graphs = []
    pool = torch.cuda.graph_pool_handle()
    account.close("context", card.read())
    for rows in (1, 8, 64, 256):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outs = [torch.mm(x[:rows], weight) for weight in weights]
        graph.replay()
        graphs.append((graph, outs))
    torch.cuda.synchronize()
    account.close("graphs", card.read())
    compute = Stream("compute", driver.device)
    cache = CudaKvCache(KvShape(8, 16, 8, 128, torch.bfloat16), 200_000, driver, compute)
    assert not cache.map_blocks(40 * 1024)
    held = sum(weight.nbytes for weight in weights)
    reading = card.read(cache.mapped_bytes)
    parts = account.parts(reading, held)
    print(json.dumps({**asdict(parts), "nvml_used": reading.used, "own": reading.own, "total": card.total}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
