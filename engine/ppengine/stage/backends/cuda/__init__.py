"""A stage on an NVIDIA GPU. Imported only if a stage has one; boot comes in by `cuda_hardware`.

`cuda_runner` launches steps, decodes through `decode_graphs`, short prompts through `chunk_graphs`;
`device_buffers` are its memory on the card for life. `device_ends` makes ends of edges from card to
card, `device_edges` and `device_tokens`, over `peer_memory` and `signals`; `staged_edges` are those
through host memory. `driver_api` calls the CUDA driver, `virtual_memory` maps and unmaps the memory
that `elastic_kv_cache` shows as tensors, `pinned_swap_space` is the pinned memory of swapped
blocks, `block_mover` orders the copies of `copy_lanes` between streams, `memory_accounts` books the
card's memory. `streams` names streams and events and declares them to the ledger, `host_copies` go
to the host with a step, `stream_progress` has the device write how far streams are.
"""
