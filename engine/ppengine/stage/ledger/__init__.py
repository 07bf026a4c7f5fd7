"""The stream and buffer ledger: who wrote what on which stream, who reads it, and what orders the two.

`ledger` keeps vector clocks of streams and threads and compares them at every access; `actors` and `sites` are what it
is made of, `troubles` says in words what it finds; `storage` and `blocks` know memory that has no name. `fakes` are
streams, events and a buffer pool without a device, and `incidents` replays known failures on them, or on any other
`runtime`. Nothing here imports torch.
"""
