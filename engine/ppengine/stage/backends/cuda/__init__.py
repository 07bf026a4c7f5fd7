"""A stage on an NVIDIA GPU. Imported only where a stage has one; `hardware` is where boot comes in.

`runner` launches steps, decodes through `graphs`, short prompts through `chunk_graphs`; `state` is what it keeps on the
card for life. `edges` are the ends of edges from card to card, over `peer_memory` and `signals`.
`driver` calls the CUDA driver, `virtual_memory` maps and unmaps what `kv_cache` shows as tensors, `host_pool` is the
pinned memory of swapped blocks, `block_mover` orders the copies of `lanes` between streams, `accounts` says where the
card's memory is. `streams` names streams and events and tells the ledger of them, `copies` are what goes to the host
with a step, `progress` has the device tell how far streams are, `rehearsal` replays the incidents of
`ppengine.stage.ledger` on them.
"""
