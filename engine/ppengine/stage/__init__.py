"""One pipeline stage: a process with some of the layers, their KV cache, and the edges to its neighbours.

`worker` is the process and its step loop, `runner` executes one step, `batch_state` keeps the requests by slot,
`kv_cache` the elastic memory, `transport` the edges, `control` the thread that answers while the loop is blocked.
"""
