"""The stream and buffer ledger: which stream wrote a buffer, which read it, and the wait that orders the two.

`ledger` keeps vector clocks of streams and threads, and `order_rules` compares them at every
access. `actors` and `call_sites` are its records, `order_findings` words its findings. `storage`
and `kv_block_buffers` know memory that has no name. Nothing here imports torch.
"""
