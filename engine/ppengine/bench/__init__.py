"""`ppconsole bench`: the engine's throughput, beside transformers' `generate` and with or without watchers."""
